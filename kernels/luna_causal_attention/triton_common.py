"""What the Triton kernels of causal Luna attention share.

`INNER` is the dtype in which weights and their gradients enter matrix products: bfloat16 where the inputs are, float32
otherwise, as those of float16 leave its range. `PRECISION` is that of float32 products, tiles are filled up with zeros
to powers of two.
"""

import torch
import triton
import triton.language as tl

from luna_mega.kernels import _triton
from luna_mega.kernels._triton import dot

# Tokens. What a segment costs beyond its chunks is the reading and writing of its sums.
MIN_SEGMENT = 256


@triton.jit
def load_rows(pointer, stride, rows, keep, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`[rows, BLOCK]`; 0 in rows that are not kept."""
    columns = tl.arange(0, BLOCK)
    mask = keep[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, stride, rows, keep, x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = keep[:, None] & (columns < SIZE)[None, :]
    tl.store(pointer + rows[:, None] * stride + columns[None, :], x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def straight(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Offsets and mask of a contiguous tile `[BR, BC]`."""
    rows, columns = tl.arange(0, BR), tl.arange(0, BC)
    return rows[:, None] * COLUMNS + columns[None, :], (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]


@triton.jit
def transposed(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Offsets and mask of a tile `[BR, BC]` whose transpose is contiguous."""
    rows, columns = tl.arange(0, BR), tl.arange(0, BC)
    return rows[:, None] + columns[None, :] * ROWS, (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]


@triton.jit
def load_rate(COUNT, b, t, ok, T):
    """1 / t of the equations. Before the first token the sums are 0, and so is the result."""
    count = tl.load(COUNT + b * T + t, mask=ok, other=1)
    return 1.0 / tl.maximum(count, 1).to(tl.float32)


@triton.jit
def load_used(PACK_MASK, b, L: tl.constexpr, BL: tl.constexpr):
    """`[BL]`: the rows of P that are in use."""
    rows = tl.arange(0, BL)
    used = rows < L
    if PACK_MASK is not None:
        used &= tl.load(PACK_MASK + b * L + rows, mask=used, other=0) != 0
    return used


@triton.jit
def load_kept(MASK, b, t, ok, T):
    if MASK is not None:
        ok &= tl.load(MASK + b * T + t, mask=ok, other=0) != 0
    return ok


@triton.jit
def activate(scores, ELU: tl.constexpr):
    """log2(1 + 2^s), or elu(s) + 1, precise in both tails."""
    if ELU:
        return tl.exp(tl.minimum(scores, 0.0)) + tl.maximum(scores, 0.0)
    else:
        power = tl.exp2(-tl.abs(scores))
        # log2(1 + z) = 2 / ln 2 atanh(z / (2 + z)); the device's own logarithm is imprecise near 1.
        ratio = power / (2.0 + power)
        square = ratio * ratio
        series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * (1.0 / 13.0))
        series = 1.0 / 5.0 + square * (1.0 / 7.0 + square * series)
        series = 1.0 + square * (1.0 / 3.0 + square * series)
        return tl.maximum(scores, 0.0) + 2.8853900817779268 * ratio * series


@triton.jit
def slope(scores, ELU: tl.constexpr):
    """The derivative of `activate`."""
    if ELU:
        return tl.exp(tl.minimum(scores, 0.0))
    else:
        power = tl.exp2(-tl.abs(scores))
        return tl.where(scores >= 0.0, 1.0, power) / (1.0 + power)


@triton.jit
def pack_dropout(SEED, head, t, dropout, L: tl.constexpr, BL: tl.constexpr):
    """What pack weights `[t, BL]` are multiplied by."""
    offsets = t.to(tl.int64)[:, None] * L + tl.arange(0, BL)[None, :]
    return tl.where(tl.rand(tl.load(SEED) + 2 * head, offsets) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def unpack_dropout(SEED, head, t, dropout, L: tl.constexpr, BL: tl.constexpr):
    """What unpack weights `[t, BL]` are multiplied by."""
    offsets = t.to(tl.int64)[:, None] * L + tl.arange(0, BL)[None, :]
    return tl.where(tl.rand(tl.load(SEED) + 2 * head + 1, offsets) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def softmax(scores, used):
    """Over the columns in use; 0 in the others."""
    scores = tl.where(used[None, :], scores, -float("inf"))
    largest = tl.max(scores, 1)
    # Where no column is in use.
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    powers = tl.exp(scores - largest[:, None])
    total = tl.sum(powers, 1)
    return powers / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def pack_scores(pack_key, pack_query, scale, PRECISION: tl.constexpr):
    return dot(pack_key, tl.trans(pack_query), None, PRECISION) * scale


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Of batch, token and head of `[B, T, H, K]`, K contiguous."""
    return x.stride()[:3]


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def block(size: int) -> int:
    """The tile that a dimension of this size is filled up to."""
    return max(16, triton.next_power_of_2(size))


def inner(dtype: torch.dtype):
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def per_row(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`[B, H, ...]` times `[B]`, in float32."""
    return (x.float() * factor[:, None, None, None]).contiguous()


@triton.jit
def _prefix_kernel(SUMS, FIRST, segments, N, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """`[R, segments, N]` in place: what stands before each segment (behind it: REVERSE), `FIRST` `[R, N]` included."""
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if FIRST is not None:
        total += tl.load(FIRST + row * N + columns, mask=columns < N, other=0.0)
    for i in range(0, segments):
        segment = segments - 1 - i if REVERSE else i
        place = SUMS + (row * segments + segment) * N + columns
        here = tl.load(place, mask=columns < N, other=0.0)
        tl.store(place, total, mask=columns < N)
        total += here


def segment_length(heads: int, length: int, chunk: int, device: torch.device) -> int:
    """Tokens of a segment, a multiple of the chunk: all, or so few that the segments of all heads fill the device."""
    processors = _triton.target(device).processors
    segments = 1 if heads >= 2 * processors else triton.cdiv(4 * processors, heads)
    return triton.cdiv(max(triton.cdiv(length, segments), MIN_SEGMENT), chunk) * chunk


def prefix_sums(sums: torch.Tensor, first: torch.Tensor | None, reverse: bool = False) -> torch.Tensor:
    """`sums` `[B, H, segments, K, L]`, overwritten with what is before each segment (`reverse`: behind it)."""
    batch, heads, segments, *size = sums.shape
    numbers = size[0] * size[1]
    grid = (batch * heads * triton.cdiv(numbers, 1024),)
    constants = {"REVERSE": reverse, "BLOCK": 1024, "num_warps": 4, "num_stages": 1}
    _triton.launch(_prefix_kernel, grid, sums, first, segments, numbers, **constants)
    return sums
