"""The first token of a sequence, and the mean over its tokens.

Masks are bool, `[B, T]`, True = keep; None = all. With a shard states and mask are the parts of this rank, and the
results are those of whole sequences, the same on all ranks.
"""

import torch

from luna_mega.kernels.context_parallel import ContextShard, all_gather, all_reduce_sum


def first_position(mask: torch.Tensor) -> torch.Tensor:
    """Return the position of the first token that the mask keeps, `[B]`: with padding on the left it is not 0."""
    return mask.int().argmax(dim=1)


def take(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the positions `index` `[B, S]` of `[B, T]` or `[B, T, d]`."""
    return states.gather(1, index if states.dim() == 2 else index[..., None].expand(-1, -1, states.shape[2]))


def first_token(states: torch.Tensor, mask: torch.Tensor | None, shard: ContextShard | None = None) -> torch.Tensor:
    """Return the first position of `[B, T, d]` that the mask keeps, `[B, d]`."""
    first = states[:, 0] if mask is None else take(states, first_position(mask)[:, None])[:, 0]
    if shard is None:
        return first
    has_any = torch.ones_like(states[:, 0, 0], dtype=torch.int) if mask is None else mask.any(dim=1).int()
    owner = all_gather(has_any, shard).argmax(dim=0)
    return all_reduce_sum(first.masked_fill((owner != shard.rank)[:, None], 0.0), shard)


def without_first(states: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `[B, T, ...]` without the first position that the mask keeps, `[B, T - 1, ...]`."""
    if states is None or mask is None:
        return states if states is None else states[:, 1:]
    index = torch.arange(mask.shape[1] - 1, device=mask.device)
    return take(states, index + (index >= first_position(mask)[:, None]).long())


def masked_mean(states: torch.Tensor, mask: torch.Tensor | None, shard: ContextShard | None = None) -> torch.Tensor:
    """Return the mean over the rows of `[B, T, d]` that the mask `[B or 1, T]` keeps; 0 where it keeps none."""
    if mask is None and shard is None:
        return states.mean(dim=1)
    if mask is None:
        mask = torch.ones_like(states[..., 0], dtype=torch.bool)
    kept, count = states.masked_fill(~mask[..., None], 0.0).sum(dim=1), mask.sum(dim=1, keepdim=True)
    if shard is not None:
        kept, count = all_reduce_sum(kept, shard), all_reduce_sum(count, shard)
    return kept / count.clamp(min=1)
