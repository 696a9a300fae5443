"""The statistics of all positions so far, from mean and variance of the groups at every position; all in float64.

n_t is the number of kept positions, m_t and v_t mean and variance of a group at one of them, M_t and S_t those of all:

    M_t = M_0 + sum_k (m_k - M_0) / n_t
    n_t S_t = n_0 S_0 + sum_k (v_k + (1 - 1 / n_k) (m_k - M_{k-1})^2)

Nothing in the second sum is negative, so that no digits are lost however large the mean is.
"""

from typing import NamedTuple

import torch


class Statistics(NamedTuple):
    """Counts `[B, T, 1]`; means, distances m_t - M_{t-1}, 0 where masked, and variances `[B, T, G]`."""

    count: torch.Tensor
    mean: torch.Tensor
    away: torch.Tensor
    variance: torch.Tensor


def counts(count: torch.Tensor, mask: torch.Tensor | None, length: int) -> torch.Tensor:
    """Return the number of kept positions up to each, `[B, T, 1]` float64, at least 1; `count` `[B]`: before them."""
    if mask is None:
        kept = torch.arange(1, length + 1, device=count.device).expand(len(count), -1)
    else:
        kept = mask.cumsum(1)
    return (count[:, None] + kept).clamp(min=1).double()[..., None]


def over_time(count, mean, variance, means, variances, mask) -> Statistics:
    """Return the statistics at all positions, with those before them, `[B]` and `[B, G]`.

    `means`, `variances` `[B, T, G]` are of single positions.
    """
    number, first = counts(count, mask, means.shape[1]), mean[:, None]
    above = _kept(means - first, mask)
    mean = first + above.cumsum(1) / number
    away = distances(means, first, mean, mask)
    gained = _kept(variances, mask) + (1.0 - 1.0 / number) * away.square()
    variance = (count[:, None, None] * variance[:, None] + gained.cumsum(1)) / number
    return Statistics(number, mean, away, variance)


def distances(means, first, mean, mask):
    """Return m_t - M_{t-1}, 0 where masked; `first` `[B, 1, G]` is M_0, `mean` are M_1 to M_T."""
    return _kept(means - torch.cat((first, mean[:, :-1]), 1), mask)


def _kept(x, mask):
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)
