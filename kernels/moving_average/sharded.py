"""The average of sequences that are split across processes, which exchange only their states."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.moving_average.coefficients import Coefficients, powers, times
from luna_mega.kernels.moving_average.reference import finish
from luna_mega.kernels.upcast import upcast_dtype

BLOCK = 64


def average(
    run: Callable[..., Any], shard: ContextShard, name: str, coefficients: Callable[..., Any], x: Tensor,
    parameters: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None, shift: bool = False,
    truncation: int | None = None, **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the average at this rank's positions of the complete sequence, and None; `run` averages one shard."""
    shard.check(name, x.shape[1])
    if truncation is not None and truncation < shard.total:
        raise ValueError(
            f"{name}: truncation={truncation} is below the {shard.total} positions of the complete sequence, but "
            "averages over several ranks do not support truncation; omit truncation"
        )
    call |= {"x": x, "parameters": parameters, "skip": skip, "mask": mask}
    dtype, channels = upcast_dtype(x, *parameters), x.shape[2]
    forward, backward = slice(0, channels), slice(channels, None)
    of = coefficients(*(parameter.to(dtype) for parameter in parameters))
    if of.turn is None:
        call |= {"shift": shift, "truncation": None}
    values = x.to(dtype)
    kept = values if mask is None else values.masked_fill(~mask[..., None], 0.0)
    own_states = [_decayed_sum(_rows(shard.to_end(kept)), of.rows(forward), from_end=True)]
    if len(of.log_decay) > channels:
        own_states.append(_decayed_sum(_rows(kept), of.rows(backward), from_end=False))
    states = shard.all_gather(torch.cat(own_states).transpose(0, 1) * of.weight_in[..., None])
    gaps_before, gaps_after = shard.gaps(x.device)
    before = _arriving(states[: shard.rank, :, :channels], of.rows(forward), gaps_before)
    if len(own_states) == 1:
        return run(**call | {"initial_state": before if of.parts > 1 else before.squeeze(-1)})
    after = _arriving(states[shard.rank + 1 :, :, channels:], of.rows(backward), gaps_after)
    # The states of the other processes add to the average of this shard.
    result, _ = run(**call | {"x": values, "skip": None})
    added = _response(before, of.rows(forward), x.shape[1], 1)
    later = _response(after, of.rows(backward), x.shape[1], 0 if shift else 1)
    # Backwards, so that column 0 is at the last position of the sequences in this shard.
    result = result + _columns(added) + shard.to_end(_columns(later)).flip(1)
    return finish(result, x, None if skip is None else skip.to(dtype)), None


def _arriving(states: Tensor, of: Coefficients, gaps: Tensor) -> Tensor:
    """Return the sum of the states `[S, B, D, N, P]` of S other processes, each after its gap `[S, B or 1]`."""
    decays = powers(of.log_decay, of.turn, gaps.flatten()).permute(3, 0, 1, 2)
    return times(decays.unflatten(0, gaps.shape), states).sum(0)


def _rows(x: Tensor) -> Tensor:
    """Return `[B, T, D]` as `[D, B, T]`: transposing a contiguous matrix is faster than copying a permuted one."""
    return x.flatten(0, 1).t().contiguous().view(x.shape[2], *x.shape[:2])


def _columns(rows: Tensor) -> Tensor:
    return rows.flatten(1).t().contiguous().view(*rows.shape[1:], len(rows))


def _block_powers(length: int, of: Coefficients) -> tuple[Tensor, Tensor]:
    """Return q^(64 c) `[D, N, P, C]` and q^i `[D, N, P, 64]`, whose products are q^t for every t below `length`."""
    inner = torch.arange(BLOCK, device=of.log_decay.device)
    outer = torch.arange(-(-length // BLOCK), device=of.log_decay.device) * BLOCK
    return powers(of.log_decay, of.turn, outer), powers(of.log_decay, of.turn, inner)


def _decayed_sum(rows: Tensor, of: Coefficients, from_end: bool) -> Tensor:
    """Return sum_t q^t x_t, `[D, B, N, P]` of `[D, B, T]`; `from_end`: t counts from the last position."""
    outer, inner = (table.flip(-1) if from_end else table for table in _block_powers(rows.shape[-1], of))
    missing = -rows.shape[-1] % BLOCK
    blocks = nn.functional.pad(rows, (missing, 0) if from_end else (0, missing)).unflatten(-1, (-1, BLOCK))
    # Over the blocks first: the size of the intermediate result does not depend on the length.
    sums = (outer.flatten(1, 2)[:, None] @ blocks).unflatten(2, (-1, of.parts))
    return times(inner.mT[:, None], sums.mT).sum(-2)


def _response(states: Tensor, of: Coefficients, length: int, first: int) -> Tensor:
    """Return sum_n eta_n q_n^(t + first) states_n for every t below `length`, `[D, B, T]` of real `[B, D, N, 1]`."""
    outer, inner = _block_powers(length, of)
    states = states.squeeze(-1) * of.weight_out * torch.exp(of.log_decay * first)
    weights = states.transpose(0, 1)[..., None] * outer.squeeze(2)[:, None]
    return (weights.mT @ inner.squeeze(2)[:, None]).flatten(-2)[..., :length]
