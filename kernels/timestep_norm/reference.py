"""Timestep norm as computed by Megalodon's code (Megalodon, section 3.2), one position at a time.

This file is the specification: all faster implementations are tested against it. Shapes: input `[B, T, D]`, divided
into G groups of D / G adjacent features; counts `[B]`, means and variances `[B, G]`. Masks are boolean, True = keep.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TimestepNormState(NamedTuple):
    """The statistics of all positions so far.

    `count` `[B]` int64 is the number of positions. `mean` and `variance`, `[B, G]` float64, are computed over all
    features of a group at all positions; the variance is biased. Calls also accept float32, but at a million positions
    an update by 1 / count is below its rounding error.
    """

    count: Tensor  # type: ignore[assignment]  # of tuple.count
    mean: Tensor
    variance: Tensor


def empty_state(x: Tensor, groups: int, sequences: int) -> TimestepNormState:
    """Return the statistics of zero positions."""
    zeros = x.new_zeros(sequences, groups, dtype=torch.float64)
    return TimestepNormState(x.new_zeros(sequences, dtype=torch.int64), zeros, zeros.clone())


def step(
    x: Tensor, state: TimestepNormState, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float,
    mask: Tensor | None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Return y and the statistics after one position x `[B, D]`; if masked, y is 0 and the statistics do not change."""
    count, mean, variance = state
    kept = x if mask is None else x.masked_fill(~mask[:, None], 0.0)
    kept = kept.to(mean.dtype).unflatten(1, (groups, -1))
    now, spread = kept.mean(-1), kept.var(-1, correction=0)
    next_count = count + 1
    share = 1.0 / next_count[:, None].to(mean.dtype)
    # If the count is 0, the previous statistics are ignored, whatever their values.
    mean, variance = (torch.where(count[:, None] == 0, 0.0, x) for x in (mean, variance))
    away = now - mean
    next_mean = mean + away * share
    next_variance = variance + (spread + (1 - share) * away.square() - variance) * share
    y = (kept - next_mean[..., None]) * torch.rsqrt(next_variance + eps)[..., None]
    y = y.flatten(1)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    if mask is not None:
        y = y.masked_fill(~mask[:, None], 0.0)
        next_count = torch.where(mask, next_count, count)
        next_mean, next_variance = (
            torch.where(mask[:, None], after, before)
            for after, before in ((next_mean, mean), (next_variance, variance))
        )
    return y.to(x.dtype), TimestepNormState(next_count, next_mean, next_variance)


def timestep_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    mask: Tensor | None = None, initial_state: TimestepNormState | None = None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Return the results of `step` at all positions, and the final statistics."""
    state = empty_state(x, groups, x.shape[0]) if initial_state is None else initial_state
    outputs = []
    for t in range(x.shape[1]):
        y, state = step(x[:, t], state, groups, weight, bias, eps, None if mask is None else mask[:, t])
        outputs.append(y)
    return torch.stack(outputs, 1), state
