"""Statistics of all positions so far in Triton, in float64: sums over time as in `statistics`, and their gradients.

A program processes BLOCK_G groups of one sequence, in successive tiles `[BLOCK_T, BLOCK_G]` of positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from luna_mega.kernels.common.triton_launch import cdiv, contiguous, launch, next_power_of_2

# Positions and groups of a tile.
BLOCK_T, BLOCK_G = 256, 4


@triton.jit
def _double(pointer, places, inside):
    return tl.load(pointer + places, inside, other=0.0).to(tl.float64)


@triton.jit
def _kept(MASK, row, position, length):
    """Return 1 for unmasked positions, and 0 for masked positions and positions outside of the sequence."""
    inside = (position >= 0) & (position < length)
    if MASK is None:
        return inside.to(tl.int64)
    else:
        return (tl.load(MASK + row * length + position, inside, other=0) != 0).to(tl.int64)


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
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Write M_t and the rstd of S_t, and the final mean and variance.

    The program index is `(block of groups, sequence)`.
    """
    row, group = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    there, of_row = group < groups, row * groups + group
    number = tl.load(COUNT + row)
    mean_sum = _double(MEAN, of_row, there) * number.to(tl.float64)
    variance_sum = _double(VARIANCE, of_row, there) * number.to(tl.float64)
    for start in range(0, length, BLOCK_T):
        position = start + tl.arange(0, BLOCK_T)
        kept = _kept(MASK, row, position, length)
        counted = number + tl.cumsum(kept, 0)
        counts = tl.maximum(counted, 1).to(tl.float64)[:, None]
        before = tl.maximum(counted - kept, 1).to(tl.float64)[:, None]
        places = (row * length + position.to(tl.int64))[:, None] * groups + group[None, :]
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
    tl.store(LAST_MEAN + of_row, mean_sum / counts, there)
    tl.store(LAST_VARIANCE + of_row, variance_sum / counts, there)


@triton.jit
def _of_away(of_total, OWN, MEANS, MEAN, row, position, length, count, kept, group, groups):
    """Return the gradient of the distance m_t - M_{t-1}; masked positions have gradient 0.

    `of_total` is the gradient of n S.
    """
    used = (kept > 0)[:, None] & (group < groups)[None, :]
    places = (row * length + position.to(tl.int64))[:, None] * groups + group[None, :]
    before = _double(MEANS, places - groups, used & (position > 0)[:, None])
    first = _double(MEAN, row * groups + group, group < groups)
    away = _double(OWN, places, used) - tl.where((position > 0)[:, None], before, first[None, :])
    return tl.where(used, 2.0 * of_total * (1.0 - 1.0 / tl.maximum(count, 1).to(tl.float64))[:, None] * away, 0.0)


@triton.jit(do_not_specialize=["length"])
def _statistics_backward_kernel(
    SUMS, PRODUCTS, OWN, MEANS, RSTD,  # [B, T, groups]
    MASK,  # [B, T]
    COUNT, MEAN,  # [B], [B, groups]
    GRAD_MEAN, GRAD_VARIANCE,  # gradients of the last mean and variance, [B, groups]
    STRETCH, SHIFT,  # [B, T, groups]
    OF_MEAN, OF_VARIANCE,  # gradients of the initial mean and variance, [B, groups]
    length, groups, width,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Write the results of `torch_backend._statistics_backward`, from the last tile to the first.

    The program index is `(block of groups, sequence)`.
    """
    row, group = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    there, of_row = group < groups, row * groups + group
    started = tl.load(COUNT + row)
    number = started
    for start in range(0, length, BLOCK_T):
        number += tl.sum(_kept(MASK, row, start + tl.arange(0, BLOCK_T), length), 0)
    # Gradients of n M and n S after the current tile.
    scale = 1.0 / (tl.maximum(number, 1).to(tl.float64) * width)
    mean_sum, variance_sum = tl.zeros([BLOCK_G], tl.float64), tl.zeros([BLOCK_G], tl.float64)
    if GRAD_MEAN is not None:
        mean_sum += _double(GRAD_MEAN, of_row, there) * scale
    if GRAD_VARIANCE is not None:
        variance_sum += _double(GRAD_VARIANCE, of_row, there) * scale
    first_away = tl.zeros([BLOCK_G], tl.float64)
    for step in range(0, tl.cdiv(length, BLOCK_T)):
        position = (tl.cdiv(length, BLOCK_T) - 1 - step) * BLOCK_T + tl.arange(0, BLOCK_T)
        kept, following = _kept(MASK, row, position, length), _kept(MASK, row, position + 1, length)
        number -= tl.sum(kept, 0)
        counted = number + tl.cumsum(kept, 0)
        share = (1.0 / tl.maximum(counted, 1).to(tl.float64))[:, None]
        inside = (position < length)[:, None] & there[None, :]
        places = (row * length + position.to(tl.int64))[:, None] * groups + group[None, :]
        rstd = _double(RSTD, places, inside)
        gained = -0.5 * rstd * rstd * _double(PRODUCTS, places, inside) * share
        of_total = variance_sum[None, :] + _from_end(gained)
        of_away = _of_away(of_total, OWN, MEANS, MEAN, row, position, length, counted, kept, group, groups)
        of_next = _of_away(
            of_total - gained, OWN, MEANS, MEAN, row, position + 1, length, counted + following, following, group,
            groups,
        )  # fmt: skip
        direct = tl.where(inside, (-_double(SUMS, places, inside) - of_next) * share, 0.0)
        of_sum = mean_sum[None, :] + _from_end(direct)
        used = (kept > 0)[:, None]
        stretch = tl.where(used, 2.0 * of_total, 0.0)
        shift = tl.where(used, of_sum + of_away, 0.0) - stretch * _double(OWN, places, inside)
        tl.store(STRETCH + places, stretch.to(tl.float32), inside)
        tl.store(SHIFT + places, shift.to(tl.float32), inside)
        mean_sum += tl.sum(direct, 0)
        variance_sum += tl.sum(gained, 0)
        first_away = tl.sum(tl.where((position == 0)[:, None], of_away, 0.0), 0)
    begun = started.to(tl.float64) * width
    tl.store(OF_MEAN + of_row, begun * mean_sum - width * first_away, there)
    tl.store(OF_VARIANCE + of_row, begun * variance_sum, there)


def _tile(groups: int, sequences: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the tile of both kernels."""
    block_g = min(BLOCK_G, next_power_of_2(groups))
    tile = {"BLOCK_T": BLOCK_T, "BLOCK_G": block_g, "num_warps": 4, "num_stages": 1}
    return (cdiv(groups, block_g), sequences), tile


def statistics(
    own: Tensor, spread: Tensor, mask: Tensor | None, count: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `torch_backend._statistics`."""
    sequences, length, groups = own.shape
    count, mean, variance, mask = contiguous(count, mean, variance, mask)
    means, rstd = (torch.empty_like(own, dtype=dtype) for dtype in (torch.float64, torch.float32))
    last = [torch.empty_like(x, dtype=torch.float64) for x in (mean, variance)]
    grid, tile = _tile(groups, sequences)
    inputs = own, spread, mask, count, mean, variance
    launch(_statistics_kernel, grid, *inputs, means, rstd, *last, length, groups, eps, **tile)
    return means, rstd, last[0], last[1]


def statistics_backward(
    sums: Tensor, products: Tensor, own: Tensor, means: Tensor, rstd: Tensor, mask: Tensor | None, count: Tensor,
    mean: Tensor, grad_mean: Tensor | None, grad_variance: Tensor | None, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return `torch_backend._statistics_backward`."""
    sequences, length, groups = own.shape
    inputs = contiguous(sums, products, own, means, rstd, mask, count, mean, grad_mean, grad_variance)
    stretches, shifts = torch.empty_like(own), torch.empty_like(own)
    initial = [torch.empty_like(inputs[7]) for _ in range(2)]
    grid, tile = _tile(groups, sequences)
    outputs = stretches, shifts, *initial
    launch(_statistics_backward_kernel, grid, *inputs, *outputs, length, groups, width, **tile)
    return stretches, shifts, initial[0], initial[1]
