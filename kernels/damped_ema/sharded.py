"""The average of sequences whose parts lie on several processes, which exchange their states and nothing else."""

from collections.abc import Callable

import torch
from torch import nn

from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.damped_ema import reference

BLOCK = 64


def average(run: Callable, shard: ContextShard, x, parameters, skip, mask, shift, truncation, **call):
    """Return the average at this process's positions of the whole sequence, and None; `run` averages a part alone."""
    shard.check("damped_ema", x.shape[1])
    if truncation is not None and truncation < shard.total:
        raise ValueError(
            f"damped_ema: truncation={truncation} is below the {shard.total} positions of the whole sequence, and an "
            "average over several ranks never forgets; leave truncation out"
        )
    call |= {"x": x, "parameters": parameters, "skip": skip, "mask": mask, "shift": shift, "truncation": None}
    dtype, channels = reference.working_dtype(x, parameters), x.shape[2]
    log_q, weight_in, weight_out = reference.coefficients(*(parameter.to(dtype) for parameter in parameters))
    wide = x.to(dtype)
    kept = wide if mask is None else wide.masked_fill(~mask[..., None], 0.0)
    before, behind = _start_states(kept, log_q, weight_in, shard)
    if behind is None:
        return run(**call | {"initial_state": before})
    # The states of the other processes add to the average of this part.
    average, _ = run(**call | {"x": wide, "skip": None})
    added = _response(before, weight_out[:channels], log_q[:channels], x.shape[1], 1)
    later = _response(behind, weight_out[channels:], log_q[channels:], x.shape[1], 0 if shift else 1)
    average = average + _columns(added) + _from_end(_columns(later), shard)
    return reference.finish(average, x, None if skip is None else skip.to(dtype)), None


def _start_states(kept, log_q, weight_in, shard):
    """Return the states before this part `[B, D, N]`, and of an average from the end the states behind it, or None."""
    channels, rank = kept.shape[2], shard.rank
    rows = rows_of(kept)
    last = rows if shard.kept is None else rows_of(shard.to_end(kept))
    gained = [_decayed_sum(last, log_q[:channels], from_end=True)]
    if len(log_q) > channels:
        gained.append(_decayed_sum(rows, log_q[channels:], from_end=False))
    states = shard.all_gather(torch.cat(gained).transpose(0, 1) * weight_in)
    gaps_before, gaps_behind = shard.gaps(kept.device)
    before = _arriving(states[:rank, :, :channels], log_q[:channels], gaps_before)
    if len(log_q) == channels:
        return before, None
    return before, _arriving(states[rank + 1 :, :, channels:], log_q[channels:], gaps_behind)


def _arriving(states, log_q, gaps):
    """Return the sum of the states `[P, B, D, N]` of P other processes, each after its gap `[P, B or 1]`."""
    return (states * torch.exp(log_q * gaps.to(log_q.dtype)[..., None, None])).sum(0)


def _from_end(x, shard):
    """Return `[B, T, D]` backwards, so that column 0 is at the last position of the sequences here."""
    return shard.to_end(x).flip(1)


def rows_of(x):
    """Return `[B, T, D]` as `[D, B, T]`: transposing a contiguous matrix is faster than copying a permuted one."""
    return x.flatten(0, 1).t().contiguous().view(-1, *x.shape[:2])


def _columns(rows):
    return rows.flatten(1).t().contiguous().view(*rows.shape[1:], -1)


def _powers(length, log_q):
    """Return q^(64 c) `[D, N, C]` and q^i `[D, N, 64]`, whose products are q^t for every t below `length`."""
    inner = torch.arange(BLOCK, device=log_q.device, dtype=log_q.dtype)
    outer = torch.arange(-(-length // BLOCK), device=log_q.device, dtype=log_q.dtype) * BLOCK
    return torch.exp(log_q[..., None] * outer), torch.exp(log_q[..., None] * inner)


def _decayed_sum(rows, log_q, from_end):
    """Return sum_t q^t x_t, `[D, B, N]` of `[D, B, T]` and `[D, N]`; `from_end`: t counts from the last position."""
    outer, inner = (powers.flip(-1) if from_end else powers for powers in _powers(rows.shape[-1], log_q))
    missing = -rows.shape[-1] % BLOCK
    blocks = nn.functional.pad(rows, (missing, 0) if from_end else (0, missing)).unflatten(-1, (-1, BLOCK))
    # Over the blocks first: the result in between does not grow with the length.
    return ((outer[:, None] @ blocks) * inner[:, None]).sum(-1)


def _response(states, weight_out, log_q, length, first):
    """Return sum_n eta_n q_n^(t + first) states_n for every t below `length`, `[D, B, T]` of `[B, D, N]`."""
    outer, inner = _powers(length, log_q)
    weights = (states * weight_out * torch.exp(log_q * first)).transpose(0, 1)[..., None] * outer[:, None]
    return (weights.mT @ inner[:, None]).flatten(-2)[..., :length]
