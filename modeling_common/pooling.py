"""First and last token, and mean over the positions of sequences. Masks are bool `[B, T]`, True = keep; None = all."""

import torch

from luna_mega.kernels.support import take_columns, upcast_dtype


def first_position(mask: torch.Tensor) -> torch.Tensor:
    """Return the position of the first token that the mask keeps, `[B]`: with padding on the left it is not 0."""
    return mask.int().argmax(dim=1)


def first_token(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the first position of `[B, T, d]` that the mask keeps, `[B, d]`."""
    return states[:, 0] if mask is None else take_columns(states, first_position(mask)[:, None])[:, 0]


def last_token(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the last position of `[B, T, d]` that the mask keeps, `[B, d]`; the last of all if it keeps none."""
    if mask is None:
        return states[:, -1]
    position = states.shape[1] - 1 - first_position(mask.flip(1))
    return take_columns(states, position[:, None])[:, 0]


def without_first(states: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `[B, T, ...]` without the first position that the mask keeps, `[B, T - 1, ...]`."""
    if states is None or mask is None:
        return states if states is None else states[:, 1:]
    index = torch.arange(mask.shape[1] - 1, device=mask.device)
    return take_columns(states, index + (index >= first_position(mask)[:, None]).long())


def masked_mean(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean over the rows of `[B, T, d]` that the mask `[B or 1, T]` keeps; 0 if it keeps none.

    Half precision cannot represent the sums of long sequences.
    """
    if mask is None:
        return states.mean(dim=1, dtype=upcast_dtype(states)).to(states.dtype)
    kept = states.masked_fill(~mask[..., None], 0.0).sum(dim=1, dtype=upcast_dtype(states))
    return (kept / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(states.dtype)
