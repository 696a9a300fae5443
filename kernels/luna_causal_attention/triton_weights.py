"""Pack weights, unpack weights and sums in the Triton kernels of causal Luna attention, forward and backward.

`INNER` is the dtype of weights and their gradients in matrix products: bfloat16 for bfloat16 inputs, float32 otherwise,
because float16 overflows. `PRECISION` applies to products of float32. Tiles are zero-padded to powers of two: `BK`,
`BV` and `BL` for the sizes `SIZE` of keys, `WIDTH` of values and `L` of P.
"""

import triton
import triton.language as tl

from ..common.triton_tiles import dot, drop, load_kept, load_tile


@triton.jit
def place(blocks, T, H, S):
    """Return the number of segments of S tokens, and this program's segment, head, batch row, and head in the row.

    Programs are `(head, segment, block)`.
    """
    segments = tl.cdiv(T, S)
    segment = tl.program_id(0) // blocks % segments
    head = (tl.program_id(0) // blocks // segments).to(tl.int64)
    return segments, segment, head, head // H, head % H


@triton.jit
def tile_of(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return offsets and mask of a contiguous tile `[BR, BC]`, or (TRANSPOSED) of the transpose of one."""
    rows, columns = tl.arange(0, BR)[:, None], tl.arange(0, BC)[None, :]
    inside = (rows < ROWS) & (columns < COLUMNS)
    if TRANSPOSED:
        return rows + columns * ROWS, inside
    else:
        return rows * COLUMNS + columns, inside


@triton.jit
def load_sums(
    SUMS, number, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Return the sums `[BR, BC]` at this tile index, or 0 if SUMS is None."""
    sums = tl.zeros([BR, BC], tl.float32)
    if SUMS is not None:
        offsets, inside = tile_of(ROWS, COLUMNS, BR, BC, TRANSPOSED)
        sums += tl.load(SUMS + number * ROWS * COLUMNS + offsets, mask=inside, other=0.0)
    return sums


@triton.jit
def store_sums(
    SUMS, number, sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    offsets, inside = tile_of(ROWS, COLUMNS, BR, BC, TRANSPOSED)
    tl.store(SUMS + number * ROWS * COLUMNS + offsets, sums, mask=inside)


@triton.jit
def load_rate(COUNT, b, t, ok, T):
    """Return 1 / t of the equations. Before the first kept token the sums are 0, and so is the result."""
    count = tl.load(COUNT + b * T + t, mask=ok, other=1)
    return 1.0 / tl.maximum(count, 1).to(tl.float32)


@triton.jit
def activate(scores, ELU: tl.constexpr):
    """Return log2(1 + 2^s), or elu(s) + 1, accurate in both tails."""
    if ELU:
        return tl.exp(tl.minimum(scores, 0.0)) + tl.maximum(scores, 0.0)
    else:
        power = tl.exp2(-tl.abs(scores))
        # log2(1 + z) = 2 / ln 2 atanh(z / (2 + z)); the device's logarithm is inaccurate near 1.
        ratio = power / (2.0 + power)
        square = ratio * ratio
        series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * (1.0 / 13.0))
        series = 1.0 / 5.0 + square * (1.0 / 7.0 + square * series)
        series = 1.0 + square * (1.0 / 3.0 + square * series)
        return tl.maximum(scores, 0.0) + 2.8853900817779268 * ratio * series


@triton.jit
def slope(scores, ELU: tl.constexpr):
    """Return the derivative of `activate`."""
    if ELU:
        return tl.exp(tl.minimum(scores, 0.0))
    else:
        power = tl.exp2(-tl.abs(scores))
        return tl.where(scores >= 0.0, 1.0, power) / (1.0 + power)


@triton.jit
def load_pack_query(PQ, PACK_MASK, pq_l, b, SIZE: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr):
    """Return P `[BL, BK]` of a head, and a mask of the rows in use."""
    packed_rows = tl.arange(0, BL)
    used = load_kept(PACK_MASK, b * L, packed_rows, L)
    return load_tile(PQ, packed_rows, pq_l, used, tl.arange(0, BK), SIZE), used


@triton.jit
def pack_scores(pack_key, pack_query, scale, PRECISION: tl.constexpr):
    return dot(pack_key, tl.trans(pack_query), None, PRECISION) * scale


@triton.jit
def pack_dropout(x, SEED, threshold, rescale, head, t, C: tl.constexpr, BL: tl.constexpr):
    """Return pack weights `[C, BL]` of tokens t after dropout, or the gradients before it."""
    return drop(x, SEED, threshold, rescale, 2 * head, t, 0, C, BL)


@triton.jit
def unpack_dropout(x, SEED, threshold, rescale, head, t, C: tl.constexpr, BL: tl.constexpr):
    """Return unpack weights `[C, BL]` of tokens t after dropout, or the gradients before it."""
    return drop(x, SEED, threshold, rescale, 2 * head + 1, t, 0, C, BL)


@triton.jit
def softmax(scores, used):
    """Return the softmax over the columns in use; 0 in the others."""
    scores = tl.where(used[None, :], scores, -float("inf"))
    largest = tl.max(scores, 1)
    # If no column is in use.
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    powers = tl.exp(scores - largest[:, None])
    total = tl.sum(powers, 1)
    return powers / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def weigh_chunk(
    Q, K, PK, COUNT, MASK, SEED, pack_query, used, sum_k, scale, threshold, rescale, q_t, k_t, pk_t, head, b, t, T,
    SIZE: tl.constexpr, ELU: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Return, for C tokens: mask, 1 / t, keys, pack weights after dropout, unpack weights before dropout.

    `sum_k` is the sum of key^T pack weights over all earlier tokens.
    """
    ok = t < T
    kept = load_kept(MASK, b * T, t, T)
    rate = load_rate(COUNT, b, t, ok, T)
    r, column = tl.arange(0, C), tl.arange(0, BK)
    pack_key = load_tile(PK, t, pk_t, kept, column, SIZE)
    a = tl.where(used[None, :], activate(pack_scores(pack_key, pack_query, scale, PRECISION), ELU), 0.0)
    a = pack_dropout(a, SEED, threshold, rescale, head, t, C, BL).to(INNER)
    q = load_tile(Q, t, q_t, ok, column, SIZE)
    k = load_tile(K, t, k_t, kept, column, SIZE)
    similarity = tl.where(r[:, None] >= r[None, :], dot(q, tl.trans(k), None, PRECISION), 0.0)
    scores = dot(similarity.to(INNER), a, None, PRECISION)
    scores = dot(q, sum_k, scores, PRECISION) * (rate * scale)[:, None]
    return kept, rate, k, a, softmax(scores, used)
