"""The average of sequences whose parts lie on several processes, which exchange their states and nothing else."""

from collections.abc import Callable

import torch
from torch import nn

from luna_mega.kernels._op import without_autocast
from luna_mega.kernels.context_parallel import ContextShard, all_gather
from luna_mega.kernels.damped_ema import reference

BLOCK = 64


def sharded(
    run: Callable,
    x: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    skip: torch.Tensor | None,
    mask: torch.Tensor | None,
    shift: bool,
    shard: ContextShard,
) -> torch.Tensor:
    """Return the average at this process's positions of the whole sequence; `run` averages this part alone.

    `run(x, skip, mask, initial_state)` is the average of one process, both directions of it where there are two.
    """
    dtype, channels = reference.working_dtype(x, parameters), x.shape[2]
    with without_autocast(x.device.type):
        log_q, weight_in, weight_out = reference.coefficients(*(parameter.to(dtype) for parameter in parameters))
        wide = x.to(dtype)
        kept = wide if mask is None else wide.masked_fill(~mask[..., None], 0.0)
        before, behind = _start_states(kept, log_q, weight_in, shard)
        if behind is None:
            return run(x, skip, mask, before)
        # What the states of the other processes add to the average of this part.
        average = run(wide, None, mask, None)
        average = average + _response(before, weight_out[:channels], log_q[:channels], x.shape[1], 1)
        later = _response(behind, weight_out[channels:], log_q[channels:], x.shape[1], 0 if shift else 1)
        return reference.finish(average + later.flip(1), x, None if skip is None else skip.to(dtype))


def _start_states(kept, log_q, weight_in, shard):
    """Return the states before this part `[B, D, N]`, and of an average from the end the states behind it, or None."""
    channels, rank = kept.shape[2], shard.rank
    gained = [_decayed_sum(kept.flip(1), log_q[:channels])]
    if len(log_q) > channels:
        gained.append(_decayed_sum(kept, log_q[channels:]))
    states = all_gather(torch.cat(gained, 1) * weight_in, shard)
    gaps = [sum(shard.lengths[other + 1 : rank]) for other in range(rank)]
    before = _arriving(states[:rank, :, :channels], log_q[:channels], gaps)
    if len(log_q) == channels:
        return before, None
    gaps = [sum(shard.lengths[rank + 1 : other]) for other in range(rank + 1, shard.size)]
    return before, _arriving(states[rank + 1 :, :, channels:], log_q[channels:], gaps)


def _arriving(states, log_q, gaps):
    """Return the sum of the states `[P, B, D, N]` of P other processes, each after its gap of positions."""
    gaps = torch.tensor(gaps, dtype=log_q.dtype, device=log_q.device)
    return torch.einsum("pbdn,pdn->bdn", states, torch.exp(log_q * gaps[:, None, None]))


def _powers(log_q, exponents):
    return torch.exp(log_q[..., None] * exponents.to(log_q.dtype))


def _blocks(length, log_q):
    """Return q^(64 c) `[D, N, C]` and q^i `[D, N, 64]`, of which q^t is made for every t below `length`."""
    inner = torch.arange(BLOCK, device=log_q.device)
    outer = torch.arange(-(-length // BLOCK), device=log_q.device) * BLOCK
    return _powers(log_q, outer), _powers(log_q, inner)


def _decayed_sum(x, log_q):
    """Return sum_t q^t x_t, `[B, D, N]` of `[B, T, D]` and `[D, N]`."""
    outer, inner = _blocks(x.shape[1], log_q)
    blocks = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    # Over the blocks first: the result in between does not grow with the length.
    return torch.einsum("bidn,dni->bdn", torch.einsum("bcid,dnc->bidn", blocks, outer), inner)


def _response(states, weight_out, log_q, length, first):
    """Return sum_n eta_n q_n^(t + first) states_n for every t below `length`, `[B, T, D]`."""
    outer, inner = _blocks(length, log_q)
    weights = (states * weight_out * torch.exp(log_q * first))[..., None] * outer
    return torch.einsum("bdnc,dni->bcid", weights, inner).flatten(1, 2)[:, :length]
