"""The forward kernel of gated attention, and functions shared with the backward kernels.

A segment is a chunk of a sequence, or the complete sequence; its queries attend to its keys. Indices i of queries and j
of keys are relative to the start of the segment.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import triton_choice, triton_launch
from ..common.triton_launch import block_of, cdiv, rows_contiguous, strides
from ..common.triton_tiles import LOG2_E, dot, drop, dropping, load_kept, load_tile, rise, store_tile
from . import reference

MEAN = tl.constexpr(reference.LAPLACE_MEAN)
INVERSE_DEVIATION = tl.constexpr(1.0 / reference.LAPLACE_DEVIATION)
SQRT_HALF = tl.constexpr(math.sqrt(0.5))
DENSITY = tl.constexpr(1.0 / (reference.LAPLACE_DEVIATION * math.sqrt(2.0 * math.pi)))


@triton.jit
def find_segment(index, BOUNDS, queries, keys, chunk, chunks):
    """Return the batch index and the first token of a segment, and its numbers of queries and keys."""
    if BOUNDS is None:
        batch = index // chunks
        start = index % chunks * chunk
        n_queries = tl.minimum(queries - start, chunk)
        n_keys = tl.minimum(keys - start, chunk)
    else:
        batch = index * 0
        start = tl.load(BOUNDS + 2 * index)
        n_queries = tl.load(BOUNDS + 2 * index + 1) - start
        n_keys = n_queries
    return batch.to(tl.int64), start.to(tl.int64), n_queries, n_keys


@triton.jit
def scales(
    LIVE, segment, i, offset, n_keys, SIZE: tl.constexpr, FUNCTION: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Return 1 / the divisor of the queries i."""
    if FUNCTION == "softmax":
        return 1.0 / tl.sqrt(i.to(tl.float32) * 0.0 + SIZE)
    if CAUSAL:
        return 1.0 / (i + offset + 1).to(tl.float32)
    if LIVE is not None:
        n_keys = tl.load(LIVE + segment)
    return 1.0 / tl.maximum(i * 0 + n_keys, 1).to(tl.float32)


@triton.jit
def multiply(
    q, q_first, i, q_token, n_queries, k_first, j, k_token, live,
    SIZE: tl.constexpr, BLOCK_Z: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return Q K^T `[i, j]`; the queries are loaded if `q` is None."""
    products = tl.zeros([i.shape[0], j.shape[0]], tl.float32)
    for first in tl.static_range(0, SIZE, BLOCK_Z):
        z = first + tl.arange(0, BLOCK_Z)
        part = load_tile(q_first, i, q_token, i < n_queries, z, SIZE) if q is None else q
        k = load_tile(k_first, j, k_token, live, z, SIZE)
        products = dot(part, tl.trans(k), products, PRECISION)
    return products


@triton.jit
def scale_scores(products, scale, BIAS, center, i, j, live, n_queries, offset, CAUSAL: tl.constexpr):
    """Return the scores `[i, j]` and a mask of the visible scores."""
    kept = (i < n_queries)[:, None] & live[None, :]
    lag = j[None, :] - (i + offset)[:, None]
    if CAUSAL:
        kept = kept & (lag <= 0)
    scores = products * scale[:, None]
    if BIAS is not None:
        scores += tl.load(BIAS + center + lag, mask=kept, other=0.0)
    return scores, kept


@triton.jit
def elementwise(scores, kept, FUNCTION: tl.constexpr):
    """Return the weights of laplace and relu2."""
    if FUNCTION == "laplace":
        weights = 0.5 + 0.5 * tl.math.erf((scores - MEAN) * (INVERSE_DEVIATION * SQRT_HALF))
    else:
        weights = tl.maximum(scores, 0.0)
        weights = weights * weights
    return tl.where(kept, weights, 0.0)


@triton.jit(
    do_not_specialize=[
        "width", "chunks", "offset", "center", "blocks", "q_batch", "q_token", "k_batch", "k_token", "v_batch",
        "v_token",
    ]
)  # fmt: skip
def _forward_kernel(
    Q, K,  # [B, T or S, SIZE]
    V, OUT,  # [B, S or T, width]
    LSE,  # [B, T], log2-sum-exp for softmax
    BIAS,  # [2M - 1], distance 0 at `center`
    MASK,  # [B, S]
    LIVE,  # [segments], number of visible keys
    BOUNDS,  # [segments, 2], start and end of each segment of a varlen batch
    SEED,  # [1]
    queries, keys, width, chunk, chunks, offset, center, threshold, rescale,  # see `GatedCall` and `dropping`
    q_batch, q_token, k_batch, k_token, v_batch, v_token,  # strides
    blocks, slices,
    FUNCTION: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    SIZE: tl.constexpr, UNIT: tl.constexpr, RESIDENT: tl.constexpr,
    BLOCK_Z: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute a block of queries and one slice of the value, over blocks of keys, with an online softmax.

    RESIDENT: BLOCK_N covers all keys. The weights are computed once and multiplied by one slice of the value at a time;
    `slices` programs share the slices.
    """
    program = tl.program_id(0)
    segment = program // slices // blocks
    block = program // slices % blocks
    if not RESIDENT:
        block = blocks - 1 - block  # schedule the longest blocks of causal attention first
    batch, start, n_queries, n_keys = find_segment(segment, BOUNDS, queries, keys, chunk, chunks)
    if block * BLOCK_M >= n_queries:
        return
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    width, q_token, k_token, v_token = width * UNIT, q_token * UNIT, k_token * UNIT, v_token * UNIT
    q_first = Q + batch * q_batch * UNIT + start * q_token
    k_first = K + batch * k_batch * UNIT + start * k_token
    if RESIDENT:
        j = tl.arange(0, BLOCK_N)
        live = load_kept(MASK, batch * keys + start, j, n_keys)
        products = multiply(None, q_first, i, q_token, n_queries, k_first, j, k_token, live, SIZE, BLOCK_Z, PRECISION)
        scale = scales(LIVE, segment, i, offset, n_keys, SIZE, FUNCTION, CAUSAL)
        scores, kept = scale_scores(products, scale, BIAS, center, i, j, live, n_queries, offset, CAUSAL)
        token = batch * queries + start + i
        if FUNCTION == "softmax":
            scores = tl.where(kept, scores * LOG2_E, float("-inf"))
            largest = tl.max(scores, axis=1)
            finite = tl.where(largest == float("-inf"), 0.0, largest)
            weights = tl.exp2(scores - finite[:, None])
            total = tl.sum(weights, axis=1)
            total = tl.where(total > 0.0, total, 1.0)
            weights = weights / total[:, None]
            if program % slices == 0:
                tl.store(LSE + token, finite + tl.log2(total), mask=i < n_queries)
        else:
            weights = elementwise(scores, kept, FUNCTION)
        weights = drop(weights, SEED, threshold, rescale, segment, i, 0, BLOCK_M, BLOCK_N)
        weights = weights.to(V.dtype.element_ty)
        for first in range(program % slices * BLOCK_V, width, slices * BLOCK_V):
            v = first + tl.arange(0, BLOCK_V)
            values = load_tile(V + batch * v_batch * UNIT + start * v_token, j, v_token, live, v, width)
            output = dot(weights, values, tl.zeros([BLOCK_M, BLOCK_V], tl.float32), PRECISION)
            store_tile(OUT, token, width, i < n_queries, v, width, output)
    else:
        v = program % slices * BLOCK_V + tl.arange(0, BLOCK_V)
        q = None
        if BLOCK_Z >= SIZE:
            q = load_tile(q_first, i, q_token, i < n_queries, tl.arange(0, BLOCK_Z), SIZE)
        scale = scales(LIVE, segment, i, offset, n_keys, SIZE, FUNCTION, CAUSAL)
        output = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        visible = n_keys
        if CAUSAL:
            visible = tl.minimum(n_keys, offset + (block + 1) * BLOCK_M)
        for first in range(0, visible, BLOCK_N):
            j = first + tl.arange(0, BLOCK_N)
            live = load_kept(MASK, batch * keys + start, j, n_keys)
            products = multiply(q, q_first, i, q_token, n_queries, k_first, j, k_token, live, SIZE, BLOCK_Z, PRECISION)
            scores, kept = scale_scores(products, scale, BIAS, center, i, j, live, n_queries, offset, CAUSAL)
            if FUNCTION == "softmax":
                scores = tl.where(kept, scores * LOG2_E, float("-inf"))
                largest, shift, shrink = rise(largest, tl.max(scores, axis=1))
                weights = tl.exp2(scores - shift[:, None])
                total = total * shrink + tl.sum(weights, axis=1)
                output = output * shrink[:, None]
            else:
                weights = elementwise(scores, kept, FUNCTION)
            weights = drop(weights, SEED, threshold, rescale, segment, i, first, BLOCK_M, BLOCK_N)
            values = load_tile(V + batch * v_batch * UNIT + start * v_token, j, v_token, live, v, width)
            output = dot(weights.to(values.dtype), values, output, PRECISION)
        token = batch * queries + start + i
        if FUNCTION == "softmax":
            total = tl.where(total > 0.0, total, 1.0)
            output = output / total[:, None]
            if program % slices == 0:
                largest = tl.where(largest == float("-inf"), 0.0, largest)
                tl.store(LSE + token, largest + tl.log2(total), mask=i < n_queries)
        store_tile(OUT, token, width, i < n_queries, v, width, output)


class GatedCall:
    """The arguments of one call in the form required by the kernels, and its segments.

    Attributes:
        queries: largest number of queries of a segment; likewise `keys`.
        sizes: arguments of the kernels from `queries` to `offset`, except the width: T, S, positions of a chunk, chunks
            of a sequence, and column of the first query.
        center: index of distance 0 in the bias.
        narrow: whether every operand of a matrix product has 16 bits.
        constants: constants of the kernels.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None,
        bounds: Tensor | None, function: str, causal: bool, chunk: int, offset: int, dropout: float,
        seed: Tensor | None, precision: str,
    ) -> None:  # fmt: skip
        self.query, self.key, self.value = rows_contiguous(query, key, value)
        (batch, queries, size), keys, self.width = query.shape, key.shape[1], value.shape[2]
        self.queries, self.keys = min(queries, chunk), min(keys, chunk)
        self.segments = batch * cdiv(max(queries, keys, 1), chunk) if bounds is None else bounds.shape[0]
        chunks = self.segments // max(1, batch) if bounds is None else 1
        self.sizes = queries, keys, chunk, chunks, offset
        self.live = None
        if mask is not None:
            if function != "softmax" and not causal:
                self.live = _count_live(mask, bounds, chunk, self.segments)
            mask = mask.contiguous().view(torch.uint8)
        self.mask, self.bounds, self.seed, self.dropping = mask, bounds, seed, dropping(dropout)
        self.bias = None if bias is None else bias.float().contiguous()
        self.center = 0 if bias is None else bias.shape[0] // 2
        self.function, self.offset = function, offset
        self.narrow = query.dtype.itemsize == value.dtype.itemsize == 2
        self.constants: dict[str, Any] = {"FUNCTION": function, "CAUSAL": causal, "PRECISION": precision, "SIZE": size}
        # In float32, the three passes of a product need registers.
        self.block_z = block_of(size, 256 if self.narrow else 64)

    def numbers(self, *gradients: Tensor | None) -> tuple[tuple[Any, ...], int]:
        """Return the kernel arguments from `BIAS` to the strides of query, key, value and gradients, and UNIT.

        Width and strides are in multiples of UNIT. The compiler only vectorizes loads if it knows that rows start and
        end at multiples of 8; by itself it only detects multiples of 16.
        """
        lengths = strides(self.query, self.key, self.value, *gradients, number=2)
        unit = 8 if all(length % 8 == 0 for length in (self.width, *lengths)) else 1
        queries, keys, *rest = self.sizes
        sizes = queries, keys, self.width // unit, *rest, self.center, *self.dropping
        tensors = self.bias, self.mask, self.live, self.bounds, self.seed
        return (*tensors, *sizes, *(length // unit for length in lengths)), unit

    def choose(self, kernel: Any, configurations: list[Any], run: Callable[..., Any]) -> Any:
        """Return the result of `run` for the configuration selected from `configurations`."""
        precision, causal, size = (self.constants[name] for name in ("PRECISION", "CAUSAL", "SIZE"))
        kind = [*dict.fromkeys((self.query.dtype, self.value.dtype)), self.function, not self.narrow and precision]
        kind += [causal and "causal", self.mask is not None and "masked", self.seed is not None and "dropout"]
        sizes = {"segments": self.segments, "queries": self.queries, "keys": self.keys}
        sizes |= {"shared": size, "values": self.width}
        return triton_choice.choose(kernel, kind, sizes, configurations, run, self.query.device)


def _count_live(mask: Tensor, bounds: Tensor | None, chunk: int, segments: int) -> Tensor:
    """Return the number of unmasked keys of every segment."""
    if bounds is not None:
        live_before = torch.nn.functional.pad(mask[0].cumsum(0, dtype=torch.int32), (1, 0))
        return (live_before[bounds[:, 1]] - live_before[bounds[:, 0]]).contiguous()
    batch, keys = mask.shape
    padded = torch.nn.functional.pad(mask, (0, segments // max(batch, 1) * chunk - keys))
    return padded.view(segments, chunk).sum(dim=1, dtype=torch.int32)


class ForwardTiles(NamedTuple):
    """A configuration: tiles of the forward kernel (queries, keys, columns of the value), and its options."""

    queries: int
    keys: int
    columns: int
    warps: int
    stages: int


def _configurations(call: GatedCall) -> list[ForwardTiles]:
    """Return candidate configurations that spill few registers and fit the shared memory, with the default first."""
    target = triton_launch.target(call.query.device)
    hopper = target.large
    size, queries, columns = call.constants["SIZE"], block_of(call.queries, 64), block_of(call.width, 128)
    if not call.narrow:
        if size > 128 and target.shared_memory < 128 * 1024:
            queries = min(queries, 32)
        return [ForwardTiles(queries, block_of(call.keys, 32 if hopper else 16), min(columns, 64), 8, 2)]
    if queries < 64:
        # Few queries cannot saturate the tensor cores; narrow slices of the value occupy more multiprocessors.
        return [ForwardTiles(queries, block_of(call.keys, 64), min(columns, 64), 4, 3 if hopper else 2)]
    # Random numbers need registers.
    if call.keys <= (256 if hopper and call.seed is None else 128):
        warps = 4 if call.keys <= 128 and call.seed is None else 8
        default = ForwardTiles(queries, block_of(call.keys, 256), columns, warps, 2)
        candidates = [default, default._replace(columns=min(columns, 64)), default._replace(stages=3)]
        # On an H200, 3 stages need 0.9 of the time of 2 stages if a program iterates over slices of the value.
        faster = hopper and warps == 4 and call.keys > 64 and size <= 128 and call.width > columns
        return candidates[::-1] if faster else candidates
    queries = block_of(call.queries, 128 if size <= 128 or target.shared_memory >= 128 * 1024 else 64)
    if not hopper:
        return [ForwardTiles(queries, 32, columns, 8, 2)]
    heavy = call.function == "softmax" or size > 128 or call.seed is not None
    keys, stages = (32, 3) if heavy else (64, 2)
    default = ForwardTiles(queries, keys, block_of(call.width, 256), 8, stages)
    return [default, ForwardTiles(queries, 64, columns, 8, 2), ForwardTiles(queries, 32, columns, 8, 3)]


def attend(call: GatedCall) -> tuple[Tensor, Tensor]:
    """Return the output `[B, T, V]` and, for softmax, log2 of its denominators, `[B, T]` float32."""
    batch, length = call.query.shape[:2]

    def run(tiles: ForwardTiles) -> tuple[Tensor, Tensor]:
        output = call.value.new_empty(batch, length, call.width)
        lse = call.query.new_empty((batch, length) if call.function == "softmax" else 0, dtype=torch.float32)
        resident = call.keys <= tiles.keys
        blocks, slices = cdiv(call.queries, tiles.queries), cdiv(call.width, tiles.columns)
        if resident:
            # A program processes several slices if every multiprocessor is still occupied.
            processors = triton_launch.processors(call.query.device, batch)
            enough = cdiv(2 * processors, max(1, call.segments * blocks))
            slices = max(1, min(slices, enough))
        numbers, unit = call.numbers()
        triton_launch.launch(
            _forward_kernel, (call.segments * blocks * slices,),
            call.query, call.key, call.value, output, lse, *numbers, blocks, slices,
            num_warps=tiles.warps, num_stages=tiles.stages, **call.constants, UNIT=unit, RESIDENT=resident,
            BLOCK_Z=call.block_z, BLOCK_M=tiles.queries, BLOCK_N=tiles.keys, BLOCK_V=tiles.columns,
        )  # fmt: skip
        return output, lse

    return call.choose(_forward_kernel, _configurations(call), run)
