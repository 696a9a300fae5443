"""The backward kernels of gated attention.

One kernel writes the weights and the gradient of the scores to a buffer of fixed size: for several segments, or for
some queries of a long segment. Every gradient is a product with one of the two, and each output block is written by one
program.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import triton_launch
from ..common.triton_launch import block_of, cdiv, rows_contiguous, strides
from ..common.triton_tiles import LOG2_E, dot, drop, load_kept, load_tile, store_tile
from .triton_forward import (
    DENSITY,
    INVERSE_DEVIATION,
    MEAN,
    SQRT_HALF,
    GatedCall,
    find_segment,
    multiply,
    scale_scores,
    scales,
)

# The maximum number of scores whose weights and gradients are in memory at the same time.
SCORES = 2**26


@triton.jit
def _delta_kernel(
    OUT, GRAD,  # [B, T, width]
    DELTA,  # [B, T]
    tokens, queries, width,
    grad_batch, grad_token,  # strides
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the sum over each row of the output times its gradient."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    grad = GRAD + token // queries * grad_batch + token % queries * grad_token
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, width, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        inside = (token < tokens)[:, None] & (v < width)[None, :]
        output = load_tile(OUT, token, width, token < tokens, v, width).to(tl.float32)
        total += tl.sum(output * tl.load(grad[:, None] + v[None, :], mask=inside, other=0.0).to(tl.float32), axis=1)
    tl.store(DELTA + token, total, mask=token < tokens)


@triton.jit(
    do_not_specialize=[
        "width", "chunks", "offset", "center", "first_segment", "first_query", "query_blocks", "key_blocks", "q_batch",
        "q_token", "k_batch", "k_token", "v_batch", "v_token", "grad_batch", "grad_token",
    ]
)  # fmt: skip
def _scores_kernel(
    Q, K,  # [B, T or S, SIZE]
    V, GRAD,  # [B, S or T, width]
    LSE, DELTA,  # [B, T], for softmax
    WEIGHTS, GRAD_SCORES,  # [segments, band, stride]
    BIAS,  # [2M - 1], distance 0 at `center`
    MASK,  # [B, S]
    LIVE,  # [segments], number of visible keys
    BOUNDS,  # [segments, 2], start and end of each segment of a varlen batch
    SEED,  # [1]
    queries, keys, width, chunk, chunks, offset, center, threshold, rescale,  # see `GatedCall` and `dropping`
    q_batch, q_token, k_batch, k_token, v_batch, v_token, grad_batch, grad_token,  # strides
    first_segment, first_query, band, stride, query_blocks, key_blocks,
    FUNCTION: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_Z: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write a tile of the weights that multiplied the values and, if GRAD is given, of the gradient of the scores.

    Tiles without visible keys are neither written, nor read by other kernels.
    """
    program = tl.program_id(0)
    local = program // key_blocks // query_blocks
    segment = first_segment + local
    batch, start, n_queries, n_keys = find_segment(segment, BOUNDS, queries, keys, chunk, chunks)
    n_queries = tl.minimum(n_queries, first_query + band)
    first = first_query + program // key_blocks % query_blocks * BLOCK_M
    first_key = program % key_blocks * BLOCK_N
    if (first >= n_queries) | (first_key >= n_keys):
        return
    if CAUSAL:
        if first_key > offset + first + BLOCK_M - 1:
            return
    i = first + tl.arange(0, BLOCK_M)
    j = first_key + tl.arange(0, BLOCK_N)
    live = load_kept(MASK, batch * keys + start, j, n_keys)
    width, grad_token = width * UNIT, grad_token * UNIT
    q_token, k_token, v_token = q_token * UNIT, k_token * UNIT, v_token * UNIT
    if GRAD is not None:
        grad = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        grad_first = GRAD + batch * grad_batch * UNIT + start * grad_token
        v_first = V + batch * v_batch * UNIT + start * v_token
        for first_column in range(0, width, BLOCK_V):
            v = first_column + tl.arange(0, BLOCK_V)
            grad_output = load_tile(grad_first, i, grad_token, i < n_queries, v, width)
            grad = dot(grad_output, tl.trans(load_tile(v_first, j, v_token, live, v, width)), grad, PRECISION)
    q_first = Q + batch * q_batch * UNIT + start * q_token
    k_first = K + batch * k_batch * UNIT + start * k_token
    products = multiply(None, q_first, i, q_token, n_queries, k_first, j, k_token, live, SIZE, BLOCK_Z, PRECISION)
    scale = scales(LIVE, segment, i, offset, n_keys, SIZE, FUNCTION, CAUSAL)
    scores, kept = scale_scores(products, scale, BIAS, center, i, j, live, n_queries, offset, CAUSAL)
    if GRAD is not None:
        grad = drop(grad, SEED, threshold, rescale, segment, i, first_key, BLOCK_M, BLOCK_N)
    if FUNCTION == "softmax":
        token = batch * queries + start + i
        lse = tl.load(LSE + token, mask=i < n_queries, other=0.0)
        weights = tl.exp2(scores * LOG2_E - lse[:, None])
        grad = weights * (grad - tl.load(DELTA + token, mask=i < n_queries, other=0.0)[:, None])
    elif FUNCTION == "laplace":
        deviations = (scores - MEAN) * INVERSE_DEVIATION
        weights = 0.5 + 0.5 * tl.math.erf(deviations * SQRT_HALF)
        if GRAD is not None:
            grad = grad * (DENSITY * tl.exp2(deviations * deviations * (-0.5 * LOG2_E)))
    else:
        weights = tl.maximum(scores, 0.0)
        if GRAD is not None:
            grad = grad * (2.0 * weights)
        weights = weights * weights
    weights = drop(tl.where(kept, weights, 0.0), SEED, threshold, rescale, segment, i, first_key, BLOCK_M, BLOCK_N)
    place = (local.to(tl.int64) * band + (i - first_query))[:, None] * stride + j[None, :]
    tl.store(WEIGHTS + place, weights.to(WEIGHTS.dtype.element_ty))
    if GRAD is not None:
        tl.store(GRAD_SCORES + place, tl.where(kept, grad, 0.0).to(GRAD_SCORES.dtype.element_ty))


@triton.jit(do_not_specialize=["chunks", "offset", "first_segment", "first_query", "blocks"])
def product_kernel(
    SCORES,  # [segments, band, stride]
    X, OUT,  # [B, S or T, COLUMNS]
    MASK,  # [B, S]
    LIVE,  # [segments], number of visible keys
    BOUNDS,  # [segments, 2], start and end of each segment of a varlen batch
    queries, keys, chunk, chunks, offset,
    x_batch, x_token,  # strides
    first_segment, first_query, band, stride, blocks, slices,
    FUNCTION: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr, SCALED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply `[queries, keys]` by rows of the keys; TRANSPOSED: `[keys, queries]` by rows of the queries.

    SCALED: divide every score as in the forward pass. ADD: add the product to OUT.
    """
    program = tl.program_id(0)
    local = program // slices // blocks
    segment = first_segment + local
    batch, start, n_queries, n_keys = find_segment(segment, BOUNDS, queries, keys, chunk, chunks)
    n_queries = tl.minimum(n_queries, first_query + band)
    block = program // slices % blocks
    if not TRANSPOSED:
        block = blocks - 1 - block  # schedule the longest blocks of causal attention first
    column = program % slices * BLOCK_N + tl.arange(0, BLOCK_N)
    first = block * BLOCK_M
    low = first_query
    high = n_queries
    if TRANSPOSED:
        if CAUSAL:
            low = tl.maximum(low, (first - offset) // BLOCK_K * BLOCK_K)
        outer_end = n_keys
    else:
        first += first_query
        low = 0
        high = n_keys
        if CAUSAL:
            high = tl.minimum(n_keys, offset + first + BLOCK_M)
        outer_end = n_queries
    if first >= outer_end:
        return
    outer = first + tl.arange(0, BLOCK_M)
    # Dividing relative to the midpoint of the divisors i + 1 avoids overflow and loss of precision in fp16.
    unit = tl.sqrt(tl.maximum(n_keys, 1).to(tl.float32))
    BY_QUERY: tl.constexpr = SCALED and TRANSPOSED and CAUSAL and FUNCTION != "softmax"
    scores = SCORES + (local.to(tl.int64) * band - first_query) * stride
    x_first = X + batch * x_batch + start * x_token
    output = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_inner in range(low, high, BLOCK_K):
        inner = first_inner + tl.arange(0, BLOCK_K)
        if TRANSPOSED:
            tile = tl.trans(tl.load(scores + inner.to(tl.int64)[:, None] * stride + outer[None, :]))
            x = load_tile(x_first, inner, x_token, inner < n_queries, column, COLUMNS)
            if BY_QUERY:
                x = (x.to(tl.float32) * (unit / (inner + offset + 1).to(tl.float32))[:, None]).to(x.dtype)
        else:
            tile = tl.load(scores + outer.to(tl.int64)[:, None] * stride + inner[None, :])
            live = load_kept(MASK, batch * keys + start, inner, n_keys)
            x = load_tile(x_first, inner, x_token, live, column, COLUMNS)
        output = dot(tile, x, output, PRECISION)
    if BY_QUERY:
        output = output / unit
    elif SCALED:
        output *= scales(LIVE, segment, outer, offset, n_keys, SIZE, FUNCTION, CAUSAL)[:, None]
    total = keys if TRANSPOSED else queries
    place = batch * total + start + outer
    if ADD:
        output += load_tile(OUT, place, COLUMNS, outer < outer_end, column, COLUMNS)
    store_tile(OUT, place, COLUMNS, outer < outer_end, column, COLUMNS, output)


@triton.jit(
    do_not_specialize=[
        "chunks", "offset", "first_segment", "segments", "first_query", "blocks", "diagonals", "share",
    ]
)  # fmt: skip
def _bias_kernel(
    SCORES,  # [segments, band, stride]
    TILES,  # [shares, diagonals, BLOCK, BLOCK]
    BOUNDS,  # [segments, 2], start and end of each segment of a varlen batch
    queries, keys, chunk, chunks, offset, first_segment, segments, first_query, band, stride, blocks, diagonals, share,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of the tiles on one diagonal of tiles, over some of the segments."""
    program = tl.program_id(0)
    shift = program % diagonals - (blocks - 1)  # distance from a tile's block of queries to its block of keys
    first_local = program // diagonals * share
    a = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    low = tl.maximum(0, -shift)
    for local in range(first_local, tl.minimum(first_local + share, segments)):
        _, _, n_queries, n_keys = find_segment(first_segment + local, BOUNDS, queries, keys, chunk, chunks)
        n_queries = tl.minimum(n_queries - first_query, band)
        high = tl.minimum(tl.cdiv(n_queries, BLOCK), tl.cdiv(n_keys, BLOCK) - shift)
        if CAUSAL:
            if shift * BLOCK - BLOCK >= offset + first_query:
                high = low
        scores = SCORES + tl.cast(local, tl.int64) * band * stride
        for block in range(low, high):
            i = block * BLOCK + a
            j = (block + shift) * BLOCK + a
            total += tl.load(scores + i.to(tl.int64)[:, None] * stride + j[None, :]).to(tl.float32)
    tl.store(TILES + program.to(tl.int64) * BLOCK * BLOCK + a[:, None] * BLOCK + a[None, :], total)


@triton.jit(do_not_specialize=["first", "shares", "diagonals", "length"])
def _diagonals_kernel(
    TILES,  # [shares, diagonals, BLOCK, BLOCK]
    BIAS,  # [length], the gradient of the bias
    first, shares, diagonals, length,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sums over the diagonals of all tiles `[shares, diagonals, BLOCK, BLOCK]` to BIAS, starting at `first`.

    Row a of a tile starts BLOCK - 1 - a entries after the diagonal of the tile's lower left corner. A program computes
    the entries that start in one tile.
    """
    entry, a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)[:, None]
    place = entry[None, :] + a + 1  # relative to the column 0 of the tile before
    tile = place // BLOCK - 1
    inside = (tile >= 0) & (tile < diagonals)
    source = tile * BLOCK * BLOCK + a * BLOCK + place % BLOCK
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for share in range(0, shares):
        total += tl.load(TILES + tl.cast(share, tl.int64) * diagonals * BLOCK * BLOCK + source, inside, other=0.0)
    places = first + entry
    there = (places >= 0) & (places < length)
    tl.store(BIAS + places, tl.load(BIAS + places, there, other=0.0) + tl.sum(total, 0), there)


class BackwardTiles(NamedTuple):
    """A configuration: tiles of the kernels, and their options; an iteration reads `inner` queries, keys or columns."""

    queries: int
    keys: int
    inner: int
    columns: int
    warps: int
    stages: int


class Part(NamedTuple):
    """The part of a call that is computed at once: a band of queries of some segments, and their scores."""

    call: GatedCall
    blocks: BackwardTiles
    first_segment: int
    segments: int
    first_query: int
    weights: Tensor
    grad_scores: Any  # None in a forward pass

    @property
    def band(self) -> int:
        return self.weights.shape[1]

    @property
    def stride(self) -> int:
        return self.weights.shape[2]


def _configurations(call: GatedCall) -> list[BackwardTiles]:
    """Return the candidate configurations, with the default first."""
    hopper = triton_launch.target(call.query.device).large
    if not call.narrow:
        return [BackwardTiles(block_of(call.queries, 64), block_of(call.keys, 64 if hopper else 32), 32, 64, 8, 2)]
    # Random numbers need registers.
    largest = 128 if hopper and call.seed is None else 64
    default = BackwardTiles(block_of(call.queries, 128), block_of(call.keys, largest), 64, 128, 8, 3)
    return [default, default._replace(stages=2), default._replace(keys=block_of(call.keys, 64), warps=4)]


def backward(
    grad_output: Tensor, output: Tensor | None, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and bias; `arguments` as in `forward`.

    `output` and `lse` come from the forward pass and are used for softmax only.
    """
    call = GatedCall(*arguments)
    query, key, value, bias = call.query, call.key, call.value, call.bias
    (grad_output,) = rows_contiguous(grad_output)
    delta = _delta(output, grad_output) if call.function == "softmax" and output is not None else None

    def run(blocks: BackwardTiles) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        parts = split(call, blocks, query.dtype)
        banded = any(part.first_query for part in parts)
        grad_query = query.new_empty(query.shape)
        # Each band adds to the gradients of the previous bands.
        grad_key, grad_value = (
            x.new_zeros(x.shape, dtype=torch.float32) if banded else x.new_empty(x.shape) for x in (key, value)
        )
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part in parts:
            write_scores(part, grad_output, lse, delta)
            multiply_scores(part, part.grad_scores, call.key, grad_query, transposed=False, scaled=True, add=False)
            multiply_scores(part, part.grad_scores, call.query, grad_key, transposed=True, scaled=True, add=banded)
            multiply_scores(part, part.weights, grad_output, grad_value, transposed=True, scaled=False, add=banded)
            if grad_bias is not None:
                _add_diagonals(grad_bias, part)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_bias

    *grads, grad_bias = call.choose(_scores_kernel, _configurations(call), run)
    return *grads, None if grad_bias is None else grad_bias.to(arguments[3].dtype)


def split(call: GatedCall, blocks: BackwardTiles, grad_dtype: torch.dtype | None = None) -> list[Part]:
    """Return the parts of a call; they share one buffer of weights and, with `grad_dtype`, one of gradients."""
    stride = _whole(call.keys, blocks.keys)
    band = min(_whole(call.queries, blocks.queries), _whole(SCORES // stride, blocks.queries))
    group = max(1, min(call.segments, SCORES // (band * stride)))
    weights = call.value.new_empty(group, band, stride)
    grad_scores = None if grad_dtype is None else torch.empty_like(weights, dtype=grad_dtype)
    return [
        Part(call, blocks, first, min(group, call.segments - first), first_query, weights, grad_scores)
        for first in range(0, call.segments, group)
        for first_query in range(0, max(call.queries, 1), band)
    ]


def _delta(output: Tensor, grad_output: Tensor) -> Tensor:
    batch, length, width = output.shape
    delta = output.new_empty(batch, length, dtype=torch.float32)
    triton_launch.launch(
        _delta_kernel, (cdiv(batch * length, 16),),
        output, grad_output, delta, batch * length, length, width, *strides(grad_output, number=2),
        num_warps=4, num_stages=2, BLOCK_M=16, BLOCK_V=block_of(width, 256),
    )  # fmt: skip
    return delta


def _whole(size: int, block: int) -> int:
    return max(1, cdiv(size, block)) * block


def write_scores(part: Part, grad_output: Tensor | None, lse: Tensor | None, delta: Tensor | None) -> None:
    """Write the weights of a part and, if `grad_output` is given, the gradient of the scores."""
    call, blocks = part.call, part.blocks
    query_blocks, key_blocks = part.band // blocks.queries, part.stride // blocks.keys
    numbers, unit = call.numbers(grad_output)
    triton_launch.launch(
        _scores_kernel, (part.segments * query_blocks * key_blocks,),
        call.query, call.key, call.value, grad_output, lse, delta, part.weights, part.grad_scores,
        *numbers, part.first_segment, part.first_query, part.band, part.stride, query_blocks, key_blocks,
        num_warps=blocks.warps, num_stages=blocks.stages, **call.constants,
        UNIT=unit, BLOCK_Z=call.block_z, BLOCK_M=blocks.queries, BLOCK_N=blocks.keys,
        BLOCK_V=block_of(call.width, blocks.inner),
    )  # fmt: skip


def multiply_scores(
    part: Part, scores: Tensor, x: Tensor, output: Tensor, *, transposed: bool, scaled: bool, add: bool
) -> None:
    """Multiply the weights of a part, or the gradient of its scores, by `x`; the arguments as for `product_kernel`."""
    call, blocks, columns = part.call, part.blocks, x.shape[2]
    size, outer, inner = part.band, blocks.queries, blocks.keys
    if transposed:
        size, outer, inner = call.keys, blocks.keys, blocks.queries
    block_columns = block_of(columns, blocks.columns)
    outer_blocks, slices = cdiv(size, outer), cdiv(columns, block_columns)
    triton_launch.launch(
        product_kernel, (part.segments * outer_blocks * slices,),
        scores, x, output, call.mask, call.live, call.bounds,
        *call.sizes, *strides(x, number=2),
        part.first_segment, part.first_query, part.band, part.stride, outer_blocks, slices,
        num_warps=blocks.warps, num_stages=blocks.stages, **call.constants,
        COLUMNS=columns, TRANSPOSED=transposed, SCALED=scaled, ADD=add,
        BLOCK_M=outer, BLOCK_K=min(inner, blocks.inner), BLOCK_N=block_columns,
    )  # fmt: skip


def _add_diagonals(grad_bias: Tensor, part: Part) -> None:
    """Add the sums over the diagonals of the scores' gradient to `grad_bias`."""
    call, size = part.call, min(64, part.blocks.queries, part.blocks.keys)
    blocks = part.band // size
    diagonals = blocks + part.stride // size - 1
    processors = triton_launch.processors(grad_bias.device, call.query.shape[0])
    shares = min(part.segments, cdiv(4 * processors, diagonals))
    share = cdiv(part.segments, max(1, shares))
    shares = cdiv(part.segments, max(1, share))
    tiles = grad_bias.new_empty(shares, diagonals, size, size)
    triton_launch.launch(
        _bias_kernel, (shares * diagonals,),
        part.grad_scores, tiles, call.bounds, *call.sizes,
        part.first_segment, part.segments, part.first_query, part.band, part.stride,
        blocks, diagonals, share,
        num_warps=4, num_stages=3, CAUSAL=call.constants["CAUSAL"], BLOCK=size,
    )  # fmt: skip
    first = call.center - call.offset - part.first_query - blocks * size + 1
    triton_launch.launch(
        _diagonals_kernel, (diagonals + 1,), tiles, grad_bias, first, shares, diagonals, grad_bias.shape[0],
        num_warps=4, num_stages=1, BLOCK=size,
    )  # fmt: skip
