"""Compute float64 statistics of all positions so far from the group mean and variance of every position.

n_t is the number of unmasked positions. m_t and v_t are the mean and variance of a group at one position, M_t and S_t
those of all positions up to t:

    n_t M_t = n_0 M_0 + sum_k m_k
    n_t S_t = n_0 S_0 + sum_k (v_k + (1 - 1 / n_k) (m_k - M_{k-1})^2)

No term of the second sum is negative, so there is no cancellation, even if the mean is large.
"""

import torch
from torch import Tensor


def counts(count: Tensor, mask: Tensor | None, length: int) -> Tensor:
    """Return the number of kept positions up to each one, `[B, T, 1]` float64, at least 1, with initial `count`."""
    if mask is None:
        kept = torch.arange(1, length + 1, device=count.device).expand(len(count), -1)
    else:
        kept = mask.cumsum(1)
    return (count[:, None] + kept).clamp(min=1).double()[..., None]


def over_time(
    count: Tensor, mean: Tensor, variance: Tensor, number: Tensor, means: Tensor, variances: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return M_t and n_t S_t, `[B, T, G]`, for m_t and v_t, `[B, T, G]`.

    `count`, `mean`, `variance` are n_0 `[B]`, M_0 and S_0 `[B, G]`; `number` is n_t `[B, T, 1]`.
    """
    so_far = _kept(means, mask).cumsum(1).add_((count[:, None] * mean)[:, None]).div_(number)
    squares = distances(means, mean[:, None], so_far, mask).square()
    gained = torch.addcmul(_kept(variances, mask), squares, 1.0 - 1.0 / number)
    return so_far, gained.cumsum(1).add_((count[:, None] * variance)[:, None])


def distances(means: Tensor, first: Tensor, mean: Tensor, mask: Tensor | None) -> Tensor:
    """Return m_t - M_{t-1}, 0 if masked; `first` `[B, 1, G]` is M_0, `mean` is M_1 to M_T."""
    return _kept(means - torch.cat((first, mean), 1)[:, : mean.shape[1]], mask)


def _kept(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)
