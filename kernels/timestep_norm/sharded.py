"""Context-parallel timestep norm; the ranks exchange only their statistics."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.timestep_norm.reference import TimestepNormState
from luna_mega.kernels.upcast import upcast


def norm(
    run: Callable[..., Any], shard: ContextShard, x: Tensor, groups: int, mask: Tensor | None, initial_state: object,
    **call: Any,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Return the norm of the complete sequence at this rank's positions, and the statistics so far."""
    shard.check("timestep_norm", x.shape[1])
    kept = x if mask is None else x.masked_fill(~mask[..., None], 0.0)
    variances, means = torch.var_mean(upcast(kept).unflatten(2, (groups, -1)), -1, correction=0)
    weights = torch.ones_like(means[..., :1]) if mask is None else mask[..., None]
    part = _pooled(weights.double().expand_as(means), means.double(), variances.double(), 1)
    weights, means, variances = shard.all_gather(torch.stack(part)).unbind(1)
    # Later shards have weight 0, but all ranks must use the tensors of all ranks.
    earlier = torch.arange(shard.size, device=x.device)[:, None, None] < shard.rank
    weight, mean, variance = _pooled(weights * earlier, means, variances, 0)
    state = TimestepNormState(weight[:, 0].long(), mean, variance)
    return run(x=x, groups=groups, mask=mask, initial_state=state, **call)


def _pooled(weights: Tensor, means: Tensor, variances: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the weights and the pooled mean and variance."""
    total = weights.sum(dim)
    shares = weights / total.clamp(min=1.0).unsqueeze(dim)
    mean = (shares * means).sum(dim)
    return total, mean, (shares * (variances + (means - mean.unsqueeze(dim)).square())).sum(dim)
