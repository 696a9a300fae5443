"""Padding-free batches: the arguments of transformers' collator, and the layout of all sequences in one row."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from luna_mega.kernels.for_models import COMPILED, check_cu_seqlens, checked_copy, forbid_capture, locate, mode
from luna_mega.modeling_common.masks import can_look

# Keyword arguments of a padding-free batch, as `DataCollatorWithFlattening` returns them.
VARLEN_OPTIONS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


class PaddingFreeLayout(NamedTuple):
    """S sequences in one row, `[1, total]`, without padding; `PaddedLayout` documents the methods.

    Args:
        cu_seqlens: `[S + 1]`, the bounds of the sequences.
        max_seqlen: the length of the longest sequence.
        places: `[total]`, the index of each token in the flattened batch; None = the same.
        shape: `(B, T)` of the batch.
        unpadded: whether each sequence was one row of the batch, see `unpad`.
        mask, lengths: None, because every position is a token.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    places: torch.Tensor | None = None
    shape: tuple[int, int] = (0, 0)
    unpadded: bool = False
    mask: None = None
    lengths: None = None

    def has_rows(self) -> bool:
        return self.unpadded

    def options(self) -> dict[str, Any]:
        return {"cu_seqlens": self.cu_seqlens, "max_seqlen": self.max_seqlen}

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)
        return (x if self.places is None else x[self.places])[None]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[1, total, ...]` as `[B, T, ...]`, with zeros at positions without a token."""
        if self.places is None:
            return x[0].unflatten(0, self.shape)
        batch, length = self.shape
        rows = x.new_zeros(batch * length, *x.shape[2:])
        return rows.index_copy(0, self.places, x[0]).unflatten(0, self.shape)

    def scatter_weights(self, weights: torch.Tensor, *dims: int) -> torch.Tensor:
        return weights

    def clear_padding(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        return len(self.cu_seqlens) - 1, self.max_seqlen

    def counts(self) -> torch.Tensor:
        return self.cu_seqlens.diff()[:, None]

    def start(self) -> None:
        return None

    def positions(self, x: torch.Tensor) -> torch.Tensor:
        total = self.shape[0] * self.shape[1] if self.places is None else len(self.places)
        return locate(self.cu_seqlens, total)[1][None]

    def columns_from(self, start: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        return locate(self.cu_seqlens, x.shape[1])[1][None]  # without a cache `start` is None

    def spread(self, factors: torch.Tensor, length: int) -> torch.Tensor:
        return factors[locate(self.cu_seqlens, length)[0]][None]

    def drop_features(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        factors = x.new_ones(len(self.cu_seqlens) - 1, x.shape[2])
        return x * self.spread(nn.functional.dropout(factors, probability), x.shape[1])

    def key_rows(self) -> dict[str, Any]:
        return {"varlen": (self.cu_seqlens, self.max_seqlen)}


# The fix in errors of `forbid_capture`.
BOUNDS = "omit it, or pass `cu_seq_lens_q` and `max_length_q`"


def find_padding_free(
    shape: tuple[int, int], mask: torch.Tensor | None, position_ids: torch.Tensor | None, options: Mapping[str, Any]
) -> PaddingFreeLayout | None:
    """Return the layout of a padding-free batch `[B, T]`; None = the batch is padded.

    A batch is padding-free if `options` contains `cu_seq_lens_q` or `seq_idx`, or if `position_ids` do not increase
    within a row. Compiled programs only read `cu_seq_lens_q`: boundaries in other arguments depend on their values.

    Raises:
        ValueError: `cu_seq_lens_q` does not increase from 0 to B T, or another argument contradicts it.
    """
    cu_seqlens, starts = _bounds(options), _next_starts(shape, position_ids, options)
    if cu_seqlens is None and starts is not None:
        forbid_capture(starts, "`seq_idx` or `position_ids`, whose values are the boundaries of sequences", BOUNDS)
    if cu_seqlens is not None:
        total = shape[0] * shape[1]
        longest = check_cu_seqlens("a padding-free batch", cu_seqlens, options.get("max_length_q"), total)
        if starts is not None and starts.device.type == "cpu" and (starts != _starts(cu_seqlens, shape)[:, 1:]).any():
            raise ValueError(
                "`seq_idx` or `position_ids` and `cu_seq_lens_q` disagree about sequence boundaries; pass only one"
            )
        bounds = checked_copy(cu_seqlens, longest, total)
        return PaddingFreeLayout(bounds, longest, None, (shape[0], shape[1]))
    if starts is not None and starts.any():
        return _flatten(mask, nn.functional.pad(starts, (1, 0), value=True).expand(shape))
    return None


def unpad(mask: torch.Tensor | None) -> PaddingFreeLayout | None:
    """Return the layout of the tokens that a bool mask `[B, T]` keeps; None = the batch remains padded.

    A batch without any kept token remains padded, because ops require a token.
    """
    if mask is None or mode() >= COMPILED:
        return None
    forbid_capture(mask, "unpad_inputs, whose size depends on the mask", BOUNDS)
    if not mask.any():
        return None
    first = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape) == 0
    return _flatten(mask, first)._replace(unpadded=True)


def _next_starts(
    shape: tuple[int, int], position_ids: torch.Tensor | None, options: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return `[..., T - 1]` bool, True = the next position starts a sequence; None if no argument marks sequences.

    Compiled programs return None. Raise `ValueError` unless `seq_idx` has an integer for every position.
    """
    if mode() >= COMPILED:
        return None
    if (seq_idx := options.get("seq_idx")) is not None:
        if not isinstance(seq_idx, torch.Tensor) or seq_idx.is_floating_point() or seq_idx.shape != tuple(shape):
            actual = f"{list(seq_idx.shape)} of {seq_idx.dtype}" if isinstance(seq_idx, torch.Tensor) else type(seq_idx)
            raise ValueError(f"`seq_idx` must be integers of the shape {list(shape)} of the input, got {actual}")
        return seq_idx.diff(dim=1) != 0
    return None if position_ids is None else position_ids.diff(dim=-1) <= 0


def find_starts(shape: tuple[int, int], arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """Return `[B, T]` bool, True = the first token of a sequence of a padding-free batch, or None for another batch.

    `shape` is `(B, T)`, and `arguments` are those of a `forward`.
    """
    if arguments.get("cu_seq_lens_q") is not None:
        return _starts(arguments["cu_seq_lens_q"], shape)
    position_ids = arguments.get("position_ids") if arguments.get("attention_mask") is None else None
    starts = _next_starts(shape, position_ids, arguments)
    if starts is None or not starts.any():
        return None
    return nn.functional.pad(starts, (1, 0), value=True).expand(shape)


def _bounds(options: Mapping[str, Any]) -> torch.Tensor | None:
    """Return `cu_seq_lens_q` or None.

    Raise `ValueError` if the bounds of keys differ, or if lengths are given without bounds.
    """
    cu_seqlens, longest = options.get("cu_seq_lens_q"), options.get("max_length_q")
    others = {name: options.get(name) for name in ("cu_seq_lens_k", "max_length_q", "max_length_k")}
    if cu_seqlens is None:
        if named := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"`cu_seq_lens_q` is missing; pass it with {', '.join(named)}, or omit them")
        return None
    keys = others["cu_seq_lens_k"]
    if keys is not None and keys is not cu_seqlens:
        comparable = can_look(keys) and can_look(cu_seqlens) and keys.shape == cu_seqlens.shape
        if keys.shape != cu_seqlens.shape or (comparable and (keys != cu_seqlens).any()):
            raise ValueError("`cu_seq_lens_k` differs from `cu_seq_lens_q`; pass the same, as in self-attention")
    if (longest_key := others["max_length_k"]) not in (None, longest):
        raise ValueError(f"`max_length_k` is {longest_key}, but `max_length_q` is {longest}; pass the same")
    return cu_seqlens


def _starts(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a bool tensor `[B, T]` that is True at the first token of each sequence."""
    starts = cu_seqlens.new_zeros(shape[0] * shape[1] + 1, dtype=torch.bool)
    return starts.index_fill(0, cu_seqlens.long(), True)[:-1].view(shape)


def _flatten(mask: torch.Tensor | None, starts: torch.Tensor) -> PaddingFreeLayout:
    """Return the layout of the unmasked tokens; `starts` `[B, T]` marks the first token of each sequence.

    This waits for the device, which counts the tokens.
    """
    sequence, places = starts.flatten().cumsum(dim=0) - 1, None
    count = int(sequence[-1]) + 1
    if mask is not None:
        places = mask.flatten().nonzero()[:, 0]
        sequence = sequence[places]
    lengths = torch.bincount(sequence, minlength=count)
    cu_seqlens = nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return PaddingFreeLayout(cu_seqlens, int(lengths.max()), places, (starts.shape[0], starts.shape[1]))
