"""The average of sequences whose parts lie on several processes, which exchange their states and nothing else."""

from collections.abc import Callable

import torch
from torch import nn

from luna_mega.kernels.complex_ema.coefficients import coefficients, powers, times
from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.damped_ema.reference import working_dtype
from luna_mega.kernels.damped_ema.sharded import BLOCK, rows_of


def average(run: Callable, shard: ContextShard, x, parameters, mask, **call):
    """Return the average at this process's positions of the whole sequence, and None; `run` averages a part alone."""
    shard.check("complex_ema", x.shape[1])
    dtype = working_dtype(x, parameters)
    log_decay, turn, weight_in, _ = coefficients(*(parameter.to(dtype) for parameter in parameters))
    kept = x.to(dtype) if mask is None else x.to(dtype).masked_fill(~mask[..., None], 0.0)
    gained = _decayed_sum(rows_of(shard.to_end(kept)), log_decay, turn).transpose(0, 1) * weight_in[..., None]
    (gaps, _), states = shard.gaps(x.device), shard.all_gather(gained)[: shard.rank]
    decays = powers(log_decay, turn, gaps.flatten()).permute(3, 0, 1, 2)
    before = times(decays.unflatten(0, gaps.shape), states).sum(0)
    return run(**call | {"x": x, "parameters": parameters, "mask": mask, "initial_state": before})


def _decayed_sum(rows, log_decay, turn):
    """Return sum_t q^(T-1-t) x_t as real pairs, `[D, B, N, 2]` of `[D, B, T]`."""
    exponents = torch.arange(BLOCK, dtype=torch.float64, device=turn.device)
    missing = -rows.shape[-1] % BLOCK
    blocks = nn.functional.pad(rows, (missing, 0)).unflatten(-1, (-1, BLOCK))
    count = torch.arange(blocks.shape[2], dtype=torch.float64, device=turn.device) * BLOCK
    outer, inner = (powers(log_decay, turn, t.flip(0)) for t in (count, exponents))
    # Over the blocks first: the result in between does not grow with the length.
    sums = (outer.flatten(1, 2)[:, None] @ blocks).unflatten(2, (-1, 2))
    return times(inner.mT[:, None], sums.mT).sum(-2)
