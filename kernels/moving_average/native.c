/* Moving averages with diagonal states on CPUs: h_t = q h_{t-1} + p x_t, y_t = Re sum_n w_n h_{t,n}.
 *
 * Forward and backward pass of `damped_ema`, `complex_ema` and `diagonal_ssm`, and their steps. Plain C11 with the vector
 * extensions of GCC and Clang, without headers of Python or PyTorch; native.py calls it by ctypes. Inputs and results are
 * float32 or bfloat16, intermediate results float32, states between tiles and sums of gradients float64.
 *
 * The positions of a sequence are processed in tiles of TILE, and the channels in blocks of LANES, the numbers in a vector.
 * In a tile that starts with the states h, with x_j = 0 outside of the tile (Mega: section 3.3; Megalodon: section 3.1):
 *
 *     y_j = sum_{i <= j} k_{j-i} x_i + Re sum_n q^{j+1} (w h)     k_l = Re sum_n p w q^l
 *     h'  = q^TILE h + p sum_j q^{TILE-1-j} x_j
 *
 * All these sums are products of small matrices, with the powers of q from float64, so no error accumulates in a tile, and
 * nothing waits for the previous position. A complex number is two real ones: the matrices are real in any case.
 *
 * Gradients are those of the real loss L: an adjoint G of a complex number h means dL = Re(G dh). Then all rules of the
 * real case apply to complex numbers unchanged; only at the end, G becomes the pair (Re G, -Im G). With the gradients g_j
 * of y_j, A = sum_j q^{j+1} g_j, B = sum_j (j+1) q^{j+1} g_j, S = sum_j q^{TILE-1-j} x_j, S' = the same times TILE-1-j:
 *
 *     dL/dx_i = sum_{j >= i} k_{j-i} g_j + Re sum_n q^{TILE-1-i} p G     dL/dk_l = sum_j g_j x_{j-l}
 *     dL/dw = A h     dL/dp = Re(G S)     dL/dlog q = w B h + G (TILE q^TILE h + p S')     G of h = q^TILE G + w A
 *
 * This file includes itself once per instruction set; the second half is the code of one of them.
 */
#ifndef LANES

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
    TILES = 4,          /* complete tiles that are computed together */
    POWERS = TILE + 1,  /* q^0 to q^TILE */
    LAGS = 2 * TILE,    /* from -TILE on; the first one is 0 */
    MOST_THREADS = 64,
    LEAST_UNITS = 64,   /* of a backward pass, which is divided by sequences if there are fewer blocks of channels */
    LARGE = 8 << 20     /* bytes of a result from which on large pages pay off */
};

/* A call for S sequences. R = directions * channels rows of coefficients, rows from `channels` on run from the end; P = 1
 * or 2 real numbers in a state (`parts`). Arrays are contiguous, and NULL where it is allowed. */
typedef struct {
    const void *x, *gradient;       /* [total, D]; the gradient of the result (backward only) */
    void *out;                      /* [total, D]; the result; backward: the gradient of x */
    const uint8_t *mask;            /* [total], 0 = x counts as 0; or NULL = all positions are kept */
    const int64_t *bounds;          /* [S + 1] first positions of the sequences; or NULL = all have `length` positions */
    const double *q;                /* [R, N, P] */
    const float *in, *weight;       /* p [R, N] or NULL = 1; w [R, N, P] */
    const float *skip;              /* [D] or NULL */
    const float *initial;           /* [S, D, N, P] or NULL = 0 */
    float *final;                   /* [S, D, N, P] or NULL */
    const float *grad_final;        /* [S, D, N, P] or NULL = 0 */
    float *grad_initial;            /* [S, D, N, P] or NULL */
    float *grad_decay, *grad_phase; /* [R, N]; the gradients by log |q| and by the angle of q (NULL if P = 1) */
    float *grad_in, *grad_weight;   /* as `in` (or NULL) and `weight` */
    float *grad_skip;
    int64_t sequences, length, channels, states;
    int32_t parts, directions;
    int32_t shift;                  /* the second direction starts at the next position */
    int32_t silu;                   /* y is silu(average + skip x), with x at masked positions, too; otherwise linear */
    int32_t half;                   /* x, out and gradient are bfloat16 */
    int32_t threads;
} Call;

/* One position of S sequences, with coefficients as in `ema_coefficients`, M = N P numbers in the states of a channel. */
typedef struct {
    const void *x;                      /* [S, D] */
    const float *before;                /* [S, D, M] */
    void *out;
    float *after;
    const uint8_t *mask;                /* [S] or NULL; rows that are not kept keep their states */
    const float *change, *in, *weight;  /* [D, M]: q - 1, p and w; complex: pairs, (p, 0) and (Re w, -Im w) */
    const float *skip;                  /* [D] or NULL */
    int64_t sequences, channels, numbers;
    int32_t parts, silu, half;
} Step;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t first_of(const Call *c, int64_t sequence) { return c->bounds ? c->bounds[sequence] : sequence * c->length; }

/* The work on one call, which threads divide among themselves: units are taken in order. */
typedef struct Job {
    const Call *call;
    atomic_llong next;
    atomic_int failed;
    int64_t units, groups;
    double *totals; /* [units, size]; the sums of gradients */
    int64_t size;
    int (*work)(struct Job *);
} Job;

/* Numbers below the normal range take a hundred times as long, and decaying states pass through it: they count as 0. */
static unsigned set_rounding(unsigned control) {
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(control);
    return before;
#else
    return control;
#endif
}

static void *job_main(void *argument) {
    Job *job = argument;
    unsigned before = set_rounding(0x9fc0); /* to nearest, no exceptions, flush to zero, denormals are zero */
    if (job->work(job)) atomic_store(&job->failed, 1);
    set_rounding(before);
    return NULL;
}

/* Threads are created for each call: there is no pool that a forked process would lack. The caller works, too. */
static int run(Job *job) {
    pthread_t threads[MOST_THREADS];
    int count = 0, wanted = (int)least(job->call->threads, job->units) - 1;
    for (; count < wanted && count < MOST_THREADS; count++)
        if (pthread_create(&threads[count], NULL, job_main, job)) break;
    job_main(job);
    while (count) pthread_join(threads[--count], NULL);
    return atomic_load(&job->failed);
}

static float from_half(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(a) PASTE(a, SUFFIX)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__x86_64__)
#define SUFFIX avx512
#define LANES 16
#define ROWS 16
#define SUMS_AT_ONCE 16
#define WIDEN(half) ((D)_mm512_cvtps_pd((__m256)(half)))
#define JOIN(low, high) \
    ((V)_mm512_castpd_ps(_mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_castps_pd(_mm512_cvtpd_ps((__m512d)(low)))), \
                                            _mm256_castps_pd(_mm512_cvtpd_ps((__m512d)(high))), 1)))
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#include "native.c"
#define SUFFIX avx2
#define LANES 8
#define ROWS 8
#define SUMS_AT_ONCE 8
#define WIDEN(half) ((D)_mm256_cvtps_pd((__m128)(half)))
#define JOIN(low, high) ((V)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)(high)), _mm256_cvtpd_ps((__m256d)(low))))
#define TARGET __attribute__((target("avx2,fma")))
#include "native.c"
#define SUFFIX base
#define LANES 4
#define ROWS 8
#define SUMS_AT_ONCE 8
#define WIDEN(half) __builtin_convertvector(half, D)
#define JOIN(low, high) (((union { F half[2]; V both; }){{__builtin_convertvector(low, F), __builtin_convertvector(high, F)}}).both)
#define TARGET
#include "native.c"
#else
#define SUFFIX base
#define LANES 4
#define ROWS 16
#define SUMS_AT_ONCE 16
#define WIDEN(half) __builtin_convertvector(half, D)
#define JOIN(low, high) (((union { F half[2]; V both; }){{__builtin_convertvector(low, F), __builtin_convertvector(high, F)}}).both)
#define TARGET
#include "native.c"
#endif

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

static int chosen(void) {
    int now = atomic_load(&level);
    return now < 0 ? moving_average_level(-1) : now;
}

#if defined(__x86_64__)
#define CHOOSE(f, argument) \
    switch (chosen()) { \
    case 2: return f##_avx512(argument); \
    case 1: return f##_avx2(argument); \
    } \
    return f##_base(argument)
#else
#define CHOOSE(f, argument) return f##_base(argument)
#endif

/* Large results are new memory, whose pages take longer than the average: 2 ns per number in pages of 4 kB, .3 in 2 MB. */
static void advise(const Call *c) {
#if defined(MADV_HUGEPAGE)
    uintptr_t page = 4096, bytes = (uintptr_t)(first_of(c, c->sequences) * c->channels) * (c->half ? 2 : 4);
    uintptr_t start = ((uintptr_t)c->out + page - 1) & ~(page - 1), stop = ((uintptr_t)c->out + bytes) & ~(page - 1);
    if (bytes >= LARGE) madvise((void *)start, stop - start, MADV_HUGEPAGE);
#else
    (void)c;
#endif
}

static int forward(const Call *c) { CHOOSE(forward, c); }
static int backward(const Call *c) { CHOOSE(backward, c); }

/* Return 0, or 1 if memory is not available. */
int moving_average_forward(const Call *c) {
    advise(c);
    return forward(c);
}

int moving_average_backward(const Call *c) {
    advise(c);
    return backward(c);
}

int moving_average_step(const Step *s) { CHOOSE(step, s); }

/* The sizes of the structures, which the caller compares with its own. */
int moving_average_sizes(int of_step) { return of_step ? sizeof(Step) : sizeof(Call); }

#else /* the code of one instruction set */

#define V NAME(vector)
#define I NAME(integers)
#define B NAME(halves)
#define F NAME(narrow)
#define D NAME(wide)
#define Side NAME(side)
#define Work NAME(work)
typedef float V __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t I __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t B __attribute__((vector_size(2 * LANES), may_alias));
typedef float F __attribute__((vector_size(2 * LANES), may_alias));  /* a half of V; */
typedef double D __attribute__((vector_size(4 * LANES), may_alias)); /* the same numbers in float64 */

/* One direction: coefficients and states of a block of channels; n = a state, m = n P + part = a real number of it.
 * Arrays of D contain two vectors for the channels of one V. */
typedef struct {
    V *power;                   /* [M][POWERS] */
    V *w, *p;                   /* [M], [N] */
    V *start, *sum, *a;         /* [TILES][M] w h with -Im; [2][TILES][M] S and S', A and B */
    V *part_w, *part_log, *part_p; /* [M], [M], [N]: sums of TILES tiles, contiguous */
    V *states, *starts, *ends;  /* [tiles][M]: h, w h and p G of each tile */
    D *q;                       /* [M][2] */
    D *last, *rest;             /* [M][2]: q^TILE, and q^size of a shorter tile */
    D *state, *adjoint;         /* [M][2]: h and G */
    D *grad_w, *grad_log, *grad_p; /* [M][2], [M][2], [N][2]: sums of all tiles, contiguous */
} Side;

typedef struct {
    const Call *call;
    int64_t block, first, lanes, numbers; /* the channels from `first` on; numbers = N P */
    Side side[2];
    V taps[LAGS], skip;     /* k at TILE + lag, of both directions, with the skip at lag 0 */
    D grad_taps[LAGS][2], grad_skip[2];
    V *rows;                    /* [length]: the gradient of the argument of silu */
    void *memory;
} Work;

INLINE V NAME(load)(const void *from, int64_t at, int64_t lanes, int half) {
    V x = {0};
    if (!half) {
        if (lanes == LANES) memcpy(&x, (const float *)from + at, sizeof x);
        else memcpy(&x, (const float *)from + at, (size_t)lanes * 4);
        return x;
    }
    B bits = {0};
    if (lanes == LANES) memcpy(&bits, (const uint16_t *)from + at, sizeof bits);
    else memcpy(&bits, (const uint16_t *)from + at, (size_t)lanes * 2);
    return (V)(__builtin_convertvector(bits, I) << 16);
}

INLINE void NAME(save)(void *to, int64_t at, V x, int64_t lanes, int half) {
    if (!half) {
        if (lanes == LANES) memcpy((float *)to + at, &x, sizeof x);
        else memcpy((float *)to + at, &x, (size_t)lanes * 4);
        return;
    }
    I bits = (I)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (I)(x != x);
    B result = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), B);
    if (lanes == LANES) memcpy((uint16_t *)to + at, &result, sizeof result);
    else memcpy((uint16_t *)to + at, &result, (size_t)lanes * 2);
}

INLINE V NAME(sigmoid)(V z) {
    V a = -z, most = a - a + 87.0f;
    I high = (I)(a > most), low = (I)(a < -most);
    a = (V)((high & (I)most) | (low & (I)-most) | (~(high | low) & (I)a));
    V t = a * 1.44269504f + 12582912.0f, n = t - 12582912.0f; /* rounded to an integer, which is in the last bits of t */
    V r = a - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    V e = r * 1.9875691500e-4f + 1.3981999507e-3f; /* Cephes: exp in float32 */
    e = e * r + 8.3334519073e-3f;
    e = e * r + 4.1665795894e-2f;
    e = e * r + 1.6666665459e-1f;
    e = e * r + 5.0000001201e-1f;
    e = e * (r * r) + r + 1.0f;
    e = (V)((I)e + ((I)t << 23));
    return 1.0f / (1.0f + e);
}

/* A half of a vector in float64, and two halves in float32: compilers divide a conversion that is wider than a register. */
INLINE D NAME(widen)(const V *x, int half) { return WIDEN(((const F *)x)[half]); }
INLINE V NAME(join)(D low, D high) { return JOIN(low, high); }

/* Load the rows of a tile into the cache: they are too far apart for the processor to do so ahead of time. */
INLINE void NAME(fetch)(const Work *k, const void *from, int64_t t) {
    int64_t width = k->call->half ? 2 : 4;
    const char *at = (const char *)from + (t * k->call->channels + k->first) * width;
    for (int j = 0; j < TILE; j++, at += k->call->channels * width) __builtin_prefetch(at, 0, 2);
}

/* Load `rows` rows from t on, and 0 for masked positions and up to the end of the last tile. */
INLINE void NAME(load_tiles)(const Work *k, V *tile, const void *from, const uint8_t *mask, int64_t t, int64_t rows, int64_t columns) {
    const Call *c = k->call;
    int64_t j;
    if (k->lanes == LANES && !mask && !c->half) {
        const float *row = (const float *)from + t * c->channels + k->first;
        for (j = 0; j < rows; j++, row += c->channels) memcpy(&tile[j], row, sizeof(V));
    } else {
        for (j = 0; j < rows; j++) {
            tile[j] = (V){0};
            if (!mask || mask[t + j]) tile[j] = NAME(load)(from, (t + j) * c->channels + k->first, k->lanes, c->half);
        }
    }
    for (; j < columns * TILE; j++) tile[j] = (V){0};
}

INLINE void NAME(save_tiles)(const Work *k, const V *tile, int64_t t, int64_t rows) {
    const Call *c = k->call;
    if (k->lanes == LANES && !c->half) {
        float *row = (float *)c->out + t * c->channels + k->first;
        for (int64_t j = 0; j < rows; j++, row += c->channels) memcpy(row, &tile[j], sizeof(V));
    } else {
        for (int64_t j = 0; j < rows; j++) NAME(save)(c->out, (t + j) * c->channels + k->first, tile[j], k->lanes, c->half);
    }
}

/* Within a tile: out_j = sum_i taps_{j-i} in_i; transposed: out_i = sum_j taps_{j-i} in_j. */
INLINE void NAME(convolve_rows)(const V *taps, const V *in, V *out, int start, int both, int transposed) {
    V y[ROWS];
    UNROLL for (int j = 0; j < ROWS; j++) y[j] = (V){0};
    UNROLL for (int i = 0; i < TILE; i++) {
        V x = in[i];
        UNROLL for (int j = 0; j < ROWS; j++) {
            int lag = transposed ? i - (start + j) : start + j - i;
            if (both || lag >= 0) y[j] = y[j] + taps[TILE + lag] * x;
        }
    }
    UNROLL for (int j = 0; j < ROWS; j++) out[start + j] = y[j];
}

static TARGET void NAME(convolve)(const Work *k, const V *in, V *out, int transposed) {
#define CONVOLVE(both, transposed) \
    for (int start = 0; start < TILE; start += ROWS) { \
        if (start) NAME(convolve_rows)(k->taps, in, out, TILE - ROWS, both, transposed); \
        else NAME(convolve_rows)(k->taps, in, out, 0, both, transposed); \
    }
    if (k->call->directions == 1) {
        if (transposed) { CONVOLVE(0, 1) } else { CONVOLVE(0, 0) }
    } else {
        if (transposed) { CONVOLVE(1, 1) } else { CONVOLVE(1, 0) }
    }
#undef CONVOLVE
}

/* sum[row] += sum_j gradient_j x_{j-lag} for lag = start + row. */
INLINE void NAME(correlate_rows)(const V *x, const V *gradient, D *sums, const int start) {
    V y[ROWS];
    UNROLL for (int row = 0; row < ROWS; row++) y[row] = (V){0};
    UNROLL for (int i = 0; i < TILE; i++) {
        V value = x[i];
        UNROLL for (int row = 0; row < ROWS; row++) {
            int j = i + start + row;
            if (j >= 0 && j < TILE) y[row] = y[row] + gradient[j] * value;
        }
    }
    UNROLL for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) sums[2 * row + half] += NAME(widen)(&y[row], half);
}

/* Add the gradients of the taps in a tile. */
static TARGET void NAME(correlate)(Work *k, const V *x, const V *gradient) {
    D *sums = k->grad_taps[TILE];
    NAME(correlate_rows)(x, gradient, sums, 0);
    if (ROWS < TILE) NAME(correlate_rows)(x, gradient, sums + 2 * (TILE - ROWS), TILE - ROWS);
    if (k->call->directions == 1) return;
    NAME(correlate_rows)(x, gradient, sums - 2 * ROWS, -ROWS);
    if (ROWS < TILE) NAME(correlate_rows)(x, gradient, sums - 2 * TILE, -TILE);
}

/* The products with powers of q, of some tiles at once (`columns`), so that a power is loaded once for all of them. With
 * `rows` times `columns` = SUMS_AT_ONCE, the sums are in registers. Exponents are e = first + step j. */

/* out[column][j] += sum_m q^e values[column][m], for `rows` positions from `start` on. */
INLINE void NAME(expand_rows)(const V *power, const V *values, int64_t count, V *out, int step, int start, const int rows, const int columns) {
    V y[SUMS_AT_ONCE];
    UNROLL for (int i = 0; i < rows * columns; i++) y[i] = (V){0};
    for (int64_t m = 0; m < count; m++) {
        const V *at = power + m * POWERS + step * start;
        UNROLL for (int i = 0; i < rows * columns; i++)
            y[i] = y[i] + at[step * (i / columns)] * values[(i % columns) * count + m];
    }
    UNROLL for (int i = 0; i < rows * columns; i++) {
        V *to = out + (i % columns) * TILE + start + i / columns;
        *to = *to + y[i];
    }
}

static TARGET void NAME(expand)(const V *power, const V *values, int64_t count, V *out, int64_t first, int step, int columns) {
#define EXPAND(step, columns) \
    for (int start = 0; start < TILE; start += SUMS_AT_ONCE / columns) \
        NAME(expand_rows)(power + first, values, count, out, step, start, SUMS_AT_ONCE / columns, columns)
    if (columns == TILES) {
        if (step > 0) EXPAND(1, TILES);
        else EXPAND(-1, TILES);
    } else {
        if (step > 0) EXPAND(1, 1);
        else EXPAND(-1, 1);
    }
#undef EXPAND
}

/* sums[row][column] = sum_j q^e in[column][j], for `rows` numbers. */
INLINE void NAME(project_rows)(const V *power, const V *in, V *sums, int step, const int rows, const int columns) {
    V y[SUMS_AT_ONCE];
    UNROLL for (int i = 0; i < rows * columns; i++) y[i] = (V){0};
    for (int j = 0; j < TILE; j++) {
        UNROLL for (int i = 0; i < rows * columns; i++)
            y[i] = y[i] + power[(i / columns) * POWERS + step * j] * in[(i % columns) * TILE + j];
    }
    UNROLL for (int i = 0; i < rows * columns; i++) sums[i] = y[i];
}

/* sum[m][column] = sum_j q^e in[column][j], and sum[m][columns + column] = sum_j e q^e in[column][j]. */
static TARGET void NAME(project)(const V *power, int64_t count, const V *in, V *sum, int64_t first, int step, int columns) {
    V twice[2 * TILES * TILE];
    int64_t m = 0;
    for (int i = 0; i < columns * TILE; i++) {
        twice[i] = in[i];
        twice[columns * TILE + i] = in[i] * (float)(first + step * (i % TILE));
    }
#define PROJECT(step, rows, columns) \
    for (; m + rows <= count; m += rows) NAME(project_rows)(power + m * POWERS + first, twice, sum + m * columns, step, rows, columns)
    if (columns == TILES) {
        if (step > 0) { PROJECT(1, SUMS_AT_ONCE / TILES / 2, 2 * TILES); PROJECT(1, 1, 2 * TILES); }
        else { PROJECT(-1, SUMS_AT_ONCE / TILES / 2, 2 * TILES); PROJECT(-1, 1, 2 * TILES); }
    } else {
        if (step > 0) PROJECT(1, 1, 2);
        else PROJECT(-1, 1, 2);
    }
#undef PROJECT
}

/* The exponents of q at the positions of a tile: from the states to the results, and from the inputs to the next states. */
#define TILES_OF(length) (((length) + TILE - 1) / TILE)
#define OUTWARD(direction) (direction) ? TILE - c->shift : 1, (direction) ? -1 : 1
#define INWARD(direction) (direction) ? 0 : size - 1, (direction) ? 1 : -1

/* Return q^size. */
static TARGET const D *NAME(power_of)(const Work *k, Side *side, int64_t size) {
    if (size == TILE) return side->last;
    for (int64_t m = 0; m < k->numbers; m += k->call->parts) for (int half = 0; half < 2; half++) {
        D q = side->q[2 * m + half], a = q - q + 1.0, b = q - q;
        D r = k->call->parts == 2 ? side->q[2 * m + 2 + half] : b;
        for (int64_t j = 0; j < size; j++) {
            D z = a * q - b * r;
            b = a * r + b * q;
            a = z;
        }
        side->rest[2 * m + half] = a;
        if (k->call->parts == 2) side->rest[2 * m + 2 + half] = b;
    }
    return side->rest;
}

/* Advance `rows` numbers of states from m on over some tiles: compute S, store w h with -Im before each tile in `start`, and
 * h in `states` unless it is NULL, and set h to q^size h + p S (`power` = q^size). */
INLINE void NAME(advance_rows)(const Work *k, const Side *side, int64_t m, const V *in, V *start, V *states, int64_t size,
                               const D *power, const int rows, const int columns, const int parts, const int direction) {
    V sums[SUMS_AT_ONCE];
    int64_t M = k->numbers;
    const V *first = side->power + m * POWERS + (direction ? 0 : size - 1);
    NAME(project_rows)(first, in, sums, direction ? 1 : -1, rows, columns);
    UNROLL for (int row = 0; row < rows; row += parts, m += parts) {
        D h[4], q[4];
        V w = side->w[m], wi = side->w[m + parts - 1], p = side->p[m / parts];
        UNROLL for (int i = 0; i < 2 * parts; i++) { h[i] = side->state[2 * m + i]; q[i] = power[2 * m + i]; }
        UNROLL for (int i = 0; i < columns; i++) {
            int column = direction ? columns - 1 - i : i;
            V *to = start + column * M + m, value = NAME(join)(h[0], h[1]), imaginary;
            V add = p * sums[row * columns + column], add_imaginary;
            if (states) states[column * M + m] = value;
            if (parts == 1) {
                to[0] = w * value;
                for (int half = 0; half < 2; half++) h[half] = q[half] * h[half] + NAME(widen)(&add, half);
                continue;
            }
            imaginary = NAME(join)(h[2], h[3]);
            add_imaginary = p * sums[(row + 1) * columns + column];
            if (states) states[column * M + m + 1] = imaginary;
            to[0] = w * value - wi * imaginary;
            to[1] = -(w * imaginary + wi * value);
            for (int half = 0; half < 2; half++) {
                D z = q[half] * h[half] - (q[2 + half] * h[2 + half] - NAME(widen)(&add, half));
                h[2 + half] = q[half] * h[2 + half] + (q[2 + half] * h[half] + NAME(widen)(&add_imaginary, half));
                h[half] = z;
            }
        }
        UNROLL for (int i = 0; i < 2 * parts; i++) side->state[2 * m + i] = h[i];
    }
}

static TARGET void NAME(advance)(const Work *k, const Side *side, const V *in, V *start, V *states, int64_t size, const D *power,
                                 int columns, int direction) {
    int64_t m = 0, M = k->numbers;
#define ADVANCE(rows, columns, parts, direction) \
    for (; m + rows <= M; m += rows) NAME(advance_rows)(k, side, m, in, start, states, size, power, rows, columns, parts, direction)
#define COLUMNS(parts, direction) \
    if (columns == TILES) { \
        ADVANCE(SUMS_AT_ONCE / TILES, TILES, parts, direction); \
        ADVANCE(parts, TILES, parts, direction); \
    } else { \
        ADVANCE(parts, 1, parts, direction); \
    }
    if (k->call->parts == 1) {
        if (direction) { COLUMNS(1, 1) } else { COLUMNS(1, 0) }
    } else {
        if (direction) { COLUMNS(2, 1) } else { COLUMNS(2, 0) }
    }
#undef ADVANCE
#undef COLUMNS
}

/* Add the gradients of the coefficients in a tile, from the states before it, S, S', A and B; store p G with -Im in `end`,
 * and set G to that before the tile. */
INLINE void NAME(differentiate_parts)(const Side *side, int64_t states, const V *before, const V *sum, const V *a_,
                                      int64_t columns, V *end, const D *power, float size, const int parts) {
    const V *w_ = side->w, *p_ = side->p;
    V *grad_w = side->part_w, *grad_log = side->part_log, *grad_p = side->part_p;
    D *adjoint = side->adjoint;
    for (int64_t n = 0; n < states; n++) {
        int64_t m = n * parts, at = 2 * m;
        int64_t c1 = 2 * columns * m, c2 = c1 + columns, d1 = c1 + 2 * columns, d2 = d1 + columns;
        V h = before[m], a = a_[c1], b = a_[c2], s = sum[c1], z = sum[c2], w = w_[m], p = p_[n];
        V G = NAME(join)(adjoint[at], adjoint[at + 1]), q = NAME(join)(power[at], power[at + 1]) * size;
        end[m] = p * G;
        if (parts == 1) {
            V add = w * a;
            grad_w[m] += a * h;
            grad_p[n] += G * s;
            grad_log[m] += w * b * h + G * (q * h + p * z);
            for (int half = 0; half < 2; half++)
                adjoint[at + half] = power[at + half] * adjoint[at + half] + NAME(widen)(&add, half);
            continue;
        }
        V hi = before[m + 1], ai = a_[d1], bi = a_[d2], si = sum[d1], zi = sum[d2], wi = w_[m + 1];
        V Gi = NAME(join)(adjoint[at + 2], adjoint[at + 3]), qi = NAME(join)(power[at + 2], power[at + 3]) * size;
        V c = b * h - bi * hi, ci = b * hi + bi * h, e = q * h - qi * hi + p * z, ei = q * hi + qi * h + p * zi;
        V add = w * a - wi * ai, addi = w * ai + wi * a;
        end[m + 1] = -(p * Gi);
        grad_w[m] += a * h - ai * hi;
        grad_w[m + 1] += a * hi + ai * h;
        grad_p[n] += G * s - Gi * si;
        grad_log[m] += w * c - wi * ci + (G * e - Gi * ei);
        grad_log[m + 1] += w * ci + wi * c + (G * ei + Gi * e);
        for (int half = 0; half < 2; half++) {
            D g = adjoint[at + half], gi = adjoint[at + 2 + half], r = power[at + half], ri = power[at + 2 + half];
            adjoint[at + half] = r * g - (ri * gi - NAME(widen)(&add, half));
            adjoint[at + 2 + half] = r * gi + (ri * g + NAME(widen)(&addi, half));
        }
    }
}

static TARGET void NAME(differentiate)(const Work *k, const Side *side, int64_t column, int64_t columns, const V *before, V *end,
                                       int64_t size, const D *power) {
    int64_t N = k->call->states;
    const V *sum = side->sum + column, *a = side->a + column;
    if (k->call->parts == 1) NAME(differentiate_parts)(side, N, before, sum, a, columns, end, power, (float)size, 1);
    else NAME(differentiate_parts)(side, N, before, sum, a, columns, end, power, (float)size, 2);
}

/* Add the sums of some tiles to those of all. */
static TARGET void NAME(flush)(const Work *k, const Side *side) {
    int64_t count = 2 * k->numbers + k->call->states;
    for (int64_t m = 0; m < count; m++) {
        for (int half = 0; half < 2; half++) side->grad_w[2 * m + half] += NAME(widen)(side->part_w + m, half);
        side->part_w[m] = (V){0};
    }
}

/* Add states [S, D, N, P] of a sequence, or their gradients, to `to`; `sign` of the imaginary parts. */
static TARGET void NAME(add_states)(const Work *k, D *to, const float *from, int64_t sequence, double sign) {
    const Call *c = k->call;
    if (!from) return;
    for (int64_t l = 0; l < k->lanes; l++) for (int64_t m = 0; m < k->numbers; m++) {
        double value = from[(sequence * c->channels + k->first + l) * k->numbers + m];
        ((double *)(to + 2 * m))[l] += c->parts == 2 && m % 2 ? sign * value : value;
    }
}

static TARGET void NAME(store_states)(const Work *k, const D *from, float *to, int64_t sequence, double sign) {
    const Call *c = k->call;
    if (!to) return;
    for (int64_t l = 0; l < k->lanes; l++) for (int64_t m = 0; m < k->numbers; m++) {
        double value = ((const double *)(from + 2 * m))[l];
        to[(sequence * c->channels + k->first + l) * k->numbers + m] = (float)(c->parts == 2 && m % 2 ? sign * value : value);
    }
}

/* The number of tiles that are computed together from tile i on: TILES complete ones, or one. */
INLINE int64_t NAME(together)(int64_t i, int64_t length) { return i >= 0 && (i + TILES) * TILE <= length ? TILES : 1; }

/* The results of some tiles from tile i on, before silu, from the states in `start`. */
INLINE void NAME(results)(const Work *k, int64_t t, int64_t i, int64_t columns, const V *x, V *y) {
    const Call *c = k->call;
    for (int64_t column = 0; column < columns; column++) {
        NAME(fetch)(k, c->x, t + (columns + column) * TILE);
        NAME(convolve)(k, x + column * TILE, y + column * TILE, 0);
    }
    for (int direction = 0; direction < c->directions; direction++) {
        const Side *side = &k->side[direction];
        const V *start = direction ? side->starts + i * k->numbers : side->start;
        NAME(expand)(side->power, start, k->numbers, y, OUTWARD(direction), columns);
    }
}

/* The row of x at a position that the mask drops, for a skip that uses it. */
INLINE V NAME(dropped)(const Work *k, int64_t t) {
    const Call *c = k->call;
    if (!c->silu || !c->skip || !c->mask || c->mask[t]) return (V){0};
    return NAME(load)(c->x, t * c->channels + k->first, k->lanes, c->half);
}

/* Scan a sequence from its end: store the states before each tile, and w h. */
static TARGET void NAME(scan_from_end)(Work *k, int64_t first, int64_t length) {
    const Call *c = k->call;
    Side *side = &k->side[1];
    int64_t M = k->numbers, columns;
    V x[TILES * TILE];
    memset(side->state, 0, (size_t)(2 * M) * sizeof(D));
    for (int64_t i = TILES_OF(length); i > 0; i -= columns) {
        columns = NAME(together)(i - TILES, length);
        int64_t start = (i - columns) * TILE, rows = least(columns * TILE, length - start);
        NAME(load_tiles)(k, x, c->x, c->mask, first + start, rows, columns);
        int64_t at = (i - columns) * M;
        NAME(advance)(k, side, x, side->starts + at, side->states ? side->states + at : NULL, TILE, side->last, columns, 1);
    }
}

static TARGET void NAME(forward_sequence)(Work *k, int64_t sequence) {
    const Call *c = k->call;
    Side *side = &k->side[0];
    int64_t first = first_of(c, sequence), length = first_of(c, sequence + 1) - first, columns;
    V x[TILES * TILE], y[TILES * TILE];
    if (c->directions == 2) NAME(scan_from_end)(k, first, length);
    memset(side->state, 0, (size_t)(2 * k->numbers) * sizeof(D));
    NAME(add_states)(k, side->state, c->initial, sequence, 1.0);
    for (int64_t i = 0; i * TILE < length; i += columns) {
        columns = NAME(together)(i, length);
        int64_t t = first + i * TILE, rows = least(columns * TILE, length - i * TILE), size = least(TILE, rows);
        NAME(load_tiles)(k, x, c->x, c->mask, t, rows, columns);
        NAME(advance)(k, side, x, side->start, NULL, size, NAME(power_of)(k, side, size), columns, 0);
        NAME(results)(k, t, i, columns, x, y);
        if (c->silu) for (int64_t j = 0; j < rows; j++) {
            V z = y[j] + k->skip * NAME(dropped)(k, t + j);
            y[j] = z * NAME(sigmoid)(z);
        }
        NAME(save_tiles)(k, y, t, rows);
    }
    NAME(store_states)(k, side->state, c->final, sequence, 1.0);
}

/* The gradients of the arguments of silu in some tiles; without silu, of the results. */
INLINE void NAME(arguments)(Work *k, int64_t t, int64_t i, int64_t rows, int64_t columns, const V *x, V *gradient) {
    const Call *c = k->call;
    V y[TILES * TILE];
    NAME(load_tiles)(k, gradient, c->gradient, NULL, t, rows, columns);
    if (!c->silu) return;
    NAME(results)(k, t, i, columns, x, y);
    for (int64_t j = 0; j < rows; j++) {
        V other = NAME(dropped)(k, t + j), z = y[j] + k->skip * other, s = NAME(sigmoid)(z);
        gradient[j] = gradient[j] * (s * (1.0f + z * (1.0f - s)));
        if (c->mask && !c->mask[t + j]) {
            V product = gradient[j] * other;
            for (int half = 0; half < 2; half++) k->grad_skip[half] += NAME(widen)(&product, half);
        }
    }
}

/* The states before each tile, the gradients of the arguments of silu, and those of the second direction. */
static TARGET void NAME(scan_again)(Work *k, int64_t first, int64_t length) {
    const Call *c = k->call;
    Side *side = &k->side[0], *from_end = &k->side[1];
    int64_t M = k->numbers, columns;
    V x[TILES * TILE], gradient[TILES * TILE];
    for (int64_t i = 0; i * TILE < length; i += columns) {
        columns = NAME(together)(i, length);
        int64_t t = first + i * TILE, rows = least(columns * TILE, length - i * TILE), size = least(TILE, rows);
        NAME(load_tiles)(k, x, c->x, c->mask, t, rows, columns);
        NAME(advance)(k, side, x, side->start, side->states + i * M, size, NAME(power_of)(k, side, size), columns, 0);
        if (c->silu || c->directions == 2) NAME(arguments)(k, t, i, rows, columns, x, gradient);
        if (c->silu) memcpy(k->rows + i * TILE, gradient, (size_t)rows * sizeof(V));
        if (c->directions == 1) continue;
        NAME(project)(from_end->power, M, x, from_end->sum, INWARD(1), columns);
        NAME(project)(from_end->power, M, gradient, from_end->a, OUTWARD(1), columns);
        for (int64_t column = 0; column < columns; column++) {
            int64_t tile = (i + column) * M;
            NAME(differentiate)(k, from_end, column, columns, from_end->states + tile, from_end->ends + tile, TILE, from_end->last);
        }
        NAME(flush)(k, from_end);
    }
}

static TARGET void NAME(backward_sequence)(Work *k, int64_t sequence) {
    const Call *c = k->call;
    Side *side = &k->side[0], *from_end = &k->side[1];
    int64_t first = first_of(c, sequence), length = first_of(c, sequence + 1) - first, M = k->numbers, columns;
    V x[TILES * TILE], gradient[TILES * TILE], out[TILES * TILE];
    if (c->directions == 2) {
        NAME(scan_from_end)(k, first, length);
        memset(from_end->adjoint, 0, (size_t)(2 * M) * sizeof(D));
    }
    memset(side->state, 0, (size_t)(2 * M) * sizeof(D));
    NAME(add_states)(k, side->state, c->initial, sequence, 1.0);
    NAME(scan_again)(k, first, length);
    memset(side->adjoint, 0, (size_t)(2 * M) * sizeof(D));
    NAME(add_states)(k, side->adjoint, c->grad_final, sequence, -1.0);
    for (int64_t i = TILES_OF(length); i > 0; i -= columns) {
        columns = NAME(together)(i - TILES, length);
        int64_t start = (i - columns) * TILE, t = first + start, rows = least(columns * TILE, length - start), size = least(TILE, rows);
        NAME(load_tiles)(k, x, c->x, c->mask, t, rows, columns);
        if (c->silu) {
            memcpy(gradient, k->rows + start, (size_t)rows * sizeof(V));
            memset(gradient + rows, 0, (size_t)(columns * TILE - rows) * sizeof(V));
        } else NAME(load_tiles)(k, gradient, c->gradient, NULL, t, rows, columns);
        NAME(project)(side->power, M, x, side->sum, INWARD(0), columns);
        NAME(project)(side->power, M, gradient, side->a, OUTWARD(0), columns);
        for (int64_t column = columns - 1; column >= 0; column--) {
            const V *before = side->states + (i - columns + column) * M;
            NAME(fetch)(k, c->x, t + (column - columns) * TILE);
            if (!c->silu) NAME(fetch)(k, c->gradient, t + (column - columns) * TILE);
            NAME(correlate)(k, x + column * TILE, gradient + column * TILE);
            NAME(differentiate)(k, side, column, columns, before, side->start + column * M, size, NAME(power_of)(k, side, size));
            NAME(convolve)(k, gradient + column * TILE, out + column * TILE, 1);
        }
        NAME(flush)(k, side);
        NAME(expand)(side->power, side->start, M, out, INWARD(0), columns);
        if (c->directions == 2) NAME(expand)(from_end->power, from_end->ends + (i - columns) * M, M, out, INWARD(1), columns);
        if (c->mask) for (int64_t j = 0; j < rows; j++)
            if (!c->mask[t + j]) out[j] = c->silu ? k->skip * gradient[j] : gradient[j] - gradient[j];
        NAME(save_tiles)(k, out, t, rows);
    }
    NAME(store_states)(k, side->adjoint, c->grad_initial, sequence, -1.0);
}

/* Set the coefficients of a block of channels. */
static TARGET void NAME(prepare)(Work *k, int64_t block) {
    const Call *c = k->call;
    int64_t N = c->states, P = c->parts;
    D taps[LAGS][2];
    k->block = block;

    k->first = block * LANES;
    k->lanes = least(LANES, c->channels - k->first);
    memset(taps, 0, sizeof taps);
    for (int direction = 0; direction < c->directions; direction++) {
        Side *side = &k->side[direction];
        for (int64_t l = 0; l < k->lanes; l++) {
            int64_t row = (direction * c->channels + k->first + l) * N;
            for (int64_t m = 0; m < N * P; m++) ((double *)side->q)[m * LANES + l] = c->q[row * P + m];
            for (int64_t m = 0; m < N * P; m++) ((float *)side->w)[m * LANES + l] = c->weight[row * P + m];
            for (int64_t n = 0; n < N; n++) ((float *)side->p)[n * LANES + l] = c->in ? c->in[row + n] : 1.0f;
        }
        for (int64_t n = 0; n < N; n++) {
            int64_t m = n * P, at = 2 * m;
            D a[2], b[2], w[2], u[2];
            for (int half = 0; half < 2; half++) {
                D p = NAME(widen)(side->p + n, half);
                w[half] = NAME(widen)(side->w + m, half) * p;
                u[half] = P == 2 ? NAME(widen)(side->w + m + 1, half) * p : p - p;
                b[half] = p - p;
                a[half] = b[half] + 1.0;
            }
            for (int e = 0; e < POWERS; e++) {
                int lag = direction ? -e - c->shift : e;
                side->power[m * POWERS + e] = NAME(join)(a[0], a[1]);
                if (P == 2) side->power[(m + 1) * POWERS + e] = NAME(join)(b[0], b[1]);
                for (int half = 0; half < 2; half++) {
                    D q = side->q[at + half], r = b[half] - b[half], z;
                    if (P == 2) r = side->q[at + 2 + half];
                    z = a[half] * q - b[half] * r;
                    if (lag < TILE && lag > -TILE) taps[TILE + lag][half] += w[half] * a[half] - u[half] * b[half];
                    if (e == TILE) side->last[at + half] = a[half];
                    if (e == TILE && P == 2) side->last[at + 2 + half] = b[half];
                    b[half] = a[half] * r + b[half] * q;
                    a[half] = z;
                }
            }
        }
    }
    for (int lag = 0; lag < LAGS; lag++) k->taps[lag] = NAME(join)(taps[lag][0], taps[lag][1]);
    k->skip = c->skip ? NAME(load)(c->skip, k->first, k->lanes, 0) : (V){0};
    k->taps[TILE] = k->taps[TILE] + k->skip;
}

/* Add the gradients of the taps to those of the coefficients. */
static TARGET void NAME(finish)(Work *k) {
    const Call *c = k->call;
    for (int direction = 0; direction < c->directions; direction++) {
        Side *side = &k->side[direction];
        for (int64_t n = 0; n < c->states; n++) for (int half = 0; half < 2; half++) {
            int64_t m = n * c->parts, at = 2 * m + half;
            D w = NAME(widen)(side->w + m, half), p = NAME(widen)(side->p + n, half), zero = p - p;
            D wi = c->parts == 2 ? NAME(widen)(side->w + m + 1, half) : zero, e = zero, ei = zero, f = zero, fi = zero;
            for (int l = 0; l < TILE - (direction ? c->shift : 0); l++) { /* sum of q^l, and of l q^l */
                D tap = k->grad_taps[TILE + (direction ? -l - c->shift : l)][half];
                D part = tap * NAME(widen)(side->power + m * POWERS + l, half);
                e += part;
                f += part * (double)l;
                if (c->parts == 1) continue;
                part = tap * NAME(widen)(side->power + (m + 1) * POWERS + l, half);
                ei += part;
                fi += part * (double)l;
            }
            side->grad_w[at] += p * e;
            side->grad_p[2 * n + half] += w * e - wi * ei;
            side->grad_log[at] += p * (w * f - wi * fi);
            if (c->parts == 1) continue;
            side->grad_w[at + 2] += p * ei;
            side->grad_log[at + 2] += p * (w * fi + wi * f);
        }
    }
    for (int half = 0; half < 2; half++) k->grad_skip[half] += k->grad_taps[TILE][half];
}

/* Return memory for the next array of `count` vectors, or only count it. */
INLINE void *NAME(take)(char *memory, int64_t *used, int64_t count) {
    void *at = memory ? memory + *used : NULL;
    *used += count * (int64_t)sizeof(V);
    return at;
}

/* Set the arrays of a worker; called first without memory, to return the size. */
static TARGET int64_t NAME(lay_out)(Work *k, char *memory, int64_t longest, int gradients) {
    const Call *c = k->call;
    int64_t M = k->numbers, N = c->states, tiles = longest / TILE + 2, used = 0;
    for (int direction = 0; direction < c->directions; direction++) {
        Side *s = &k->side[direction];
        s->power = NAME(take)(memory, &used, M * POWERS + TILE); /* rows after a short tile read powers before the first one */
        if (memory) s->power += TILE;
        V **vectors[] = {&s->w, &s->p, &s->start, &s->sum, &s->a, &s->part_w, &s->part_log, &s->part_p};
        const int64_t sizes[] = {M, N, TILES * M, 2 * TILES * M, 2 * TILES * M, M, M, N};
        D **wide[] = {&s->q, &s->last, &s->rest, &s->state, &s->adjoint};
        for (int i = 0; i < 8; i++) *vectors[i] = NAME(take)(memory, &used, sizes[i]);
        for (int i = 0; i < 5; i++) *wide[i] = NAME(take)(memory, &used, 2 * M);
        if (direction || gradients) s->starts = NAME(take)(memory, &used, direction ? tiles * M : 0);
        if (gradients) s->states = NAME(take)(memory, &used, tiles * M);
        if (gradients && direction) s->ends = NAME(take)(memory, &used, tiles * M);
    }
    if (gradients && c->silu) k->rows = NAME(take)(memory, &used, longest);
    return used;
}

static TARGET int NAME(open)(Work *k, const Call *c, int gradients) {
    int64_t longest = 0;
    *k = (Work){.call = c, .block = -1, .numbers = c->states * c->parts};
    for (int64_t s = 0; s < c->sequences; s++) {
        int64_t length = first_of(c, s + 1) - first_of(c, s);
        if (length > longest) longest = length;
    }
    size_t size = (size_t)NAME(lay_out)(k, NULL, longest, gradients);
    if (posix_memalign(&k->memory, 64, size)) return 1;
    NAME(lay_out)(k, k->memory, longest, gradients);
    for (int direction = 0; direction < c->directions; direction++) {
        Side *side = &k->side[direction];
        memset(side->power - TILE, 0, TILE * sizeof(V));
        memset(side->part_w, 0, (size_t)(2 * k->numbers + c->states) * sizeof(V));
        memset(side->q, 0, (size_t)(2 * k->numbers) * sizeof(D)); /* of channels after the last one */
        memset(side->w, 0, (size_t)k->numbers * sizeof(V));
        memset(side->p, 0, (size_t)c->states * sizeof(V));
    }
    return 0;
}

static TARGET int NAME(forward_work)(Job *job) {
    Work k;
    const Call *c = job->call;
    if (NAME(open)(&k, c, 0)) return 1;
    for (int64_t unit; (unit = atomic_fetch_add(&job->next, 1)) < job->units;) {
        if (k.block != unit / c->sequences) NAME(prepare)(&k, unit / c->sequences);
        NAME(forward_sequence)(&k, unit % c->sequences);
    }
    free(k.memory);
    return 0;
}

/* Numbers in the sums of a unit: for each direction, the gradients of w, log q and p; then that of the skip. */
#define SUMS(c) ((c)->directions * (2 * (c)->parts + 1) * (c)->states * LANES + LANES)

static TARGET int NAME(backward_work)(Job *job) {
    Work k;
    const Call *c = job->call;
    if (NAME(open)(&k, c, 1)) return 1;
    for (int64_t unit; (unit = atomic_fetch_add(&job->next, 1)) < job->units;) {
        int64_t group = unit % job->groups;
        D *totals = (D *)(job->totals + unit * job->size);
        NAME(prepare)(&k, unit / job->groups);
        memset(k.grad_taps, 0, sizeof k.grad_taps);
        memset(k.grad_skip, 0, sizeof k.grad_skip);
        for (int direction = 0; direction < c->directions; direction++) {
            k.side[direction].grad_w = totals;
            k.side[direction].grad_log = totals + 2 * k.numbers;
            k.side[direction].grad_p = totals + 4 * k.numbers;
            totals += 4 * k.numbers + 2 * c->states;
        }
        for (int64_t s = c->sequences * group / job->groups; s < c->sequences * (group + 1) / job->groups; s++)
            NAME(backward_sequence)(&k, s);
        NAME(finish)(&k);
        memcpy(totals, k.grad_skip, sizeof k.grad_skip);
    }
    free(k.memory);
    return 0;
}

/* Write the gradients of the coefficients of a block from the sums of its units. */
static void NAME(reduce)(const Job *job, int64_t block) {
    const Call *c = job->call;
    int64_t N = c->states, P = c->parts, M = N * P, lanes = least(LANES, c->channels - block * LANES);
    double *sums = job->totals + block * job->groups * job->size;
    for (int64_t group = 1; group < job->groups; group++)
        for (int64_t i = 0; i < job->size; i++) sums[i] += sums[group * job->size + i];
    for (int direction = 0; direction < c->directions; direction++, sums += (2 * M + N) * LANES) {
        for (int64_t l = 0; l < lanes; l++) for (int64_t n = 0; n < N; n++) {
            int64_t row = (direction * c->channels + block * LANES + l) * N + n;
            for (int64_t part = 0; part < P; part++) {
                int64_t m = n * P + part;
                double sign = part ? -1.0 : 1.0;
                c->grad_weight[row * P + part] = (float)(sign * sums[m * LANES + l]);
                (part ? c->grad_phase : c->grad_decay)[row] = (float)(sign * sums[(M + m) * LANES + l]);
            }
            if (c->grad_in) c->grad_in[row] = (float)sums[(2 * M + n) * LANES + l];
        }
    }
    if (c->grad_skip) for (int64_t l = 0; l < lanes; l++) c->grad_skip[block * LANES + l] = (float)sums[l];
}

static int NAME(forward)(const Call *c) {
    int64_t blocks = (c->channels + LANES - 1) / LANES;
    Job job = {.call = c, .units = blocks * c->sequences, .work = NAME(forward_work)};
    return run(&job);
}

static int NAME(backward)(const Call *c) {
    int64_t blocks = (c->channels + LANES - 1) / LANES, groups = blocks ? (LEAST_UNITS + blocks - 1) / blocks : 1;
    groups = groups < 1 ? 1 : least(groups, c->sequences > 0 ? c->sequences : 1);
    Job job = {.call = c, .units = blocks * groups, .groups = groups, .size = SUMS(c), .work = NAME(backward_work)};
    size_t bytes = (size_t)(job.units * job.size) * sizeof(double);
    if (posix_memalign((void **)&job.totals, 64, bytes)) return 1;
    memset(job.totals, 0, bytes);
    int failed = run(&job);
    for (int64_t block = 0; !failed && block < blocks; block++) NAME(reduce)(&job, block);
    free(job.totals);
    return failed;
}

/* One position; the numbers of the states of a channel are contiguous. */
static TARGET int NAME(step)(const Step *s) {
    int64_t M = s->numbers;
    for (int64_t b = 0; b < s->sequences; b++) for (int64_t d = 0; d < s->channels; d++) {
        int64_t at = b * s->channels + d;
        int kept = !s->mask || s->mask[b];
        float x = s->half ? from_half(((const uint16_t *)s->x)[at]) : ((const float *)s->x)[at], total = 0.0f;
        const float *before = s->before + at * M;
        float *after = s->after + at * M;
        V sum = {0};
        for (int64_t m = 0; m < M; m += LANES) {
            int64_t lanes = least(LANES, M - m);
            V h = NAME(load)(before, m, lanes, 0), q = NAME(load)(s->change, d * M + m, lanes, 0), product = q * h;
            if (s->parts == 2) {
                V re, im, other;
                UNROLL for (int l = 0; l < LANES; l++) {
                    re[l] = q[l & ~1];
                    im[l] = l & 1 ? q[l] : -q[l | 1];
                    other[l] = h[l ^ 1];
                }
                product = re * h + im * other;
            }
            if (kept) h = h + (product + NAME(load)(s->in, d * M + m, lanes, 0) * x);
            sum = sum + NAME(load)(s->weight, d * M + m, lanes, 0) * h;
            NAME(save)(after, m, h, lanes, 0);
        }
        for (int l = 0; l < LANES; l++) total += sum[l];
        if (s->skip && (kept || s->silu)) total += s->skip[d] * x;
        if (s->silu) {
            V z = {total};
            z = z * NAME(sigmoid)(z);
            total = z[0];
        }
        if (s->half) ((uint16_t *)s->out)[at] = to_half(total);
        else ((float *)s->out)[at] = total;
    }
    return 0;
}

#undef V
#undef I
#undef B
#undef F
#undef D
#undef Side
#undef Work
#undef TILES_OF
#undef OUTWARD
#undef INWARD
#undef SUMS
#undef SUFFIX
#undef LANES
#undef ROWS
#undef SUMS_AT_ONCE
#undef TARGET
#undef WIDEN
#undef JOIN
#endif
