/* Moving averages with diagonal states on CPUs: h_t = q h_{t-1} + p x_t, y_t = Re sum_n w_n h_{t,n}.
 *
 * Forward and backward pass of `damped_ema`, `complex_ema` and `diagonal_ssm`, and their steps. C11 with the vector
 * extensions of GCC and Clang, without headers of Python or PyTorch; native.py calls it by ctypes. Inputs and results are
 * float32 or bfloat16, intermediate results float32; states and sums of gradients are carried in float64.
 *
 * Positions are processed in tiles of TILE, and channels in blocks of LANES, the numbers in a vector. In a tile that starts
 * with the states h, and with x_j = 0 outside of the tile,
 *
 *     y_j = sum_{i <= j} k_{j-i} x_i + Re sum_n q^{j+1} w h     k_l = Re sum_n p w q^l
 *     h'  = q^TILE h + p S                                      S = sum_j q^{TILE-1-j} x_j
 *
 * These are products of small matrices with powers of q that are computed in float64, so rounding errors do not accumulate,
 * and no position waits for the one before it. A complex number is two real ones: its products are real, too.
 *
 * Gradients of the loss L: the adjoint G of a complex number h is defined by dL = Re(G dh), so that the rules for real and
 * complex numbers are the same; the gradient of the pair (Re h, Im h) is (Re G, -Im G). With the gradients g_j of y_j,
 * A = sum_j q^{j+1} g_j, B = the same sum with the factors j+1, S' = the sum S with the factors TILE-1-j:
 *
 *     g of x_i = sum_{j >= i} k_{j-i} g_j + Re sum_n q^{TILE-1-i} p G     g of k_l = sum_j g_j x_{j-l}
 *     G of w = A h     G of p = Re(G S)     G of log q = w B h + G (TILE q^TILE h + p S')     G of h = q^TILE G + w A
 *
 * native_vectors.h is the code of one instruction set, and is included once for each of them.
 */
#if defined(__FAST_MATH__)
#error "-ffast-math omits the checks for NaN; compile without it"
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum {
    TILE = 16,
    POWERS = TILE + 1,
    TILES = 4,         /* tiles that are computed together */
    MOST_THREADS = 64,
    LEAST_UNITS = 64,  /* of a backward pass: if there are fewer blocks of channels, it is divided by sequences */
    LARGE = 8 << 20    /* bytes of a result from which on large pages are requested */
};

/* A call for S sequences, with R = directions * channels rows of coefficients, of which rows from `channels` on run from the
 * end, and P = 1 or 2 (complex) real numbers in a state. Arrays are contiguous. */
typedef struct {
    const void *x, *gradient;       /* [total, D]; the gradient of the result (backward) */
    void *out;                      /* [total, D]; the result, or the gradient of x (backward) */
    const uint8_t *mask;            /* [total], 0 = x counts as 0; or NULL = all positions are kept */
    const int64_t *bounds;          /* [S + 1]: first positions of the sequences; or NULL = all have `length` positions */
    const double *q;                /* [R, N, P] */
    const float *in, *weight;       /* p [R, N]; w [R, N, P] */
    const float *skip;              /* [D] or NULL */
    const float *initial;           /* [S, D, N, P] or NULL = 0 */
    float *final;                   /* [S, D, N, P] or NULL */
    const float *grad_final;        /* [S, D, N, P] or NULL = 0 */
    float *grad_initial;            /* [S, D, N, P] or NULL */
    float *grad_decay, *grad_radians; /* [R, N]: by log |q|, and by the angle of q in radians (P = 2) */
    float *grad_in, *grad_weight;   /* [R, N]; [R, N, P] */
    float *grad_skip;               /* [D] or NULL */
    int64_t sequences, length, channels, states;
    int32_t components, directions;
    int32_t shift;                  /* the second direction starts at the next position */
    int32_t silu;                   /* the result is silu(average + skip x) without the mask of x; otherwise with it, linear */
    int32_t half;                   /* x, out and gradient are bfloat16 */
    int32_t threads;
} Call;

/* One position of S sequences; M = N P numbers in the states of a channel. */
typedef struct {
    const void *x;                      /* [S, D] */
    const float *before;                /* [S, D, M] */
    void *out;                          /* [S, D] */
    float *after;                       /* [S, D, M] */
    const uint8_t *mask;                /* [S] or NULL; rows that are not kept keep their states */
    const float *change, *in, *weight;  /* [D, M]: q - 1, p and w; complex: pairs, (p, 0) and (Re w, -Im w) */
    const float *skip;                  /* [D] or NULL */
    int64_t sequences, channels, numbers;
    int32_t components, silu, half;
} Step;

/* The coefficients of `damped_ema` from R N parameters each, and backwards the gradients of the parameters. */
typedef struct {
    const float *input, *damping, *expansion, *projection;
    double *q;                                  /* 1 - p a, with the sigmoids p and a of both logits */
    float *in, *weight;                         /* p expansion, and scale projection */
    const float *grad_log, *grad_in, *grad_weight; /* NULL: forward */
    float *grad_input, *grad_damping, *grad_expansion, *grad_projection;
    int64_t count;
    float scale;
} Damped;

/* The work on one call. Threads take one unit after another. */
typedef struct Job {
    const Call *call;
    atomic_llong next;
    atomic_int failed;
    int64_t units, groups; /* a unit of a backward pass is a block of channels of a group of sequences */
    int64_t size;
    double *totals;        /* [units, size]: the sums of the gradients of the coefficients */
    int (*work)(struct Job *);
} Job;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t first_of(const Call *c, int64_t sequence) { return c->bounds ? c->bounds[sequence] : sequence * c->length; }

static void *job_main(void *argument) {
    Job *job = argument;
#if defined(__x86_64__) /* numbers that are too small to be normal count as 0: they take a hundred times as long */
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
#endif
    if (job->work(job)) atomic_store(&job->failed, 1);
#if defined(__x86_64__)
    _mm_setcsr(before);
#endif
    return NULL;
}

/* New memory has pages of 4 kB, which take longer than the average: 2 ns per number, or .3 with pages of 2 MB. */
static void advise(const Call *c) {
#if defined(MADV_HUGEPAGE)
    uintptr_t page = 4096, bytes = (uintptr_t)(first_of(c, c->sequences) * c->channels) * (c->half ? 2 : 4);
    uintptr_t start = ((uintptr_t)c->out + page - 1) & ~(page - 1), stop = ((uintptr_t)c->out + bytes) & ~(page - 1);
    if (bytes >= LARGE) madvise((void *)start, stop - start, MADV_HUGEPAGE);
#else
    (void)c;
#endif
}

/* Threads are created for each call: there is no pool that a forked process would lack. The caller works, too. */
static int run(Job *job) {
    pthread_t threads[MOST_THREADS];
    int count = 0, wanted = (int)least(job->call->threads, job->units) - 1;
    advise(job->call);
    for (; count < wanted && count < MOST_THREADS; count++)
        if (pthread_create(&threads[count], NULL, job_main, job)) break;
    job_main(job);
    while (count) pthread_join(threads[--count], NULL);
    return atomic_load(&job->failed);
}

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(a) PASTE(a, SUFFIX)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 16")

/* LANES; the sums that fit into registers: ROWS of one tile, SUMS of several tiles; conversions of a half of a vector to
 * float64, and of two halves to float32, which compilers do not translate well if they are wider than a register. */
#if defined(__x86_64__)
#define SUFFIX avx512
#define LANES 16
#define ROWS 16
#define SUMS 16
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define WIDEN(half) ((D)_mm512_cvtps_pd((__m256)(half)))
#define NARROW(wide) _mm256_castps_pd(_mm512_cvtpd_ps((__m512d)(wide)))
#define JOIN(low, high) ((V)_mm512_insertf64x4(_mm512_castpd256_pd512(NARROW(low)), NARROW(high), 1))
#include "native_vectors.h"
#define SUFFIX avx2
#define LANES 8
#define ROWS 8
#define SUMS 8
#define TARGET __attribute__((target("avx2,fma")))
#define WIDEN(half) ((D)_mm256_cvtps_pd((__m128)(half)))
#define JOIN(low, high) ((V)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)(high)), _mm256_cvtpd_ps((__m256d)(low))))
#include "native_vectors.h"
#endif
#define SUFFIX base
#define LANES 4
#define ROWS 8
#define SUMS 8
#define TARGET
#define WIDEN(half) __builtin_convertvector(half, D)
#define JOIN(low, high) \
    (((union { F half[2]; V both; }){{__builtin_convertvector(low, F), __builtin_convertvector(high, F)}}).both)
#include "native_vectors.h"

/* The best instruction set: 2 = AVX-512, 1 = AVX2 and FMA, 0 = none of them. `__builtin_cpu_supports` needs a part of the
 * compiler's library that some builds of Clang lack; there it returns 0 without a message. */
static int detect(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d, low, high, wanted = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX) || !(c & bit_FMA)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* the registers that the operating system saves */
    if ((low & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 0;
    return (low & 0xe6) == 0xe6 && (b & wanted) == wanted ? 2 : 1;
#else
    return 0;
#endif
}

static atomic_int level = -1;

/* Set the instruction set (-1 = the best one), and return the one in use. */
int moving_average_level(int wanted) {
    int best = detect();
    atomic_store(&level, wanted < 0 || wanted > best ? best : wanted);
    return atomic_load(&level);
}

#if defined(__x86_64__)
#define CHOOSE(f, argument) \
    int now = atomic_load(&level); \
    if (now < 0) now = moving_average_level(-1); \
    return now == 2 ? f##_avx512(argument) : now == 1 ? f##_avx2(argument) : f##_base(argument)
#else
#define CHOOSE(f, argument) return f##_base(argument)
#endif

/* Return 0, or 1 if memory is not available. */
int moving_average_forward(const Call *c) { CHOOSE(forward, c); }
int moving_average_backward(const Call *c) { CHOOSE(backward, c); }
int moving_average_step(const Step *s) { CHOOSE(step, s); }
int moving_average_damped(const Damped *d) { CHOOSE(damped, d); }

/* The version and the sizes of the structures, which the caller compares with its own; increase it with every change of
 * what a function expects or does. */
int moving_average_version(void) { return 1; }
int moving_average_sizes(int i) { return i == 0 ? sizeof(Call) : i == 1 ? sizeof(Step) : sizeof(Damped); }
