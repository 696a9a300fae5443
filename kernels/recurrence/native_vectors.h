/* The averages with one instruction set, for native.c, which defines SUFFIX, LANES, ROWS, SUMS, TARGET, WIDEN and JOIN. */

#define V NAME(vector)
#define I NAME(integers)
#define B NAME(bits)
#define F NAME(half)
#define D NAME(wide)
#define Side NAME(side)
#define Work NAME(work)
typedef float V __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t I __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t B __attribute__((vector_size(2 * LANES), may_alias));
typedef float F __attribute__((vector_size(2 * LANES), may_alias));  /* one half of V */
typedef double D __attribute__((vector_size(4 * LANES), may_alias)); /* the same numbers in float64 */

/* One direction: coefficients, states and gradients of a block of channels. Arrays of D contain two vectors for one V. */
typedef struct {
    V *power;             /* [M][POWERS]: q^0 to q^TILE */
    V *w, *p;             /* [M], [N] */
    V *start;             /* [TILES][M]: w h before a tile; backward: p G after it; both with -Im */
    V *of_x, *of_g;       /* [M][2][TILES]: S and S', A and B */
    V *states, *starts, *ends; /* [tiles][M]: h, w h and p G of all tiles of a sequence */
    V *recent;            /* [2 M + N]: the gradients of w, log q and p in the last tiles */
    D *q, *last, *rest;   /* [M][2]: q, q^TILE, and q^size of a shorter tile */
    D *state, *adjoint;   /* [M][2]: h and G */
    D *total;             /* [2 M + N][2]: the sums of `recent` */
} Side;

typedef struct {
    const Call *call;
    int64_t block, first, lanes, numbers; /* the channels from `first` on; numbers = M = N P */
    Side side[2];
    V taps[2 * TILE];       /* k of lag l at TILE + l, of both directions, with the skip at lag 0 */
    V skip;
    D grad_taps[2 * TILE][2], grad_skip[2];
    V *grad_silu;           /* [length]: the gradients of the arguments of silu */
    void *memory;
} Work;

INLINE V NAME(load)(const void *from, int64_t at, int64_t lanes, int half) {
    V x = {0};
    B bits = {0};
    if (!half) {
        if (lanes == LANES) memcpy(&x, (const float *)from + at, sizeof x);
        else memcpy(&x, (const float *)from + at, (size_t)lanes * 4);
        return x;
    }
    if (lanes == LANES) memcpy(&bits, (const uint16_t *)from + at, sizeof bits);
    else memcpy(&bits, (const uint16_t *)from + at, (size_t)lanes * 2);
    return (V)(__builtin_convertvector(bits, I) << 16);
}

INLINE void NAME(save)(void *to, int64_t at, V x, int64_t lanes, int half) {
    I nan = (I)(x != x), rounded = ((I)x + 0x7fff + (((I)x >> 16) & 1)) >> 16; /* to nearest, ties to even */
    if (half) {
        B bits = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), B);
        memcpy((uint16_t *)to + at, &bits, (size_t)lanes * 2);
    } else if (lanes == LANES) memcpy((float *)to + at, &x, sizeof x);
    else memcpy((float *)to + at, &x, (size_t)lanes * 4);
}

INLINE V NAME(sigmoid)(V z) {
    V a = -z, most = a - a + 87.0f;
    I high = (I)(a > most), low = (I)(a < -most);
    a = (V)((high & (I)most) | (low & (I)-most) | (~(high | low) & (I)a));
    V t = a * 1.44269504f + 12582912.0f, n = t - 12582912.0f; /* an integer, which is in the last bits of t */
    V r = a - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    V e = r * 1.9875691500e-4f + 1.3981999507e-3f; /* exp as in Cephes */
    e = e * r + 8.3334519073e-3f;
    e = e * r + 4.1665795894e-2f;
    e = e * r + 1.6666665459e-1f;
    e = e * r + 5.0000001201e-1f;
    e = e * (r * r) + r + 1.0f;
    return 1.0f / (1.0f + (V)((I)e + ((I)t << 23)));
}

INLINE D NAME(widen)(const V *x, int half) { return WIDEN(((const F *)x)[half]); }

INLINE void NAME(add)(D *sums, V x) {
    sums[0] += NAME(widen)(&x, 0);
    sums[1] += NAME(widen)(&x, 1);
}

/* Load a tile of rows into the cache: they are too far apart for the processor to do so ahead of time. */
INLINE void NAME(fetch)(const Work *k, const void *from, int64_t t) {
    int64_t width = k->call->half ? 2 : 4;
    const char *at = (const char *)from + (t * k->call->channels + k->first) * width;
    for (int j = 0; j < TILE; j++, at += k->call->channels * width) __builtin_prefetch(at, 0, 2);
}

/* Load `rows` rows from t on, and 0 for masked rows and up to the end of the last one of `tiles` tiles. */
INLINE void NAME(load_rows)(const Work *k, V *to, const void *from, const uint8_t *mask, int64_t t, int64_t rows,
                            int64_t tiles) {
    const Call *c = k->call;
    int plain = k->lanes == LANES && !mask && !c->half;
    int64_t at = t * c->channels + k->first, j = 0;
    for (; j < rows; j++, at += c->channels) {
        if (plain) to[j] = NAME(load)(from, at, LANES, 0);
        else if (mask && !mask[t + j]) to[j] = (V){0};
        else to[j] = NAME(load)(from, at, k->lanes, c->half);
    }
    for (; j < tiles * TILE; j++) to[j] = (V){0};
}

INLINE void NAME(save_rows)(const Work *k, const V *from, int64_t t, int64_t rows) {
    const Call *c = k->call;
    int plain = k->lanes == LANES && !c->half;
    int64_t at = t * c->channels + k->first;
    for (int64_t j = 0; j < rows; j++, at += c->channels) {
        if (plain) NAME(save)(c->out, at, from[j], LANES, 0);
        else NAME(save)(c->out, at, from[j], k->lanes, c->half);
    }
}

/* The row of x at a position that the mask drops, for a skip that uses it. */
INLINE V NAME(dropped)(const Work *k, int64_t t) {
    const Call *c = k->call;
    if (!c->silu || !c->skip || !c->mask || c->mask[t]) return (V){0};
    return NAME(load)(c->x, t * c->channels + k->first, k->lanes, c->half);
}

/* Within a tile, for ROWS rows from `start` on: out_j = sum_i k_{j-i} in_i; transposed: out_j = sum_i k_{i-j} in_i. */
INLINE void NAME(convolve_rows)(const V *taps, const V *in, V *out, const int start, const int both, const int transposed) {
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
    NAME(convolve_rows)(k->taps, in, out, 0, both, transposed); \
    if (ROWS < TILE) NAME(convolve_rows)(k->taps, in, out, TILE - ROWS, both, transposed)
    if (k->call->directions == 2 && transposed) { CONVOLVE(1, 1); }
    else if (k->call->directions == 2) { CONVOLVE(1, 0); }
    else if (transposed) { CONVOLVE(0, 1); }
    else { CONVOLVE(0, 0); }
#undef CONVOLVE
}

/* Add sum_j gradient_j x_{j-lag} for the ROWS lags from `start` on to the gradients of the taps. */
INLINE void NAME(correlate_rows)(Work *k, const V *x, const V *gradient, const int start) {
    V y[ROWS];
    UNROLL for (int row = 0; row < ROWS; row++) y[row] = (V){0};
    UNROLL for (int i = 0; i < TILE; i++) {
        V value = x[i];
        UNROLL for (int row = 0; row < ROWS; row++) {
            int j = i + start + row;
            if (j >= 0 && j < TILE) y[row] = y[row] + gradient[j] * value;
        }
    }
    UNROLL for (int row = 0; row < ROWS; row++) NAME(add)(k->grad_taps[TILE + start + row], y[row]);
}

static TARGET void NAME(correlate)(Work *k, const V *x, const V *gradient) {
    NAME(correlate_rows)(k, x, gradient, 0);
    if (ROWS < TILE) NAME(correlate_rows)(k, x, gradient, TILE - ROWS);
    if (k->call->directions == 1) return;
    NAME(correlate_rows)(k, x, gradient, -ROWS);
    if (ROWS < TILE) NAME(correlate_rows)(k, x, gradient, -TILE);
}

/* The products with powers of q, for some tiles at once, so that a power is loaded once for all of them; `rows` times
 * `tiles` sums are in registers. The powers at the positions of a tile are q^e with e = first + step j: from the states to
 * the results (OUTWARD), and from the inputs to the next states (INWARD). The second direction has its start at the end. */
#define OUTWARD(direction) (direction) ? TILE - c->shift : 1, (direction) ? -1 : 1
#define INWARD(direction) (direction) ? 0 : size - 1, (direction) ? 1 : -1

/* sums[row][tile] = sum_j q^e in[tile][j]. */
INLINE void NAME(project)(const V *power, const V *in, V *sums, int64_t step, const int rows, const int tiles) {
    V y[SUMS];
    UNROLL for (int i = 0; i < rows * tiles; i++) y[i] = (V){0};
    for (int j = 0; j < TILE; j++, power += step, in++) {
        UNROLL for (int i = 0; i < rows * tiles; i++) y[i] = y[i] + power[i / tiles * POWERS] * in[i % tiles * TILE];
    }
    UNROLL for (int i = 0; i < rows * tiles; i++) sums[i] = y[i];
}

/* out[tile][j] += sum_m q^e values[tile][m]. */
INLINE void NAME(expand_tiles)(const V *power, const V *values, int64_t count, V *out, int64_t step, const int rows,
                               const int tiles) {
    for (int start = 0; start < TILE; start += rows, power += step * rows, out += rows) {
        V y[SUMS];
        const V *at = power;
        UNROLL for (int i = 0; i < rows * tiles; i++) y[i] = (V){0};
        for (int64_t m = 0; m < count; m++, at += POWERS) {
            UNROLL for (int i = 0; i < rows * tiles; i++)
                y[i] = y[i] + at[step * (i / tiles)] * values[i % tiles * count + m];
        }
        UNROLL for (int i = 0; i < rows * tiles; i++) {
            V *to = out + i % tiles * TILE + i / tiles;
            *to = *to + y[i];
        }
    }
}

static TARGET void NAME(expand)(const V *power, const V *values, int64_t count, V *out, int64_t first, int64_t step,
                                int64_t tiles) {
    if (tiles == TILES) NAME(expand_tiles)(power + first, values, count, out, step, SUMS / TILES, TILES);
    else NAME(expand_tiles)(power + first, values, count, out, step, SUMS / TILES, 1);
}

/* Advance `rows` numbers of states from m on over some tiles: store w h before each tile in `start`, and h in `states` (or
 * NULL), and set h to q^size h + p S. */
INLINE void NAME(advance_rows)(const Work *k, const Side *side, int64_t m, const V *in, V *start, V *states, int64_t size,
                               const D *power, int direction, const int rows, const int tiles, const int components) {
    V sums[SUMS];
    int64_t M = k->numbers, first = direction ? 0 : size - 1;
    NAME(project)(side->power + m * POWERS + first, in, sums, direction ? 1 : -1, rows, tiles);
    for (int row = 0; row < rows; row += components, m += components) {
        V w = side->w[m], wi = side->w[m + components - 1], p = side->p[m / components], h, hi, add, addi;
        D *state = side->state + 2 * m, z[4], q[4];
        UNROLL for (int i = 0; i < 2 * components; i++) { z[i] = state[i]; q[i] = power[2 * m + i]; }
        for (int i = 0; i < tiles; i++) {
            int tile = direction ? tiles - 1 - i : i;
            V *to = start + tile * M + m;
            h = JOIN(z[0], z[1]);
            add = p * sums[row * tiles + tile];
            if (states) states[tile * M + m] = h;
            if (components == 1) {
                to[0] = w * h;
                UNROLL for (int half = 0; half < 2; half++) z[half] = q[half] * z[half] + NAME(widen)(&add, half);
                continue;
            }
            hi = JOIN(z[2], z[3]);
            addi = p * sums[(row + 1) * tiles + tile];
            if (states) states[tile * M + m + 1] = hi;
            to[0] = w * h - wi * hi;
            to[1] = -(w * hi + wi * h);
            UNROLL for (int half = 0; half < 2; half++) {
                D r = z[half], ri = z[half + 2];
                z[half] = q[half] * r - (q[half + 2] * ri - NAME(widen)(&add, half));
                z[half + 2] = q[half] * ri + (q[half + 2] * r + NAME(widen)(&addi, half));
            }
        }
        UNROLL for (int i = 0; i < 2 * components; i++) state[i] = z[i];
    }
}

static TARGET void NAME(advance)(const Work *k, const Side *side, const V *in, V *start, V *states, int64_t size,
                                 const D *power, int64_t tiles, int direction) {
    int64_t m = 0, M = k->numbers;
#define ADVANCE(rows, tiles, components) \
    for (; m + rows <= M; m += rows) \
        NAME(advance_rows)(k, side, m, in, start, states, size, power, direction, rows, tiles, components)
    if (k->call->components == 1 && tiles == TILES) { ADVANCE(SUMS / TILES, TILES, 1); ADVANCE(1, TILES, 1); }
    else if (k->call->components == 1) { ADVANCE(1, 1, 1); }
    else if (tiles == TILES) { ADVANCE(SUMS / TILES, TILES, 2); ADVANCE(2, TILES, 2); }
    else { ADVANCE(2, 1, 2); }
#undef ADVANCE
}

/* sums[m][0][tile] = sum_j q^e in[tile][j], and sums[m][1][tile] = the same with the factors e. */
static TARGET void NAME(project_twice)(const Work *k, const Side *side, const V *in, V *sums, int64_t first, int64_t step,
                                       int64_t tiles) {
    V both[2 * TILES * TILE];
    int64_t count = tiles * TILE, m = 0, M = k->numbers;
    for (int64_t j = 0; j < count; j++) {
        both[j] = in[j];
        both[count + j] = in[j] * (float)(first + step * (j % TILE));
    }
    const V *power = side->power + first;
    if (tiles == TILES) {
        for (; m + SUMS / TILES / 2 <= M; m += SUMS / TILES / 2)
            NAME(project)(power + m * POWERS, both, sums + m * 2 * TILES, step, SUMS / TILES / 2, 2 * TILES);
        for (; m < M; m++) NAME(project)(power + m * POWERS, both, sums + m * 2 * TILES, step, 1, 2 * TILES);
    } else {
        for (; m < M; m++) NAME(project)(power + m * POWERS, both, sums + m * 2, step, 1, 2);
    }
}

/* Add the gradients of the coefficients in one of `tiles` tiles, from the states before it, S, S', A and B; store p G in
 * `end`, and set G to that before the tile. */
INLINE void NAME(differentiate_components)(const Work *k, const Side *side, const V *before, V *end, int64_t size, const D *power,
                                      int64_t tile, int64_t tiles, const int components) {
    V *grad_w = side->recent, *grad_log = grad_w + k->numbers, *grad_p = grad_log + k->numbers;
    float factor = (float)size;
    for (int64_t n = 0; n < k->call->states; n++) {
        int64_t m = n * components;
        const V *x = side->of_x + 2 * m * tiles + tile, *g = side->of_g + 2 * m * tiles + tile;
        const D *r = power + 2 * m;
        D *z = side->adjoint + 2 * m;
        V G = JOIN(z[0], z[1]), q = JOIN(r[0], r[1]) * factor, w = side->w[m], p = side->p[n], h = before[m];
        V s = x[0], s2 = x[tiles], a = g[0], b = g[tiles];
        end[m] = p * G;
        if (components == 1) {
            V add = w * a;
            grad_w[m] += a * h;
            grad_p[n] += G * s;
            grad_log[m] += w * b * h + G * (q * h + p * s2);
            UNROLL for (int half = 0; half < 2; half++) z[half] = r[half] * z[half] + NAME(widen)(&add, half);
            continue;
        }
        V Gi = JOIN(z[2], z[3]), qi = JOIN(r[2], r[3]) * factor, wi = side->w[m + 1], hi = before[m + 1];
        V si = x[2 * tiles], s2i = x[3 * tiles], ai = g[2 * tiles], bi = g[3 * tiles];
        V c = b * h - bi * hi, ci = b * hi + bi * h, e = q * h - qi * hi + p * s2, ei = q * hi + qi * h + p * s2i;
        V add = w * a - wi * ai, addi = w * ai + wi * a;
        end[m + 1] = -(p * Gi);
        grad_w[m] += a * h - ai * hi;
        grad_w[m + 1] += a * hi + ai * h;
        grad_p[n] += G * s - Gi * si;
        grad_log[m] += w * c - wi * ci + (G * e - Gi * ei);
        grad_log[m + 1] += w * ci + wi * c + (G * ei + Gi * e);
        UNROLL for (int half = 0; half < 2; half++) {
            D y = z[half], yi = z[half + 2];
            z[half] = r[half] * y - (r[half + 2] * yi - NAME(widen)(&add, half));
            z[half + 2] = r[half] * yi + (r[half + 2] * y + NAME(widen)(&addi, half));
        }
    }
}

static TARGET void NAME(differentiate)(const Work *k, const Side *side, const V *before, V *end, int64_t size, const D *power,
                                       int64_t tile, int64_t tiles) {
    if (k->call->components == 1) NAME(differentiate_components)(k, side, before, end, size, power, tile, tiles, 1);
    else NAME(differentiate_components)(k, side, before, end, size, power, tile, tiles, 2);
}

/* Add the gradients in the last tiles to those of all. */
static TARGET void NAME(flush)(const Work *k, const Side *side) {
    for (int64_t m = 0; m < 2 * k->numbers + k->call->states; m++) {
        NAME(add)(side->total + 2 * m, side->recent[m]);
        side->recent[m] = (V){0};
    }
}

/* Return q^size. */
static TARGET const D *NAME(power_of)(const Work *k, const Side *side, int64_t size) {
    int P = k->call->components;
    if (size == TILE) return side->last;
    for (int64_t m = 0; m < k->numbers; m += P) for (int half = 0; half < 2; half++) {
        D *to = side->rest + 2 * m + half, q = side->q[2 * m + half], r = q - q, a = r + 1.0, b = r;
        if (P == 2) r = side->q[2 * m + 2 + half];
        for (int64_t j = 0; j < size; j++) {
            D z = a * q - b * r;
            b = a * r + b * q;
            a = z;
        }
        to[0] = a;
        if (P == 2) to[2] = b;
    }
    return side->rest;
}

/* Set states or adjoints to those of a sequence, [S, D, N, P] or NULL = 0; an adjoint is the conjugate of a gradient. */
static TARGET void NAME(set_states)(const Work *k, D *to, const float *from, int64_t sequence, double sign) {
    memset(to, 0, (size_t)(2 * k->numbers) * sizeof(D));
    for (int64_t l = 0; from && l < k->lanes; l++) for (int64_t m = 0; m < k->numbers; m++) {
        double value = from[(sequence * k->call->channels + k->first + l) * k->numbers + m];
        ((double *)to)[m * LANES + l] = k->call->components == 2 && m % 2 ? sign * value : value;
    }
}

static TARGET void NAME(get_states)(const Work *k, const D *from, float *to, int64_t sequence, double sign) {
    for (int64_t l = 0; to && l < k->lanes; l++) for (int64_t m = 0; m < k->numbers; m++) {
        double value = ((const double *)from)[m * LANES + l];
        to[(sequence * k->call->channels + k->first + l) * k->numbers + m] =
            (float)(k->call->components == 2 && m % 2 ? sign * value : value);
    }
}

/* The number of tiles that are computed together from tile i on: TILES complete ones, or one. */
INLINE int64_t NAME(together)(int64_t i, int64_t length) { return i >= 0 && (i + TILES) * TILE <= length ? TILES : 1; }

/* The results of some tiles before silu, from w h in `start` and `starts`. */
INLINE void NAME(results)(const Work *k, int64_t t, int64_t i, int64_t tiles, const V *x, V *y) {
    const Call *c = k->call;
    for (int64_t tile = 0; tile < tiles; tile++) {
        NAME(fetch)(k, c->x, t + (tiles + tile) * TILE);
        NAME(convolve)(k, x + tile * TILE, y + tile * TILE, 0);
    }
    NAME(expand)(k->side[0].power, k->side[0].start, k->numbers, y, OUTWARD(0), tiles);
    if (c->directions == 1) return;
    NAME(expand)(k->side[1].power, k->side[1].starts + i * k->numbers, k->numbers, y, OUTWARD(1), tiles);
}

/* Scan a sequence from its end: store w h and, for the backward pass, h before each tile. */
static TARGET void NAME(scan_from_end)(Work *k, int64_t first, int64_t length) {
    const Call *c = k->call;
    Side *side = &k->side[1];
    int64_t M = k->numbers, tiles;
    V x[TILES * TILE];
    NAME(set_states)(k, side->state, NULL, 0, 1.0);
    for (int64_t i = (length + TILE - 1) / TILE; i > 0; i -= tiles) {
        tiles = NAME(together)(i - TILES, length);
        int64_t tile = i - tiles, rows = least(tiles * TILE, length - tile * TILE);
        V *states = side->states ? side->states + tile * M : NULL;
        NAME(load_rows)(k, x, c->x, c->mask, first + tile * TILE, rows, tiles);
        NAME(advance)(k, side, x, side->starts + tile * M, states, TILE, side->last, tiles, 1);
    }
}

static TARGET void NAME(forward_sequence)(Work *k, int64_t sequence) {
    const Call *c = k->call;
    Side *side = &k->side[0];
    int64_t first = first_of(c, sequence), length = first_of(c, sequence + 1) - first, tiles;
    V x[TILES * TILE], y[TILES * TILE];
    if (c->directions == 2) NAME(scan_from_end)(k, first, length);
    NAME(set_states)(k, side->state, c->initial, sequence, 1.0);
    for (int64_t i = 0; i * TILE < length; i += tiles) {
        tiles = NAME(together)(i, length);
        int64_t t = first + i * TILE, rows = least(tiles * TILE, length - i * TILE), size = least(TILE, rows);
        NAME(load_rows)(k, x, c->x, c->mask, t, rows, tiles);
        NAME(advance)(k, side, x, side->start, NULL, size, NAME(power_of)(k, side, size), tiles, 0);
        NAME(results)(k, t, i, tiles, x, y);
        for (int64_t j = 0; c->silu && j < rows; j++) {
            V z = y[j] + k->skip * NAME(dropped)(k, t + j);
            y[j] = z * NAME(sigmoid)(z);
        }
        NAME(save_rows)(k, y, t, rows);
    }
    NAME(get_states)(k, side->state, c->final, sequence, 1.0);
}

/* Multiply the gradients of some tiles by the derivative of silu. */
static TARGET void NAME(through_silu)(Work *k, int64_t t, int64_t i, int64_t rows, int64_t tiles, const V *x, V *gradient) {
    V y[TILES * TILE];
    NAME(results)(k, t, i, tiles, x, y);
    for (int64_t j = 0; j < rows; j++) {
        V other = NAME(dropped)(k, t + j), z = y[j] + k->skip * other, s = NAME(sigmoid)(z);
        gradient[j] = gradient[j] * (s * (1.0f + z * (1.0f - s)));
        if (k->call->mask && !k->call->mask[t + j]) NAME(add)(k->grad_skip, gradient[j] * other);
    }
}

/* Store h before each tile and the gradients of the arguments of silu; compute the gradients of the second direction. */
static TARGET void NAME(scan_again)(Work *k, int64_t sequence, int64_t first, int64_t length) {
    const Call *c = k->call;
    Side *side = &k->side[0], *other = &k->side[1];
    int64_t M = k->numbers, tiles;
    V x[TILES * TILE], gradient[TILES * TILE];
    NAME(set_states)(k, side->state, c->initial, sequence, 1.0);
    for (int64_t i = 0; i * TILE < length; i += tiles) {
        tiles = NAME(together)(i, length);
        int64_t t = first + i * TILE, rows = least(tiles * TILE, length - i * TILE), size = least(TILE, rows);
        NAME(load_rows)(k, x, c->x, c->mask, t, rows, tiles);
        NAME(advance)(k, side, x, side->start, side->states + i * M, size, NAME(power_of)(k, side, size), tiles, 0);
        if (!c->silu && c->directions == 1) continue;
        NAME(load_rows)(k, gradient, c->gradient, NULL, t, rows, tiles);
        if (c->silu) {
            NAME(through_silu)(k, t, i, rows, tiles, x, gradient);
            memcpy(k->grad_silu + i * TILE, gradient, (size_t)rows * sizeof(V));
        }
        if (c->directions == 1) continue;
        NAME(project_twice)(k, other, x, other->of_x, INWARD(1), tiles);
        NAME(project_twice)(k, other, gradient, other->of_g, OUTWARD(1), tiles);
        for (int64_t j = 0; j < tiles; j++)
            NAME(differentiate)(k, other, other->states + (i + j) * M, other->ends + (i + j) * M, TILE, other->last, j, tiles);
        NAME(flush)(k, other);
    }
}

static TARGET void NAME(backward_sequence)(Work *k, int64_t sequence) {
    const Call *c = k->call;
    Side *side = &k->side[0], *other = &k->side[1];
    int64_t first = first_of(c, sequence), length = first_of(c, sequence + 1) - first, M = k->numbers, tiles;
    V x[TILES * TILE], gradient[TILES * TILE], out[TILES * TILE];
    if (c->directions == 2) {
        NAME(scan_from_end)(k, first, length);
        NAME(set_states)(k, other->adjoint, NULL, 0, 1.0);
    }
    NAME(scan_again)(k, sequence, first, length);
    NAME(set_states)(k, side->adjoint, c->grad_final, sequence, -1.0);
    for (int64_t i = (length + TILE - 1) / TILE; i > 0; i -= tiles) {
        tiles = NAME(together)(i - TILES, length);
        int64_t start = i - tiles, rows = least(tiles * TILE, length - start * TILE), size = least(TILE, rows);
        int64_t t = first + start * TILE, before = t - tiles * TILE;
        NAME(load_rows)(k, x, c->x, c->mask, t, rows, tiles);
        if (c->silu) {
            memcpy(gradient, k->grad_silu + start * TILE, (size_t)rows * sizeof(V));
            memset(gradient + rows, 0, (size_t)(tiles * TILE - rows) * sizeof(V));
        } else NAME(load_rows)(k, gradient, c->gradient, NULL, t, rows, tiles);
        NAME(project_twice)(k, side, x, side->of_x, INWARD(0), tiles);
        NAME(project_twice)(k, side, gradient, side->of_g, OUTWARD(0), tiles);
        for (int64_t j = tiles - 1; j >= 0; j--) {
            const D *power = NAME(power_of)(k, side, size);
            NAME(fetch)(k, c->x, before + j * TILE);
            if (!c->silu) NAME(fetch)(k, c->gradient, before + j * TILE);
            NAME(differentiate)(k, side, side->states + (start + j) * M, side->start + j * M, size, power, j, tiles);
            NAME(correlate)(k, x + j * TILE, gradient + j * TILE);
            NAME(convolve)(k, gradient + j * TILE, out + j * TILE, 1);
        }
        NAME(flush)(k, side);
        NAME(expand)(side->power, side->start, M, out, INWARD(0), tiles);
        if (c->directions == 2) NAME(expand)(other->power, other->ends + start * M, M, out, INWARD(1), tiles);
        for (int64_t j = 0; c->mask && j < rows; j++)
            if (!c->mask[t + j]) out[j] = c->silu ? k->skip * gradient[j] : k->skip - k->skip;
        NAME(save_rows)(k, out, t, rows);
    }
    NAME(get_states)(k, side->adjoint, c->grad_initial, sequence, -1.0);
}

/* Load the coefficients of a block of channels, and compute powers and taps. */
static TARGET void NAME(prepare)(Work *k, int64_t block) {
    const Call *c = k->call;
    int64_t N = c->states, P = c->components, M = k->numbers;
    D taps[2 * TILE][2];
    memset(taps, 0, sizeof taps);
    k->block = block;
    k->first = block * LANES;
    k->lanes = least(LANES, c->channels - k->first);
    for (int direction = 0; direction < c->directions; direction++) {
        Side *side = &k->side[direction];
        for (int64_t l = 0; l < k->lanes; l++) {
            int64_t row = direction * c->channels + k->first + l;
            for (int64_t m = 0; m < M; m++) ((double *)side->q)[m * LANES + l] = c->q[row * M + m];
            for (int64_t m = 0; m < M; m++) ((float *)side->w)[m * LANES + l] = c->weight[row * M + m];
            for (int64_t n = 0; n < N; n++) ((float *)side->p)[n * LANES + l] = c->in[row * N + n];
        }
        for (int64_t m = 0; m < M; m += P) {
            D a[2], b[2], w[2], u[2], q[2], r[2];
            for (int half = 0; half < 2; half++) {
                D p = NAME(widen)(side->p + m / P, half);
                q[half] = side->q[2 * m + half];
                w[half] = p * NAME(widen)(side->w + m, half);
                r[half] = u[half] = b[half] = p - p;
                a[half] = b[half] + 1.0;
                if (P == 1) continue;
                r[half] = side->q[2 * m + 2 + half];
                u[half] = p * NAME(widen)(side->w + m + 1, half);
            }
            for (int e = 0; e < POWERS; e++) {
                int lag = direction ? -e - c->shift : e;
                side->power[m * POWERS + e] = JOIN(a[0], a[1]);
                if (P == 2) side->power[(m + 1) * POWERS + e] = JOIN(b[0], b[1]);
                for (int half = 0; half < 2; half++) {
                    D z = a[half] * q[half] - b[half] * r[half];
                    if (lag < TILE && lag > -TILE) taps[TILE + lag][half] += w[half] * a[half] - u[half] * b[half];
                    if (e == TILE) side->last[2 * m + half] = a[half];
                    if (e == TILE && P == 2) side->last[2 * m + 2 + half] = b[half];
                    b[half] = a[half] * r[half] + b[half] * q[half];
                    a[half] = z;
                }
            }
        }
    }
    for (int lag = 0; lag < 2 * TILE; lag++) k->taps[lag] = JOIN(taps[lag][0], taps[lag][1]);
    k->skip = (V){0};
    if (c->skip) k->skip = NAME(load)(c->skip, k->first, k->lanes, 0);
    k->taps[TILE] = k->taps[TILE] + k->skip;
}

/* Add the gradients of the taps to those of the coefficients. */
static TARGET void NAME(finish)(Work *k) {
    const Call *c = k->call;
    int64_t P = c->components, M = k->numbers;
    for (int direction = 0; direction < c->directions; direction++) {
        Side *side = &k->side[direction];
        for (int64_t m = 0; m < M; m += P) for (int half = 0; half < 2; half++) {
            D *grad_w = side->total + 2 * m + half, *grad_log = grad_w + 2 * M, *grad_p = side->total + 4 * M + 2 * m / P + half;
            D w = NAME(widen)(side->w + m, half), p = NAME(widen)(side->p + m / P, half);
            D e = p - p, ei = e, f = e, fi = e, wi = e;
            if (P == 2) wi = NAME(widen)(side->w + m + 1, half);
            for (int l = 0; l < TILE - (direction ? c->shift : 0); l++) { /* sums of q^l and of l q^l */
                D tap = k->grad_taps[TILE + (direction ? -l - c->shift : l)][half];
                D real = tap * NAME(widen)(side->power + m * POWERS + l, half), imaginary = real - real;
                if (P == 2) imaginary = tap * NAME(widen)(side->power + (m + 1) * POWERS + l, half);
                e += real;
                ei += imaginary;
                f += real * (double)l;
                fi += imaginary * (double)l;
            }
            grad_w[0] += p * e;
            grad_p[0] += w * e - wi * ei;
            grad_log[0] += p * (w * f - wi * fi);
            if (P == 1) continue;
            grad_w[2] += p * ei;
            grad_log[2] += p * (w * fi + wi * f);
        }
    }
    for (int half = 0; half < 2; half++) k->grad_skip[half] += k->grad_taps[TILE][half];
}

/* Set the arrays of a worker, or without memory only return their size in vectors. */
static TARGET int64_t NAME(lay_out)(Work *k, V *memory, int64_t longest, int gradients) {
    const Call *c = k->call;
    int64_t M = k->numbers, N = c->states, all = (longest / TILE + 1) * M, used = 0;
#define TAKE(array, count) \
    if (memory) (array) = (void *)(memory + used); \
    used += (count) * (int64_t)(sizeof *(array) / sizeof(V))
    for (int direction = 0; direction < c->directions; direction++) {
        Side *side = &k->side[direction];
        D **wide[] = {&side->q, &side->last, &side->rest, &side->state, &side->adjoint};
        used += TILE; /* rows after a shorter tile read powers before the first one */
        TAKE(side->power, M * POWERS);
        TAKE(side->w, M);
        TAKE(side->p, N);
        for (int i = 0; i < 5; i++) { TAKE(*wide[i], 2 * M); }
        TAKE(side->start, TILES * M);
        if (direction) { TAKE(side->starts, all); }
        if (!gradients) continue;
        TAKE(side->recent, 2 * M + N);
        TAKE(side->of_x, 2 * TILES * M);
        TAKE(side->of_g, 2 * TILES * M);
        TAKE(side->states, all);
        if (direction) { TAKE(side->ends, all); }
    }
    if (gradients && c->silu) { TAKE(k->grad_silu, longest); }
#undef TAKE
    return used;
}

static TARGET int NAME(open)(Work *k, const Call *c, int gradients) {
    int64_t longest = 0, M = c->states * c->components;
    *k = (Work){.call = c, .block = -1, .numbers = M};
    for (int64_t s = 0; s < c->sequences; s++) {
        int64_t length = first_of(c, s + 1) - first_of(c, s);
        if (length > longest) longest = length;
    }
    if (posix_memalign(&k->memory, 64, (size_t)NAME(lay_out)(k, NULL, longest, gradients) * sizeof(V))) return 1;
    NAME(lay_out)(k, k->memory, longest, gradients);
    for (int direction = 0; direction < c->directions; direction++) { /* lanes after the last channel are 0 */
        Side *side = &k->side[direction];
        memset(side->power - TILE, 0, (size_t)(TILE + M * (POWERS + 1) + c->states) * sizeof(V));
        memset(side->q, 0, (size_t)(2 * M) * sizeof(D));
        if (gradients) memset(side->recent, 0, (size_t)(2 * M + c->states) * sizeof(V));
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

static TARGET int NAME(backward_work)(Job *job) {
    Work k;
    const Call *c = job->call;
    if (NAME(open)(&k, c, 1)) return 1;
    for (int64_t unit; (unit = atomic_fetch_add(&job->next, 1)) < job->units;) {
        int64_t group = unit % job->groups, S = c->sequences;
        D *totals = (D *)(job->totals + unit * job->size);
        NAME(prepare)(&k, unit / job->groups);
        memset(k.grad_taps, 0, sizeof k.grad_taps);
        memset(k.grad_skip, 0, sizeof k.grad_skip);
        for (int direction = 0; direction < c->directions; direction++, totals += 4 * k.numbers + 2 * c->states)
            k.side[direction].total = totals;
        for (int64_t s = S * group / job->groups; s < S * (group + 1) / job->groups; s++) NAME(backward_sequence)(&k, s);
        NAME(finish)(&k);
        memcpy(totals, k.grad_skip, sizeof k.grad_skip);
    }
    free(k.memory);
    return 0;
}

/* Write the gradients of the coefficients of a block of channels: add the sums of its units in their order. */
static void NAME(reduce)(const Job *job, int64_t block) {
    const Call *c = job->call;
    int64_t N = c->states, P = c->components, M = N * P, first = block * LANES, lanes = least(LANES, c->channels - first);
    double *sums = job->totals + block * job->groups * job->size;
    for (int64_t i = job->size; i < job->groups * job->size; i++) sums[i % job->size] += sums[i];
    for (int direction = 0; direction < c->directions; direction++, sums += (2 * M + N) * LANES)
        for (int64_t l = 0; l < lanes; l++) for (int64_t n = 0; n < N; n++) {
            int64_t row = (direction * c->channels + first + l) * N + n, at = n * P * LANES + l;
            c->grad_weight[row * P] = (float)sums[at];
            c->grad_decay[row] = (float)sums[M * LANES + at];
            c->grad_in[row] = (float)sums[(2 * M + n) * LANES + l];
            if (P == 1) continue;
            c->grad_weight[row * 2 + 1] = (float)-sums[at + LANES];
            c->grad_radians[row] = (float)-sums[M * LANES + at + LANES];
        }
    for (int64_t l = 0; c->grad_skip && l < lanes; l++) c->grad_skip[first + l] = (float)sums[l];
}

static int NAME(forward)(const Call *c) {
    Job job = {.call = c, .units = (c->channels + LANES - 1) / LANES * c->sequences, .work = NAME(forward_work)};
    return run(&job);
}

static int NAME(backward)(const Call *c) {
    int64_t blocks = (c->channels + LANES - 1) / LANES, wanted = least(c->sequences, LEAST_UNITS / (blocks + 1));
    Job job = {.call = c, .groups = wanted > 1 ? wanted : 1, .work = NAME(backward_work)};
    job.units = blocks * job.groups;
    job.size = (c->directions * (2 * c->components + 1) * c->states + 1) * LANES;
    size_t bytes = (size_t)(job.units * job.size) * sizeof(double);
    if (posix_memalign((void **)&job.totals, 64, bytes + 64)) return 1;
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
        V x = NAME(load)(s->x, at, 1, s->half), sum = {0}, y = {0};
        for (int64_t m = 0; m < M; m += LANES) {
            int64_t lanes = least(LANES, M - m);
            V h = NAME(load)(s->before, at * M + m, lanes, 0), q = NAME(load)(s->change, d * M + m, lanes, 0), change = q * h;
            if (s->components == 2) {
                V re, im, other;
                UNROLL for (int l = 0; l < LANES; l++) {
                    re[l] = q[l & ~1];
                    im[l] = l & 1 ? q[l] : -q[l | 1];
                    other[l] = h[l ^ 1];
                }
                change = re * h + im * other;
            }
            if (kept) h = h + (change + NAME(load)(s->in, d * M + m, lanes, 0) * x[0]);
            sum = sum + NAME(load)(s->weight, d * M + m, lanes, 0) * h;
            NAME(save)(s->after, at * M + m, h, lanes, 0);
        }
        for (int l = 0; l < LANES; l++) y[0] += sum[l];
        if (s->skip && kept) y[0] += s->skip[d] * x[0];
        if (s->silu) y = y * NAME(sigmoid)(y);
        NAME(save)(s->out, at, y, 1, s->half);
    }
    return 0;
}

/* Mega, section 3.1: p = sigmoid(input), q = 1 - p sigmoid(damping). */
static TARGET int NAME(damped)(const Damped *d) {
    for (int64_t i = 0; i < d->count; i += LANES) {
        int64_t lanes = least(LANES, d->count - i);
        V a = NAME(load)(d->input, i, lanes, 0), b = NAME(load)(d->damping, i, lanes, 0), e = NAME(load)(d->expansion, i, lanes, 0);
        V p = NAME(sigmoid)(a), rest = NAME(sigmoid)(-a), undamped = NAME(sigmoid)(-b), loss = p * NAME(sigmoid)(b);
        V sum = rest + p * undamped, q = 1.0f - loss;
        I fast = (I)(loss > 0.5f);
        if (!d->grad_log) {
            for (int half = 0; half < 2; half++) {
                D decay = 1.0 - NAME(widen)(&loss, half); /* q near 1 from 1 - q, and near 0 from a sum, without cancellation */
                for (int64_t l = half * LANES / 2, j = 0; j < LANES / 2 && l < lanes; j++, l++)
                    d->q[i + l] = fast[l] ? (double)sum[l] : decay[j];
            }
            NAME(save)(d->in, i, p * e, lanes, 0);
            NAME(save)(d->weight, i, d->scale * NAME(load)(d->projection, i, lanes, 0), lanes, 0);
            continue;
        }
        q = (V)((fast & (I)sum) | (~fast & (I)q));
        I kept = ~(I)(q < 1e-30f); /* smaller ones count as 1e-30, so their gradient is 0 */
        V through = (V)(kept & (I)(NAME(load)(d->grad_log, i, lanes, 0) * loss / q));
        V grad_in = NAME(load)(d->grad_in, i, lanes, 0) * p;
        NAME(save)(d->grad_input, i, (grad_in * e - through) * rest, lanes, 0);
        NAME(save)(d->grad_damping, i, -through * undamped, lanes, 0);
        NAME(save)(d->grad_expansion, i, grad_in, lanes, 0);
        NAME(save)(d->grad_projection, i, d->scale * NAME(load)(d->grad_weight, i, lanes, 0), lanes, 0);
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
#undef OUTWARD
#undef INWARD
#undef SUFFIX
#undef LANES
#undef ROWS
#undef SUMS
#undef TARGET
#undef WIDEN
#undef JOIN
