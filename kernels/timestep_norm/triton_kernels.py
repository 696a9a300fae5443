"""The passes of timestep norm over all features in Triton, and a single-launch kernel for one position.

A program processes a tile of rows of one group of features, `[BLOCK_R, BLOCK_W]`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from luna_mega.kernels.common import triton_launch
from luna_mega.kernels.common.triton_launch import cdiv, next_power_of_2

# Elements per tile.
TILE = 4096
# Number of tiles over which a program of the backward pass sums the gradients of weight and bias.
TILES = 8


@triton.jit
def _tile(index, group, total, groups, width, KEPT, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return rows and features of a group's tile, a mask of the rows, and mask and places of unmasked elements."""
    row = (index * BLOCK_R).to(tl.int64) + tl.arange(0, BLOCK_R)
    feature = tl.arange(0, BLOCK_W)
    there = row < total
    kept = there
    if KEPT is not None:
        kept = there & (tl.load(KEPT + row, there, other=0) != 0)
    inside = kept[:, None] & (feature < width)[None, :]
    return row, feature, there, inside, row[:, None] * (groups * width) + group * width + feature[None, :]


@triton.jit(do_not_specialize=["total"])
def _moments_kernel(
    X,  # [total, groups * width]
    KEPT,  # [total]
    MEAN, SPREAD,  # [total, groups]
    total, groups, width,  # rows, groups, features of a group
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write mean and variance of a feature group for every row. The program index is `(tile of rows, group)`."""
    group = tl.program_id(1)
    row, feature, there, inside, places = _tile(tl.program_id(0), group, total, groups, width, KEPT, BLOCK_R, BLOCK_W)
    values = tl.load(X + places, inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 1) / width
    around = tl.where(inside, values - mean[:, None], 0.0)
    tl.store(MEAN + row * groups + group, mean, there)
    tl.store(SPREAD + row * groups + group, tl.sum(around * around, 1) / width, there)


@triton.jit(do_not_specialize=["total"])
def _apply_kernel(
    X,  # [total, groups * width]
    KEPT,  # [total]
    MEAN, RSTD,  # [total, groups]
    WEIGHT, BIAS,  # [groups * width]
    Y,  # [total, groups * width]
    total, groups, width,  # rows, groups, features of a group
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write (x - mean) rstd weight + bias; masked rows are 0. The program index is `(tile of rows, group)`."""
    group = tl.program_id(1)
    row, feature, there, inside, places = _tile(tl.program_id(0), group, total, groups, width, KEPT, BLOCK_R, BLOCK_W)
    values = tl.load(X + places, inside, other=0.0).to(tl.float32)
    mean = tl.load(MEAN + row * groups + group, there, other=0.0).to(tl.float32)
    rstd = tl.load(RSTD + row * groups + group, there, other=0.0)
    y = (values - mean[:, None]) * rstd[:, None]
    if WEIGHT is not None:
        y *= tl.load(WEIGHT + group * width + feature, feature < width, other=0.0).to(tl.float32)[None, :]
    if BIAS is not None:
        y += tl.load(BIAS + group * width + feature, feature < width, other=0.0).to(tl.float32)[None, :]
    y = tl.where(inside, y, 0.0)
    tl.store(Y + places, y.to(Y.dtype.element_ty), there[:, None] & (feature < width)[None, :])


@triton.jit(do_not_specialize=["total"])
def _sums_kernel(
    DY, X,  # [total, groups * width]
    KEPT,  # [total]
    MEAN, RSTD,  # [total, groups]
    WEIGHT,  # [groups * width]
    SUMS, PRODUCTS,  # [total, groups]
    WEIGHT_SUMS, BIAS_SUMS,  # [parts, groups * width]
    total, groups, width,  # rows, groups, features of a group
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write group means of g = dy rstd weight and of g (x - mean), and partial gradients of weight and bias.

    The program index is `(TILES tiles of rows, group)`.
    """
    group, part = tl.program_id(1), tl.program_id(0)
    of_weight = tl.zeros([BLOCK_W], tl.float32)
    of_bias = tl.zeros([BLOCK_W], tl.float32)
    for number in range(TILES):
        tile = part * TILES + number
        row, feature, there, inside, places = _tile(tile, group, total, groups, width, KEPT, BLOCK_R, BLOCK_W)
        received = tl.load(DY + places, inside, other=0.0).to(tl.float32)
        values = tl.load(X + places, inside, other=0.0).to(tl.float32)
        mean = tl.load(MEAN + row * groups + group, there, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row * groups + group, there, other=0.0)
        of_bias += tl.sum(received, 0)
        received *= rstd[:, None]
        product = received * (values - mean[:, None])
        of_weight += tl.sum(product, 0)
        if WEIGHT is not None:
            weight = tl.load(WEIGHT + group * width + feature, feature < width, other=0.0).to(tl.float32)
            received *= weight[None, :]
            product *= weight[None, :]
        tl.store(SUMS + row * groups + group, tl.sum(received, 1) / width, there)
        tl.store(PRODUCTS + row * groups + group, tl.sum(product, 1) / width, there)
    place = part.to(tl.int64) * groups * width + group * width + tl.arange(0, BLOCK_W)
    if WEIGHT_SUMS is not None:
        tl.store(WEIGHT_SUMS + place, of_weight, tl.arange(0, BLOCK_W) < width)
    if BIAS_SUMS is not None:
        tl.store(BIAS_SUMS + place, of_bias, tl.arange(0, BLOCK_W) < width)


@triton.jit(do_not_specialize=["total"])
def _apply_backward_kernel(
    DY, X,  # [total, groups * width]
    KEPT,  # [total]
    STRETCH, SHIFT, RSTD,  # [total, groups]
    WEIGHT,  # [groups * width]
    DX,  # [total, groups * width]
    total, groups, width,  # rows, groups, features of a group
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write dy rstd weight + x stretch + shift. The program index is `(tile of rows, group)`."""
    group = tl.program_id(1)
    row, feature, there, inside, places = _tile(tl.program_id(0), group, total, groups, width, KEPT, BLOCK_R, BLOCK_W)
    gradient = tl.load(DY + places, inside, other=0.0).to(tl.float32)
    values = tl.load(X + places, inside, other=0.0).to(tl.float32)
    of_group = row * groups + group
    gradient *= tl.load(RSTD + of_group, there, other=0.0)[:, None]
    if WEIGHT is not None:
        gradient *= tl.load(WEIGHT + group * width + feature, feature < width, other=0.0).to(tl.float32)[None, :]
    gradient += values * tl.load(STRETCH + of_group, there, other=0.0)[:, None]
    gradient += tl.load(SHIFT + of_group, there, other=0.0)[:, None]
    tl.store(DX + places, gradient.to(DX.dtype.element_ty), there[:, None] & (feature < width)[None, :])


@triton.jit
def _step_kernel(
    X,  # [B, groups * width]
    COUNT, MEAN, SPREAD,  # the state: [B], [B, groups], [B, groups]
    WEIGHT, BIAS,  # [groups * width]
    KEPT,  # [B]
    Y,  # [B, groups * width]
    NEXT_COUNT, NEXT_MEAN, NEXT_SPREAD,  # the next state
    groups, width, eps,
    BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Process one position with float64 statistics. The program index is `(block of groups, batch row)`."""
    batch = tl.program_id(1).to(tl.int64)
    group, feature = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_W)
    there = group < groups
    inside = there[:, None] & (feature < width)[None, :]
    places = group[:, None] * width + feature[None, :]
    count = tl.load(COUNT + batch)
    values = tl.load(X + batch * groups * width + places, inside, other=0.0).to(tl.float32)
    keep = count >= 0
    if KEPT is not None:
        keep = tl.load(KEPT + batch) != 0
        values = tl.where(keep, values, 0.0)
    own = tl.sum(values, 1) / width
    around = tl.where(inside, values - own[:, None], 0.0)
    spread = tl.sum(around * around, 1) / width
    mean = tl.load(MEAN + batch * groups + group, there, other=0.0)
    variance = tl.load(SPREAD + batch * groups + group, there, other=0.0)
    following = count + tl.where(keep, 1, 0).to(tl.int64)
    share = 1.0 / tl.maximum(following, 1).to(tl.float64)
    away = own.to(tl.float64) - mean
    next_mean = tl.where(keep, mean + away * share, mean)
    gained = spread.to(tl.float64) + (1.0 - share) * away * away - variance
    next_variance = tl.where(keep, variance + gained * share, variance)
    rstd = 1.0 / tl.sqrt(next_variance.to(tl.float32) + eps)
    y = (values - next_mean.to(tl.float32)[:, None]) * rstd[:, None]
    if WEIGHT is not None:
        y *= tl.load(WEIGHT + places, inside, other=0.0).to(tl.float32)
    if BIAS is not None:
        y += tl.load(BIAS + places, inside, other=0.0).to(tl.float32)
    y = tl.where(keep, y, 0.0)
    tl.store(Y + batch * groups * width + places, y.to(Y.dtype.element_ty), inside)
    tl.store(NEXT_MEAN + batch * groups + group, next_mean, there)
    tl.store(NEXT_SPREAD + batch * groups + group, next_variance, there)
    if tl.program_id(0) == 0:
        tl.store(NEXT_COUNT + batch, following)


def _sizes(x: Tensor, groups: int) -> tuple[tuple[int, int, int], dict[str, int], int]:
    """Return the arguments that the kernels over rows share, their tile, and the number of tiles."""
    total, width = x.shape[0] * x.shape[1], x.shape[2] // groups
    block_w = next_power_of_2(width)
    block_r = max(1, min(TILE // block_w, 128))
    tile = {"BLOCK_R": block_r, "BLOCK_W": block_w, "num_warps": 4, "num_stages": 1}
    return (total, groups, width), tile, cdiv(total, block_r)


def moments(x: Tensor, mask: Tensor | None, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the groups of each position."""
    mean, spread = (x.new_empty(*x.shape[:2], groups, dtype=dtype) for _ in range(2))
    sizes, tile, tiles = _sizes(x, groups)
    inputs = triton_launch.contiguous(x, mask)
    triton_launch.launch(_moments_kernel, (tiles, groups), *inputs, mean, spread, *sizes, **tile)
    return mean, spread


def apply(
    x: Tensor, mask: Tensor | None, means: Tensor, rstds: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return (x - means) rstds weight + bias, 0 if masked."""
    groups, y = means.shape[2], x.new_empty(x.shape)
    sizes, tile, tiles = _sizes(x, groups)
    inputs = triton_launch.contiguous(x, mask, means, rstds, weight, bias)
    triton_launch.launch(_apply_kernel, (tiles, groups), *inputs, y, *sizes, **tile)
    return y


def sums(
    gradients: Tensor, x: Tensor, mask: Tensor | None, means: Tensor, rstds: Tensor, weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the sums of `torch_backend.Passes`."""
    groups, features = means.shape[2], x.shape[2]
    sizes, tile, tiles = _sizes(x, groups)
    parts = cdiv(tiles, TILES)
    summed, products = torch.empty_like(rstds), torch.empty_like(rstds)
    of_weight, of_bias = (None if t is None else rstds.new_empty(parts, features) for t in (weight, bias))
    inputs = triton_launch.contiguous(gradients, x, mask, means, rstds, weight)
    outputs = summed, products, of_weight, of_bias
    triton_launch.launch(_sums_kernel, (parts, groups), *inputs, *outputs, *sizes, **tile, TILES=TILES)
    return summed, products, *(None if t is None else t.sum(0) for t in (of_weight, of_bias))


def apply_backward(
    gradients: Tensor, x: Tensor, mask: Tensor | None, stretches: Tensor, shifts: Tensor, rstds: Tensor,
    weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return gradients rstds weight + x stretches + shifts."""
    groups, grad_x = shifts.shape[2], x.new_empty(x.shape)
    sizes, tile, tiles = _sizes(x, groups)
    inputs = triton_launch.contiguous(gradients, x, mask, stretches, shifts, rstds, weight)
    triton_launch.launch(_apply_backward_kernel, (tiles, groups), *inputs, grad_x, *sizes, **tile)
    return grad_x


def step(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, count: Tensor, mean: Tensor,
    variance: Tensor, groups: int, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y and the next count, mean and variance."""
    width, y = x.shape[1] // groups, x.new_empty(x.shape)
    block_w = next_power_of_2(width)
    block_g = max(1, min(TILE // block_w, next_power_of_2(groups)))
    state = triton_launch.contiguous(count, mean, variance)
    following = tuple(torch.empty_like(x) for x in state)
    inputs = triton_launch.contiguous(x, *state, weight, bias, mask)
    triton_launch.launch(
        _step_kernel, (cdiv(groups, block_g), len(x)), *inputs, y, *following, groups, width, eps,
        BLOCK_G=block_g, BLOCK_W=block_w, num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, *following
