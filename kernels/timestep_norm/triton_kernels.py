"""The passes of `torch_passes` in Triton, and a single-launch kernel for one position.

In a pass over features, a program processes a tile of tokens of one group, `[BLOCK_R, BLOCK_W]`. In a pass over time,
in float64, it processes BLOCK_G groups of one sequence, in successive tiles `[BLOCK_T, BLOCK_G]` of positions.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.triton_launch import cdiv, contiguous, launch, next_power_of_2

# Elements per tile of features.
TILE = 4096
# Number of tiles over which a program of the backward pass sums the gradients of weight and bias.
TILES = 8
# Positions and groups of a tile of a pass over time: the fewer groups, the more programs.
BLOCK_T, BLOCK_G = 512, 2


@triton.jit
def _tile(index, group, total, groups, width, KEPT, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return tokens and features of a group's tile, a mask of the tokens, and mask and places of unmasked elements."""
    token = (index * BLOCK_R).to(tl.int64) + tl.arange(0, BLOCK_R)
    feature = tl.arange(0, BLOCK_W)
    there = token < total
    kept = there
    if KEPT is not None:
        kept = there & (tl.load(KEPT + token, there, other=0) != 0)
    inside = kept[:, None] & (feature < width)[None, :]
    return token, feature, there, inside, token[:, None] * (groups * width) + group * width + feature[None, :]


@triton.jit(do_not_specialize=["total"])
def _moments_kernel(
    X,  # [total, groups * width]
    KEPT,  # [total]
    MEAN, SPREAD,  # [total, groups]
    total, groups, width,  # tokens, groups, features of a group
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write mean and variance of a feature group for every token. The program index is `(tile of tokens, group)`."""
    group = tl.program_id(1)
    token, feature, there, inside, places = _tile(tl.program_id(0), group, total, groups, width, KEPT, BLOCK_R, BLOCK_W)
    values = tl.load(X + places, inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 1) / width
    around = tl.where(inside, values - mean[:, None], 0.0)
    tl.store(MEAN + token * groups + group, mean, there)
    tl.store(SPREAD + token * groups + group, tl.sum(around * around, 1) / width, there)


@triton.jit(do_not_specialize=["total"])
def _apply_kernel(
    X,  # [total, groups * width]
    KEPT,  # [total]
    MEAN, RSTD,  # [total, groups]
    WEIGHT, BIAS,  # [groups * width]
    Y,  # [total, groups * width]
    total, groups, width,  # tokens, groups, features of a group
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write (x - mean) rstd weight + bias; masked tokens are 0. The program index is `(tile of tokens, group)`."""
    group = tl.program_id(1)
    token, feature, there, inside, places = _tile(tl.program_id(0), group, total, groups, width, KEPT, BLOCK_R, BLOCK_W)
    values = tl.load(X + places, inside, other=0.0).to(tl.float32)
    mean = tl.load(MEAN + token * groups + group, there, other=0.0).to(tl.float32)
    rstd = tl.load(RSTD + token * groups + group, there, other=0.0)
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
    total, groups, width,  # tokens, groups, features of a group
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write group means of g = dy rstd weight and of g (x - mean), and partial gradients of weight and bias.

    The program index is `(TILES tiles of tokens, group)`.
    """
    group, part = tl.program_id(1), tl.program_id(0)
    grad_weight = tl.zeros([BLOCK_W], tl.float32)
    grad_bias = tl.zeros([BLOCK_W], tl.float32)
    for number in range(TILES):
        tile = part * TILES + number
        token, feature, there, inside, places = _tile(tile, group, total, groups, width, KEPT, BLOCK_R, BLOCK_W)
        received = tl.load(DY + places, inside, other=0.0).to(tl.float32)
        values = tl.load(X + places, inside, other=0.0).to(tl.float32)
        mean = tl.load(MEAN + token * groups + group, there, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + token * groups + group, there, other=0.0)
        grad_bias += tl.sum(received, 0)
        received *= rstd[:, None]
        product = received * (values - mean[:, None])
        grad_weight += tl.sum(product, 0)
        if WEIGHT is not None:
            weight = tl.load(WEIGHT + group * width + feature, feature < width, other=0.0).to(tl.float32)
            received *= weight[None, :]
            product *= weight[None, :]
        tl.store(SUMS + token * groups + group, tl.sum(received, 1) / width, there)
        tl.store(PRODUCTS + token * groups + group, tl.sum(product, 1) / width, there)
    place = part.to(tl.int64) * groups * width + group * width + tl.arange(0, BLOCK_W)
    if WEIGHT_SUMS is not None:
        tl.store(WEIGHT_SUMS + place, grad_weight, tl.arange(0, BLOCK_W) < width)
    if BIAS_SUMS is not None:
        tl.store(BIAS_SUMS + place, grad_bias, tl.arange(0, BLOCK_W) < width)


@triton.jit(do_not_specialize=["total"])
def _apply_backward_kernel(
    DY, X,  # [total, groups * width]
    KEPT,  # [total]
    STRETCH, SHIFT, RSTD,  # [total, groups]
    WEIGHT,  # [groups * width]
    DX,  # [total, groups * width]
    total, groups, width,  # tokens, groups, features of a group
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write dy rstd weight + x stretch + shift. The program index is `(tile of tokens, group)`."""
    group = tl.program_id(1)
    token, feature, there, inside, places = _tile(tl.program_id(0), group, total, groups, width, KEPT, BLOCK_R, BLOCK_W)
    gradient = tl.load(DY + places, inside, other=0.0).to(tl.float32)
    values = tl.load(X + places, inside, other=0.0).to(tl.float32)
    token_places = token * groups + group
    gradient *= tl.load(RSTD + token_places, there, other=0.0)[:, None]
    if WEIGHT is not None:
        gradient *= tl.load(WEIGHT + group * width + feature, feature < width, other=0.0).to(tl.float32)[None, :]
    gradient += values * tl.load(STRETCH + token_places, there, other=0.0)[:, None]
    gradient += tl.load(SHIFT + token_places, there, other=0.0)[:, None]
    tl.store(DX + places, gradient.to(DX.dtype.element_ty), there[:, None] & (feature < width)[None, :])


@triton.jit
def _place(BLOCKS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return the sequence and the groups of this program; the BLOCKS programs of a sequence are adjacent."""
    program = tl.program_id(0)
    return (program // BLOCKS).to(tl.int64), program % BLOCKS * BLOCK_G + tl.arange(0, BLOCK_G)


@triton.jit
def _double(pointer, places, inside):
    return tl.load(pointer + places, inside, other=0.0).to(tl.float64)


@triton.jit
def _kept(MASK, sequence, position, length):
    """Return 1 for unmasked positions, and 0 for masked positions and positions outside of the sequence."""
    inside = (position >= 0) & (position < length)
    if MASK is None:
        return inside.to(tl.int64)
    else:
        return (tl.load(MASK + sequence * length + position, inside, other=0) != 0).to(tl.int64)


@triton.jit
def _from_end(values):
    """Return, for every position, the sum from there to the end of the tile."""
    return tl.sum(values, 0)[None, :] - tl.cumsum(values, 0) + values


@triton.jit(do_not_specialize=["length"])
def _statistics_kernel(
    OWN, SPREAD,  # m_t and v_t, [B, T, groups]
    MASK,  # [B, T]
    COUNT, MEAN, VARIANCE,  # the state: [B], [B, groups], [B, groups]
    MEANS, RSTD,  # [B, T, groups]
    LAST_MEAN, LAST_VARIANCE,  # [B, groups]
    length, groups, eps,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write M_t and the rstd of S_t, and the final mean and variance.

    The program index is `sequence * BLOCKS + block of groups`.
    """
    sequence, group = _place(BLOCKS, BLOCK_G)
    there, state_places = group < groups, sequence * groups + group
    number = tl.load(COUNT + sequence)
    mean_sum = _double(MEAN, state_places, there) * number.to(tl.float64)
    variance_sum = _double(VARIANCE, state_places, there) * number.to(tl.float64)
    for start in range(0, length, BLOCK_T):
        position = start + tl.arange(0, BLOCK_T)
        kept = _kept(MASK, sequence, position, length)
        counted = number + tl.cumsum(kept, 0)
        counts = tl.maximum(counted, 1).to(tl.float64)[:, None]
        before = tl.maximum(counted - kept, 1).to(tl.float64)[:, None]
        places = (sequence * length + position.to(tl.int64))[:, None] * groups + group[None, :]
        inside = (position < length)[:, None] & there[None, :]
        used = (kept > 0)[:, None] & there[None, :]
        own = _double(OWN, places, used)
        sums = mean_sum[None, :] + tl.cumsum(own, 0)
        means = sums / counts
        away = tl.where(used, own - (sums - own) / before, 0.0)
        gained = _double(SPREAD, places, used) + away * away * (1.0 - 1.0 / counts)
        variances = (variance_sum[None, :] + tl.cumsum(gained, 0)) / counts
        tl.store(MEANS + places, means, inside)
        tl.store(RSTD + places, 1.0 / tl.sqrt(variances.to(tl.float32) + eps), inside)
        mean_sum += tl.sum(own, 0)
        variance_sum += tl.sum(gained, 0)
        number += tl.sum(kept, 0)
    counts = tl.maximum(number, 1).to(tl.float64)
    tl.store(LAST_MEAN + state_places, mean_sum / counts, there)
    tl.store(LAST_VARIANCE + state_places, variance_sum / counts, there)


@triton.jit
def _grad_away(grad_total, OWN, MEANS, MEAN, sequence, position, length, count, kept, group, groups):
    """Return the gradient of the distance m_t - M_{t-1}; masked positions have gradient 0.

    `grad_total` is the gradient of n S.
    """
    used = (kept > 0)[:, None] & (group < groups)[None, :]
    places = (sequence * length + position.to(tl.int64))[:, None] * groups + group[None, :]
    before = _double(MEANS, places - groups, used & (position > 0)[:, None])
    first = _double(MEAN, sequence * groups + group, group < groups)
    away = _double(OWN, places, used) - tl.where((position > 0)[:, None], before, first[None, :])
    return tl.where(used, 2.0 * grad_total * (1.0 - 1.0 / tl.maximum(count, 1).to(tl.float64))[:, None] * away, 0.0)


@triton.jit(do_not_specialize=["length"])
def _statistics_backward_kernel(
    SUMS, PRODUCTS, OWN, MEANS, RSTD,  # [B, T, groups]
    MASK,  # [B, T]
    COUNT, MEAN,  # [B], [B, groups]
    GRAD_MEAN, GRAD_VARIANCE,  # gradients of the last mean and variance, [B, groups]
    STRETCH, SHIFT,  # [B, T, groups]
    GRAD_FIRST_MEAN, GRAD_FIRST_VARIANCE,  # gradients of the initial mean and variance, [B, groups]
    length, groups, width,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the results of `torch_passes.statistics_backward`, from the last tile to the first.

    The program index is `sequence * BLOCKS + block of groups`.
    """
    sequence, group = _place(BLOCKS, BLOCK_G)
    there, state_places = group < groups, sequence * groups + group
    started = tl.load(COUNT + sequence)
    number = started
    for start in range(0, length, BLOCK_T):
        number += tl.sum(_kept(MASK, sequence, start + tl.arange(0, BLOCK_T), length), 0)
    # Gradients of n M and n S after the current tile.
    scale = 1.0 / (tl.maximum(number, 1).to(tl.float64) * width)
    mean_sum, variance_sum = tl.zeros([BLOCK_G], tl.float64), tl.zeros([BLOCK_G], tl.float64)
    if GRAD_MEAN is not None:
        mean_sum += _double(GRAD_MEAN, state_places, there) * scale
    if GRAD_VARIANCE is not None:
        variance_sum += _double(GRAD_VARIANCE, state_places, there) * scale
    first_away = tl.zeros([BLOCK_G], tl.float64)
    for step in range(0, tl.cdiv(length, BLOCK_T)):
        position = (tl.cdiv(length, BLOCK_T) - 1 - step) * BLOCK_T + tl.arange(0, BLOCK_T)
        kept, following = _kept(MASK, sequence, position, length), _kept(MASK, sequence, position + 1, length)
        number -= tl.sum(kept, 0)
        counted = number + tl.cumsum(kept, 0)
        share = (1.0 / tl.maximum(counted, 1).to(tl.float64))[:, None]
        inside = (position < length)[:, None] & there[None, :]
        places = (sequence * length + position.to(tl.int64))[:, None] * groups + group[None, :]
        rstd = _double(RSTD, places, inside)
        gained = -0.5 * rstd * rstd * _double(PRODUCTS, places, inside) * share
        grad_total = variance_sum[None, :] + _from_end(gained)
        grad_away = _grad_away(grad_total, OWN, MEANS, MEAN, sequence, position, length, counted, kept, group, groups)
        grad_next = _grad_away(
            grad_total - gained, OWN, MEANS, MEAN, sequence, position + 1, length, counted + following, following,
            group, groups,
        )  # fmt: skip
        direct = tl.where(inside, (-_double(SUMS, places, inside) - grad_next) * share, 0.0)
        grad_sum = mean_sum[None, :] + _from_end(direct)
        used = (kept > 0)[:, None]
        stretch = tl.where(used, 2.0 * grad_total, 0.0)
        shift = tl.where(used, grad_sum + grad_away, 0.0) - stretch * _double(OWN, places, inside)
        tl.store(STRETCH + places, stretch.to(tl.float32), inside)
        tl.store(SHIFT + places, shift.to(tl.float32), inside)
        mean_sum += tl.sum(direct, 0)
        variance_sum += tl.sum(gained, 0)
        first_away = tl.sum(tl.where((position == 0)[:, None], grad_away, 0.0), 0)
    begun = started.to(tl.float64) * width
    tl.store(GRAD_FIRST_MEAN + state_places, begun * mean_sum - width * first_away, there)
    tl.store(GRAD_FIRST_VARIANCE + state_places, begun * variance_sum, there)


@triton.jit
def _step_kernel(
    X,  # [B, groups * width]
    COUNT, MEAN, SPREAD,  # the state: [B], [B, groups], [B, groups]
    WEIGHT, BIAS,  # [groups * width]
    KEPT,  # [B]
    Y,  # [B, groups * width]
    NEXT_COUNT, NEXT_MEAN, NEXT_SPREAD,  # the next state
    groups, width, eps,
    BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Process one position with float64 statistics. The program index is `sequence * BLOCKS + block of groups`."""
    sequence, group = _place(BLOCKS, BLOCK_G)
    feature = tl.arange(0, BLOCK_W)
    there = group < groups
    inside = there[:, None] & (feature < width)[None, :]
    places = group[:, None] * width + feature[None, :]
    count = tl.load(COUNT + sequence)
    values = tl.load(X + sequence * groups * width + places, inside, other=0.0).to(tl.float32)
    keep = count >= 0
    if KEPT is not None:
        keep = tl.load(KEPT + sequence) != 0
        values = tl.where(keep, values, 0.0)
    own = tl.sum(values, 1) / width
    around = tl.where(inside, values - own[:, None], 0.0)
    spread = tl.sum(around * around, 1) / width
    mean = tl.load(MEAN + sequence * groups + group, there, other=0.0)
    variance = tl.load(SPREAD + sequence * groups + group, there, other=0.0)
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
    tl.store(Y + sequence * groups * width + places, y.to(Y.dtype.element_ty), inside)
    tl.store(NEXT_MEAN + sequence * groups + group, next_mean, there)
    tl.store(NEXT_SPREAD + sequence * groups + group, next_variance, there)
    if tl.program_id(0) % BLOCKS == 0:
        tl.store(NEXT_COUNT + sequence, following)


def _tile_of(x: Tensor, groups: int) -> tuple[dict[str, int], int]:
    """Return the tile of the kernels over features, and the number of tiles."""
    block_w = next_power_of_2(x.shape[2] // groups)
    block_r = max(1, min(TILE // block_w, 128))
    tile = {"BLOCK_R": block_r, "BLOCK_W": block_w, "num_warps": 4, "num_stages": 1}
    return tile, cdiv(x.shape[0] * x.shape[1], block_r)


def _over_features(kernel: Any, groups: int, inputs: Sequence[Any], *outputs: Tensor | None, **options: int) -> None:
    """Launch a kernel for all tiles of x, the first input, and all groups."""
    x = inputs[0]
    tile, tiles = _tile_of(x, groups)
    grid = cdiv(tiles, options.get("TILES", 1)), groups
    sizes = x.shape[0] * x.shape[1], groups, x.shape[2] // groups
    launch(kernel, grid, *contiguous(*inputs), *outputs, *sizes, **tile, **options)


def _over_time(kernel: Any, inputs: Sequence[Any], outputs: Sequence[Tensor], number: float) -> None:
    """Launch a kernel for all sequences and groups of the first input; `number` is the last argument."""
    sequences, length, groups = inputs[0].shape
    block_g = min(BLOCK_G, next_power_of_2(groups))
    blocks = cdiv(groups, block_g)
    tile = {"BLOCK_T": BLOCK_T, "BLOCK_G": block_g, "BLOCKS": blocks, "num_warps": 8, "num_stages": 1}
    launch(kernel, (blocks * sequences,), *contiguous(*inputs), *outputs, length, groups, number, **tile)


def moments(x: Tensor, mask: Tensor | None, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    mean, spread = (x.new_empty(*x.shape[:2], groups, dtype=dtype) for _ in range(2))
    _over_features(_moments_kernel, groups, (x, mask), mean, spread)
    return mean, spread


def statistics(
    own: Tensor, spread: Tensor, mask: Tensor | None, count: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    means, rstd = (torch.empty_like(own, dtype=dtype) for dtype in (torch.float64, torch.float32))
    last_mean, last_variance = (mean.new_empty(mean.shape, dtype=torch.float64) for _ in range(2))
    results = means, rstd, last_mean, last_variance
    _over_time(_statistics_kernel, (own, spread, mask, count, mean, variance), results, eps)
    return results


def apply(
    x: Tensor, mask: Tensor | None, means: Tensor, rstds: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    y = x.new_empty(x.shape)
    _over_features(_apply_kernel, means.shape[2], (x, mask, means, rstds, weight, bias), y)
    return y


def sums(
    gradients: Tensor, x: Tensor, mask: Tensor | None, means: Tensor, rstds: Tensor, weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    groups, features = means.shape[2], x.shape[2]
    parts = cdiv(_tile_of(x, groups)[1], TILES)
    summed, products = torch.empty_like(rstds), torch.empty_like(rstds)
    grad_weight, grad_bias = (None if t is None else rstds.new_empty(parts, features) for t in (weight, bias))
    inputs = gradients, x, mask, means, rstds, weight
    _over_features(_sums_kernel, groups, inputs, summed, products, grad_weight, grad_bias, TILES=TILES)
    return summed, products, *(None if t is None else t.sum(0) for t in (grad_weight, grad_bias))


def statistics_backward(
    sums: Tensor, products: Tensor, own: Tensor, means: Tensor, rstd: Tensor, mask: Tensor | None, count: Tensor,
    mean: Tensor, grad_mean: Tensor | None, grad_variance: Tensor | None, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    results = torch.empty_like(own), torch.empty_like(own), mean.new_empty(mean.shape), mean.new_empty(mean.shape)
    inputs = sums, products, own, means, rstd, mask, count, mean, grad_mean, grad_variance
    _over_time(_statistics_backward_kernel, inputs, results, width)
    return results


def apply_backward(
    gradients: Tensor, x: Tensor, mask: Tensor | None, stretches: Tensor, shifts: Tensor, rstds: Tensor,
    weight: Tensor | None,
) -> Tensor:  # fmt: skip
    grad_x = x.new_empty(x.shape)
    inputs = gradients, x, mask, stretches, shifts, rstds, weight
    _over_features(_apply_backward_kernel, shifts.shape[2], inputs, grad_x)
    return grad_x


def step(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, count: Tensor, mean: Tensor,
    variance: Tensor, groups: int, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y and the next count, mean and variance."""
    width, y = x.shape[1] // groups, x.new_empty(x.shape)
    block_w = next_power_of_2(width)
    block_g = max(1, min(TILE // block_w, next_power_of_2(groups)))
    blocks = cdiv(groups, block_g)
    state = contiguous(count, mean, variance)
    following = tuple(torch.empty_like(x) for x in state)
    inputs = contiguous(x, *state, weight, bias, mask)
    launch(
        _step_kernel, (blocks * len(x),), *inputs, y, *following, groups, width, eps,
        BLOCK_G=block_g, BLOCK_W=block_w, BLOCKS=blocks, num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, *following
