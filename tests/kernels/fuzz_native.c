/* Random calls of the C library under AddressSanitizer and UndefinedBehaviorSanitizer (`make fuzz`).
 *
 *     fuzz_native SECONDS SEED [LEVEL]
 *
 * All arrays have exactly the size that native.c documents. Each call must write finite numbers to all places of its
 * results, and the same bits with one thread and with several. Call i of a run has the seed SEED + i, and 0 SECONDS run
 * one call. LEVEL is an instruction set as in `moving_average_level`; without it, each call draws one.
 */
#include "../../kernels/recurrence/native.c"

#include <math.h>
#include <stdio.h>
#include <time.h>

static uint64_t state;
static void *arrays[64];
static int used;

static int64_t draw(int64_t count) { /* 0 to count - 1: splitmix64 */
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int64_t)((z ^ z >> 31) % (uint64_t)count);
}

static double number(void) { return (double)draw(1 << 20) / (1 << 19) - 1.0; } /* in [-1, 1) */

static void fail(const char *what, uint64_t seed) {
    fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed, what);
    exit(1);
}

/* An array that ends where its allocation ends, and starts at an arbitrary element of it. */
static void *array(int64_t count, int64_t size) {
    int64_t before = draw(4) * size;
    char *memory = malloc((size_t)(before + count * size));
    arrays[used++] = memory;
    return memory + before;
}

static float *result(int64_t count) { return memset(array(count, 4), 0xff, (size_t)count * 4); } /* NaN */

static void *rows(int64_t count, int half) { /* of float32, or of bfloat16: the upper halves */
    int64_t size = half ? 2 : 4;
    char *to = array(count, size);
    for (int64_t i = 0; i < count; i++) {
        float x = (float)number();
        memcpy(to + i * size, (char *)&x + 4 - size, (size_t)size);
    }
    return to;
}

static float *floats(int64_t count) { return rows(count, 0); }

static uint8_t *mask(int64_t count) {
    uint8_t *to = array(count, 1);
    for (int64_t i = 0; i < count; i++) to[i] = draw(4) != 0;
    return to;
}

/* Check that the numbers of a result are finite, and return a sum that depends on their places. */
static uint64_t digest(const void *from, int64_t count, int half, uint64_t seed) {
    uint64_t sum = 0;
    for (int64_t i = 0; from && i < count; i++) {
        uint32_t bits = 0;
        memcpy(&bits, (const char *)from + i * (half ? 2 : 4), half ? 2 : 4);
        if (half) bits <<= 16;
        if ((bits & 0x7f800000) == 0x7f800000) fail("a result is not finite or was not written", seed);
        sum = sum * 0x9e3779b97f4a7c15u + bits;
    }
    return sum;
}

static double decay(void) { /* |q|: 0, 1, near 1 or between */
    int64_t kind = draw(8);
    return kind == 0 ? 0.0 : kind == 1 ? 1.0 : kind == 2 ? 1.0 - 1e-6 : fabs(number());
}

static void fuzz_average(uint64_t seed) {
    static const int64_t channels[] = {0, 1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 48};
    static const int64_t lengths[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 129, 200};
    int64_t S = draw(5), D = channels[draw(12)], N = 1 + draw(draw(4) ? 6 : 33), P = 1 + draw(2), total = 0;
    Call c = {.sequences = S, .channels = D, .states = N, .components = (int32_t)P, .directions = (int32_t)(1 + draw(2))};
    if (draw(2)) {
        int64_t *bounds = array(S + 1, 8);
        bounds[0] = 0;
        for (int64_t s = 0; s < S; s++) bounds[s + 1] = bounds[s] + lengths[draw(11)];
        c.bounds = bounds;
        total = bounds[S];
    } else {
        c.length = lengths[draw(11)];
        total = S * c.length;
    }
    int both = c.directions == 2, half = (int)draw(2);
    int64_t R = D * c.directions, X = total * D, H = S * D * N * P;
    if (D == 0) c.directions = 0; /* as native.py, from the rows of the coefficients */
    c.shift = both && draw(2), c.silu = (int32_t)draw(2), c.half = half;
    c.x = rows(X, half), c.gradient = rows(X, half);
    if (draw(2)) c.mask = mask(total);
    double *q = array(R * N * P, 8);
    for (int64_t i = 0; i < R * N; i++) {
        double size = decay(), angle = draw(4) ? 3.2 * number() : 3.2e-3 * number();
        q[i * P] = P == 2 ? size * cos(angle) : size;
        if (P == 2) q[i * P + 1] = size * sin(angle);
    }
    c.q = q, c.in = floats(R * N), c.weight = floats(R * N * P);
    if (draw(2)) c.skip = floats(D), c.grad_skip = result(D);
    if (!both && draw(2)) c.initial = floats(H), c.grad_initial = result(H);
    if (!both && draw(2)) c.final = result(H);
    if (!both && draw(2)) c.grad_final = floats(H);
    c.grad_decay = result(R * N), c.grad_in = result(R * N), c.grad_weight = result(R * N * P);
    if (P == 2) c.grad_radians = result(R * N);
    uint64_t first[2] = {0, 0};
    for (int threads = 1; threads < 5; threads += 3) for (int backward = 0; backward < 2; backward++) {
        Call now = c;
        now.threads = threads;
        now.out = memset(array(X, half ? 2 : 4), 0xff, (size_t)(X * (half ? 2 : 4)));
        if (backward ? moving_average_backward(&now) : moving_average_forward(&now)) fail("no memory", seed);
        uint64_t sum = digest(now.out, X, half, seed);
        if (!backward) sum += digest(c.final, H, 0, seed);
        else {
            sum += digest(c.grad_decay, R * N, 0, seed) + digest(c.grad_radians, R * N, 0, seed) * 3;
            sum += digest(c.grad_in, R * N, 0, seed) * 5 + digest(c.grad_weight, R * N * P, 0, seed) * 7;
            sum += digest(c.grad_skip, D, 0, seed) * 11 + digest(c.grad_initial, H, 0, seed) * 13;
        }
        if (threads > 1 && sum != first[backward]) fail("the number of threads changes a result", seed);
        first[backward] = sum;
    }
}

static void fuzz_step(uint64_t seed) {
    int64_t S = draw(4), D = draw(20), P = 1 + draw(2), M = (1 + draw(40)) * P;
    int half = (int)draw(2);
    Step s = {.sequences = S, .channels = D, .numbers = M, .components = (int32_t)P, .silu = (int32_t)draw(2), .half = half};
    s.x = rows(S * D, half), s.before = floats(S * D * M);
    s.change = floats(D * M), s.in = floats(D * M), s.weight = floats(D * M);
    if (draw(2)) s.mask = mask(S);
    if (draw(2)) s.skip = floats(D);
    s.out = memset(array(S * D, half ? 2 : 4), 0xff, (size_t)(S * D * (half ? 2 : 4)));
    s.after = result(S * D * M);
    moving_average_step(&s);
    digest(s.out, S * D, half, seed);
    digest(s.after, S * D * M, 0, seed);
}

static float *logits(int64_t count) {
    float *to = floats(count), scale = draw(2) ? 3.0f : 200.0f;
    for (int64_t i = 0; i < count; i++) to[i] *= scale;
    return to;
}

static void fuzz_damped(uint64_t seed) {
    int64_t count = draw(100);
    Damped d = {.count = count, .scale = (float)number(), .input = logits(count), .damping = logits(count)};
    d.expansion = floats(count), d.projection = floats(count);
    d.q = memset(array(count, 8), 0xff, (size_t)count * 8), d.in = result(count), d.weight = result(count);
    moving_average_damped(&d);
    for (int64_t i = 0; i < count; i++)
        if (!(d.q[i] >= 0.0 && d.q[i] <= 1.0)) fail("a decay is not in [0, 1]", seed);
    digest(d.in, count, 0, seed), digest(d.weight, count, 0, seed);
    d.q = NULL, d.in = d.weight = NULL;
    d.grad_log = floats(count), d.grad_in = floats(count), d.grad_weight = floats(count);
    float *grads[] = {result(count), result(count), result(count), result(count)};
    d.grad_input = grads[0], d.grad_damping = grads[1], d.grad_expansion = grads[2], d.grad_projection = grads[3];
    moving_average_damped(&d);
    for (int i = 0; i < 4; i++) digest(grads[i], count, 0, seed);
}

int main(int count, char **arguments) {
    if (count < 3) return fprintf(stderr, "usage: fuzz_native SECONDS SEED [LEVEL]\n"), 2;
    time_t end = time(NULL) + atoll(arguments[1]);
    uint64_t seed = strtoull(arguments[2], NULL, 10), calls[3] = {0, 0, 0};
    int best = moving_average_level(-1);
    do {
        state = seed;
        int level = count > 3 ? atoi(arguments[3]) : (int)draw(best + 1);
        calls[moving_average_level(level)]++;
        int64_t kind = draw(8);
        if (kind == 0) fuzz_step(seed);
        else if (kind == 1) fuzz_damped(seed);
        else fuzz_average(seed);
        while (used) free(arrays[--used]);
        seed++;
    } while (time(NULL) < end);
    printf("calls with the baseline, AVX2 and AVX-512: %llu, %llu, %llu; next seed %llu\n",
           (unsigned long long)calls[0], (unsigned long long)calls[1], (unsigned long long)calls[2],
           (unsigned long long)seed);
    return 0;
}
