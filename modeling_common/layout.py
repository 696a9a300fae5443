"""Layouts: the positions of the tokens of a batch.

A model chooses one of two classes once, and its layers only call methods, which both classes have: `PaddedLayout` has
one sequence per row, and `PaddingFreeLayout` (`padding_free.py`) has all sequences in one row. They are NamedTuples,
because Accelerate's hooks move the tensors inside tuples.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from luna_mega.kernels.for_models import take_columns
from luna_mega.modeling_common.cache import StateCache
from luna_mega.modeling_common.masks import can_look
from luna_mega.modeling_common.padding_free import PaddingFreeLayout


class PaddedLayout(NamedTuple):
    """One sequence per row, `[B, T]`. S is the number of sequences.

    Args:
        mask: `[B, T]` bool, True = keep; None = all.
        columns: `[B, T]`, the column of the batch in each column of the layout; None = the same.
        back: `[B, T]`, the column of the layout for each column of the batch.
        lengths: `[B]`, how many of the T columns of each row are new tokens, with a filled cache; None = all.
    """

    mask: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    back: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def has_rows(self) -> bool:
        """Return whether every row of the batch is one sequence."""
        return True

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that specify the layout in an op."""
        return {"mask": self.mask}

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[B, T, ...]` of the batch in the layout."""
        return x if self.columns is None else take_columns(x, self.columns)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states of layers as `[B, T, ...]` of the batch."""
        return x if self.back is None else take_columns(x, self.back)

    def scatter_weights(self, weights: torch.Tensor, *dims: int) -> torch.Tensor:
        """Return attention weights with the columns of the batch in the dimensions `dims`."""
        if (back := self.back) is None:
            return weights
        for dim in dims:
            shape = [1] * weights.dim()
            shape[0], shape[dim] = back.shape
            weights = weights.gather(dim, back.view(shape).expand(*weights.shape))
        return weights

    def clear_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[B, T, ...]` with zeros at padding."""
        return x if self.mask is None else x.masked_fill(~self.mask[..., None], 0.0)

    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        """Return S and the length of the longest sequence."""
        return x.shape[0], x.shape[1]

    def counts(self) -> torch.Tensor | None:
        """Return the number of tokens of each sequence, `[S, 1]`; None = all are kept."""
        return None if self.mask is None else self.mask.sum(dim=1, keepdim=True)

    def start(self) -> torch.Tensor | None:
        """Return the position of the first column, `[B]`: negative if padding precedes the first token; None = 0."""
        return None if self.mask is None or self.columns is not None else -self.mask.int().argmax(dim=1)

    def positions(self, x: torch.Tensor) -> torch.Tensor:
        """Return the position of every token of the batch `x`, in the layout: the number of kept tokens before it."""
        if self.mask is None:
            return torch.arange(x.shape[1], device=x.device)[None]
        return (self.mask.cumsum(dim=1) - 1).clamp(min=0)

    def columns_from(self, start: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """Return the position of every column of `x`, `[B or 1, T]`; `start` `[S]` is the position of the first one."""
        columns = torch.arange(x.shape[1], device=x.device)[None]
        return columns if start is None else columns + start[:, None]

    def spread(self, factors: torch.Tensor, length: int) -> torch.Tensor:
        """Return the factors `[S, width]` of each sequence at all its positions, `[B, 1 or T, width]`."""
        return factors[:, None]

    def drop_features(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        """Return `[B, T, d]` after dropout of channels, at all positions of a sequence."""
        return nn.functional.dropout1d(x.transpose(1, 2), probability).transpose(1, 2)

    def key_rows(self) -> dict[str, Any]:
        """Return the fields of a `KeyWindow` that describe the rows of its keys."""
        return {"mask": self.mask, "start": self.start()}


NO_PADDING = PaddedLayout()
Layout = PaddedLayout | PaddingFreeLayout


def move_kept(mask: torch.Tensor, right: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how the positions that a bool mask `[B, T]` keeps move to the beginning of their rows, or to the end.

    Returns:
        For every new column the old one, for every old column the new one, and the new mask, `[B, T]` each.
    """
    kept, column = mask.cumsum(dim=1), torch.arange(mask.shape[1], device=mask.device)
    count = kept[:, -1:]
    first = mask.shape[1] - count if right else torch.zeros_like(count)  # the column of the first position kept
    others = column - kept + (0 if right else count)
    back = torch.where(mask, first + kept - 1, others)
    columns = torch.zeros_like(back).scatter(1, back, column.expand(*back.shape))
    return columns, back, (column >= first) & (column < first + count)


def close_gaps(mask: torch.Tensor | None, cache: StateCache | None = None) -> PaddedLayout:
    """Return the layout in which the positions that a bool mask `[B, T]` keeps are contiguous.

    Moving averages, relative biases and chunks would count dropped columns between tokens. Therefore dropped columns
    move to the end of their rows, or to the beginning if `cache` is empty.

    On a CPU, columns only move if necessary. On other devices columns always move, which costs less than waiting for
    the values of the mask.
    """
    if mask is None:
        return NO_PADDING
    is_first_call = cache is None or not cache.get_seq_length()
    lengths = None if is_first_call else mask.sum(dim=1)
    if mask.shape[1] == 1 or (can_look(mask) and _is_closed(mask, cache is not None, is_first_call)):
        return PaddedLayout(mask, lengths=lengths)
    columns, back, mask = move_kept(mask, right=cache is not None and is_first_call)
    return PaddedLayout(mask, columns, back, lengths)


def _is_closed(mask: torch.Tensor, cached: bool, is_first_call: bool) -> bool:
    """Return whether the tokens need not move: they are contiguous or, with a cache, on one side of the row.

    With a cache, tokens are on the right in the first call and on the left in later calls.
    """
    earlier, later = mask[:, :-1], mask[:, 1:]
    if cached:
        return not (later < earlier if is_first_call else later > earlier).any()
    return bool(((later > earlier).sum(dim=1) + mask[:, 0] <= 1).all())
