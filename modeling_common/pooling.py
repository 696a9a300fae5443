"""The first and the last token of a sequence, and the mean over its tokens.

Masks are bool, `[B, T]`, True = keep; None = all. States and mask may be parts of sequences; the results are those of
whole sequences.
"""

import torch

from luna_mega.modeling_common.sequence_parts import WHOLE, Parts


def first_position(mask: torch.Tensor) -> torch.Tensor:
    """Return the position of the first token that the mask keeps, `[B]`: with padding on the left it is not 0."""
    return mask.int().argmax(dim=1)


def take(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the positions `index` `[B, S]` of `[B, T]` or `[B, T, d]`."""
    return states.gather(1, index if states.dim() == 2 else index[..., None].expand(-1, -1, states.shape[2]))


def first_token(states: torch.Tensor, mask: torch.Tensor | None, parts: Parts = WHOLE) -> torch.Tensor:
    """Return the first position of `[B, T, d]` that the mask keeps, `[B, d]`."""
    first = states[:, 0] if mask is None else take(states, first_position(mask)[:, None])[:, 0]
    return parts.first(first, mask)


def last_token(states: torch.Tensor, mask: torch.Tensor | None, parts: Parts = WHOLE) -> torch.Tensor:
    """Return the last position of `[B, T, d]` that the mask keeps, `[B, d]`; the last of all where it keeps none."""
    if mask is None:
        return parts.last(states[:, -1], mask)
    position = states.shape[1] - 1 - first_position(mask.flip(1))
    return parts.last(take(states, position[:, None])[:, 0], mask)


def without_first(states: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `[B, T, ...]` without the first position that the mask keeps, `[B, T - 1, ...]`."""
    if states is None or mask is None:
        return states if states is None else states[:, 1:]
    index = torch.arange(mask.shape[1] - 1, device=mask.device)
    return take(states, index + (index >= first_position(mask)[:, None]).long())


def masked_mean(states: torch.Tensor, mask: torch.Tensor | None, parts: Parts = WHOLE) -> torch.Tensor:
    """Return the mean over the rows of `[B, T, d]` that the mask `[B or 1, T]` keeps; 0 where it keeps none."""
    if mask is None:
        return parts.mean(states)
    kept, count = states.masked_fill(~mask[..., None], 0.0).sum(dim=1), mask.sum(dim=1, keepdim=True)
    return parts.total(kept) / parts.total(count).clamp(min=1)
