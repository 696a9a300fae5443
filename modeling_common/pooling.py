"""Reductions over the positions of sequences: first and last token, mean, and losses.

Masks are bool, `[B, T]`, True = keep; None = all. With context parallelism, states and masks belong to shards, and
`reductions` returns the results of the complete sequences.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from luna_mega.kernels.gated_attention.columns import take_columns
from luna_mega.kernels.upcast import upcast, upcast_dtype

Loss = Callable[..., torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


class Reductions:
    """Reductions over the positions of complete sequences `[B, T, ...]`."""

    def is_local(self) -> bool:
        """Return whether the sequences are complete."""
        return True

    def require_complete(self, message: str) -> None:
        """Raise `ValueError` unless the sequences are complete."""

    def offset(self) -> int:
        """Return the number of columns before the first one."""
        return 0

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all shards."""
        return x

    def dropout(self, dropout: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, which is the same for all shards, after the same dropout for all."""
        return dropout(x)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return labels or a mask `[B, T]` of the complete sequences."""
        return x

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over all positions of `[B, T, d]`, at least in float32."""
        return x.mean(dim=1, dtype=upcast_dtype(x))

    def first(self, first: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the first token of each sequence from the first tokens `[B, d]` and masks `[B, T]` of the shards."""
        return first

    def last(self, last: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the last token of each sequence from the last tokens `[B, d]` and masks `[B, T]` of the shards."""
        return last

    def mean_loss(self, loss_function: Loss, counted: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Return the mean loss over the labels `counted` that are not -100.

        `loss_function` is one of transformers', which divide by `num_items_in_batch` if it is given.
        """
        return loss_function(**arguments)

    def position_loss(
        self, loss_function: Loss, logits: Pair, positions: Pair, mask: torch.Tensor | None, **arguments: Any
    ) -> torch.Tensor:
        """Return the mean cross-entropy of the two labels `positions`, `[B]` each, for the two `logits` `[B, T]`.

        Labels after the end of the sequences, or at positions that the bool `mask` `[B, T]` drops, are ignored.
        """
        logits = upcast(logits[0]), upcast(logits[1])
        if mask is not None:
            length = mask.shape[1]
            padded = nn.functional.pad(mask, (0, 1))
            first, second = (
                x.masked_fill(~padded.gather(1, x.clamp(0, length)[:, None])[:, 0], length) for x in positions
            )
            positions = first, second
        return loss_function(*logits, *positions, **arguments)


LOCAL = Reductions()


def first_position(mask: torch.Tensor) -> torch.Tensor:
    """Return the position of the first token that the mask keeps, `[B]`: with padding on the left it is not 0."""
    return mask.int().argmax(dim=1)


def first_token(states: torch.Tensor, mask: torch.Tensor | None, reductions: Reductions = LOCAL) -> torch.Tensor:
    """Return the first position of `[B, T, d]` that the mask keeps, `[B, d]`."""
    first = states[:, 0] if mask is None else take_columns(states, first_position(mask)[:, None])[:, 0]
    return reductions.first(first, mask)


def last_token(states: torch.Tensor, mask: torch.Tensor | None, reductions: Reductions = LOCAL) -> torch.Tensor:
    """Return the last position of `[B, T, d]` that the mask keeps, `[B, d]`; the last of all if it keeps none."""
    if mask is None:
        return reductions.last(states[:, -1], mask)
    position = states.shape[1] - 1 - first_position(mask.flip(1))
    return reductions.last(take_columns(states, position[:, None])[:, 0], mask)


def without_first(states: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `[B, T, ...]` without the first position that the mask keeps, `[B, T - 1, ...]`."""
    if states is None or mask is None:
        return states if states is None else states[:, 1:]
    index = torch.arange(mask.shape[1] - 1, device=mask.device)
    return take_columns(states, index + (index >= first_position(mask)[:, None]).long())


def masked_mean(states: torch.Tensor, mask: torch.Tensor | None, reductions: Reductions = LOCAL) -> torch.Tensor:
    """Return the mean over the rows of `[B, T, d]` that the mask `[B or 1, T]` keeps; 0 if it keeps none.

    Half precision cannot represent the sums of long sequences.
    """
    if mask is None:
        return reductions.mean(states).to(states.dtype)
    kept = states.masked_fill(~mask[..., None], 0.0).sum(dim=1, dtype=upcast_dtype(states))
    count = reductions.total(mask.sum(dim=1, keepdim=True)).clamp(min=1)
    return (reductions.total(kept) / count).to(states.dtype)
