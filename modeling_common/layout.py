"""`TokenLayout`: where the tokens of a batch are. transformers' words for sequences laid end to end end here.

A batch `[B, T]` is dense, one sequence a row, filled up with padding that a mask excludes; or it is ragged: its
sequences are laid end to end, `[1, total, ...]`, and nothing is computed for padding. Layers, norms, dropout and
pooling take a layout in place of a mask, and ops its `options`.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from luna_mega.kernels.gated_attention.alignment import rotation, take
from luna_mega.kernels.ragged import check, locate
from luna_mega.modeling_common.cache import StateCache
from luna_mega.modeling_common.masks import can_look, is_program
from luna_mega.modeling_common.sequence_parts import WHOLE, Parts

# Keyword arguments that tell how sequences are laid end to end, as `DataCollatorWithFlattening` makes them.
RAGGED_OPTIONS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


class TokenLayout(NamedTuple):
    """A dense batch with its mask, or the bounds of ragged sequences.

    It is a tuple because libraries that spread a model over devices move the tensors of tuples.

    Args:
        mask: `[B, T]` bool, True = keep, of a dense batch; None = all are kept.
        cu_seqlens: `[S + 1]`, the bounds of S ragged sequences; None = dense.
        max_seqlen: the length of the longest of them.
        places: `[total]`, the places of their tokens in the batch flattened; None = all places in their order.
        shape: `(B, T)` of the batch that was made ragged.
        parts: the part of a dense batch's sequences that the T positions are.
        unpadded: whether the ragged sequences are the rows of a batch, whose padding was removed.
        columns: `[B, T]`, the column of the batch that each column of a dense layout is; None = they are the same.
        back: `[B, T]`, the column of the layout that each column of the batch is.
        lengths: `[B]`, how many positions continue each sequence of a filled cache; None = all.
    """

    mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int = 0
    places: torch.Tensor | None = None
    shape: tuple[int, int] = (0, 0)
    parts: Parts = WHOLE
    unpadded: bool = False
    columns: torch.Tensor | None = None
    back: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def is_ragged(self) -> bool:
        """Return whether sequences are laid end to end."""
        return self.cu_seqlens is not None

    def has_rows(self) -> bool:
        """Return whether every row of the batch is one sequence."""
        return self.cu_seqlens is None or self.unpadded

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that an op takes the layout by."""
        return {"mask": self.mask, **self.parts.options()} if self.cu_seqlens is None else self.bounds()

    def bounds(self) -> dict[str, Any]:
        """Return the keyword arguments of an op that needs nothing but the bounds of ragged sequences."""
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens, "max_seqlen": self.max_seqlen}

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[B, T, ...]` as layers take it: as it is, or `[1, total, ...]`."""
        if self.cu_seqlens is None:
            return x if self.columns is None else take(x, self.columns)
        x = x.flatten(0, 1)
        return (x if self.places is None else x[self.places])[None]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return what layers made as `[B, T, ...]`, with zeros where no token of a ragged sequence was."""
        if self.cu_seqlens is None:
            return x if self.back is None else take(x, self.back)
        if self.places is None:
            return x[0].unflatten(0, self.shape)
        batch, length = self.shape
        rows = x.new_zeros(batch * length, *x.shape[2:])
        return rows.index_copy(0, self.places, x[0]).unflatten(0, self.shape)

    def scatter_weights(self, weights: torch.Tensor, *dims: int) -> torch.Tensor:
        """Return attention weights whose dimensions `dims` are columns of the layout, with those of the batch."""
        for dim in dims if self.back is not None else ():
            shape = [1] * weights.dim()
            shape[0], shape[dim] = self.back.shape
            weights = weights.gather(dim, self.back.view(shape).expand(*weights.shape))
        return weights

    def clear_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[B, T, ...]` with zeros at padding."""
        return x if self.mask is None else x.masked_fill(~self.mask[..., None], 0.0)

    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        """Return the number of sequences in `x` `[B, T, ...]` or `[1, total, ...]`, and the length of the longest."""
        if self.cu_seqlens is None:
            return x.shape[0], self.parts.length(x)
        return len(self.cu_seqlens) - 1, self.max_seqlen

    def counts(self) -> torch.Tensor | None:
        """Return how many tokens each sequence has, `[B, 1]`; None = all are kept."""
        return self.parts.counts(self.mask) if self.cu_seqlens is None else self.cu_seqlens.diff()[:, None]

    def start(self) -> torch.Tensor | None:
        """Return the position of the first column in each sequence, `[B]`: below 0 where padding comes first.

        In a later shard it is how far the sequence has got. None = every sequence begins in the first column.
        """
        moved = self.columns is not None and self.parts.is_whole()
        return None if moved else self.parts.start(self.mask)

    def positions(self, x: torch.Tensor) -> torch.Tensor:
        """Return the position of every token of `x`, `[B or 1, T]` or `[1, total]`, which counts those kept before."""
        if self.cu_seqlens is not None:
            return self.locate(x.shape[1])[1][None]
        if self.mask is None:
            return self.parts.number(torch.arange(x.shape[1], device=x.device)[None])
        return self.parts.number(self.mask.cumsum(dim=1) - 1).clamp(min=0)

    def spread(self, factors: torch.Tensor, length: int) -> torch.Tensor:
        """Return random factors of sequences, `[sequences, width]`, for their positions: `[B, 1 or T, width]`."""
        if self.cu_seqlens is not None:
            return factors[self.locate(length)[0]][None]
        return self.parts.agree(factors)[:, None]

    def reach(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, "TokenLayout", torch.Tensor | None, int]:
        """Return keys and values of whole sequences, their layout and start, and the column of the first query here.

        This is the only exchange that grows with the length.
        """
        key, value = self.parts.reach(key, value)
        offset, mask, start = self.parts.offset(), self.parts.mask(), self.start() - self.parts.offset()
        if mask is not None:
            # The positions of all shards follow each other, and those of this one begin in the column `offset`.
            columns, _, mask = align(mask)
            shift = rotation(start, mask.shape[1])
            columns, mask = columns.gather(1, shift), mask.gather(1, shift)
            key, value = take(key, columns), take(value, columns)
        return key, value, TokenLayout(mask), start, offset

    def locate(self, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequence of every ragged token and its position in there, `[total]` each."""
        assert self.cu_seqlens is not None  # dense tokens are where their columns are
        return locate(self.cu_seqlens, total)


DENSE = TokenLayout()  # no padding


def align(mask: torch.Tensor, right: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def lay_dense(mask: torch.Tensor | None, past: StateCache | None = None) -> TokenLayout:
    """Return the dense layout in which the positions that a bool mask `[B, T]` keeps follow each other.

    A moving average, a relative bias and a chunk continue over columns. Columns that the mask drops between others
    would count, so they move to the end of their rows, where nothing follows; without a position so far in the cache
    `past` to the beginning, where nothing precedes.

    A mask whose values are free to look at may turn out to need no move. Elsewhere the columns move in any case, which
    costs less than waiting for the device.
    """
    if mask is None:
        return DENSE
    begins = past is None or not past.get_seq_length()
    lengths = None if begins else mask.sum(dim=1)
    if mask.shape[1] == 1 or (can_look(mask) and _is_aligned(mask, past is not None, begins)):
        return TokenLayout(mask, lengths=lengths)
    columns, back, mask = align(mask, right=past is not None and begins)
    return TokenLayout(mask, columns=columns, back=back, lengths=lengths)


def _is_aligned(mask: torch.Tensor, cached: bool, begins: bool) -> bool:
    """Return whether the positions that `mask` keeps are where `lay_dense` puts them, or without a cache together."""
    earlier, later = mask[:, :-1], mask[:, 1:]
    if cached:
        return not (later < earlier if begins else later > earlier).any()
    return bool(((later > earlier).sum(dim=1) + mask[:, 0] <= 1).all())


def find_layout(
    shape: tuple[int, int],
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    options: dict[str, Any],
    unpad: bool,
) -> TokenLayout:
    """Return the layout of a batch `[B, T]` with a bool mask.

    A batch is ragged where `options` has the `cu_seq_lens_q` or the `seq_idx` of `DataCollatorWithFlattening`, or where
    `position_ids` do not rise within a row. With `unpad` a batch that is not loses the padding that `mask` tells,
    unless there is nothing else: ops need a token. Compiled programs look at `cu_seq_lens_q` alone, as the others are
    values.

    Raises:
        ValueError: `cu_seq_lens_q` does not rise from 0 to B T, or another argument contradicts it.
    """
    cu_seqlens, starts = _bounds(options), None
    if not is_program():
        if options.get("seq_idx") is not None:
            check_seq_idx(options["seq_idx"], shape)
            starts = options["seq_idx"].diff(dim=1) != 0
        elif position_ids is not None:
            starts = position_ids.diff(dim=1) <= 0
    if cu_seqlens is not None:
        longest = check("a ragged batch", cu_seqlens, options.get("max_length_q"), shape[0] * shape[1])
        if starts is not None and starts.device.type == "cpu" and (starts != _starts(cu_seqlens, shape)[:, 1:]).any():
            raise ValueError("seq_idx or position_ids tell other sequences than cu_seq_lens_q: leave out what is wrong")
        return TokenLayout(None, cu_seqlens, longest, None, (shape[0], shape[1]))
    if starts is not None and starts.any():
        return _lay_end_to_end(mask, nn.functional.pad(starts, (1, 0), value=True).expand(shape))
    if unpad and mask is not None and not is_program() and mask.any():
        first = torch.arange(shape[1], device=mask.device).expand(shape) == 0
        return _lay_end_to_end(mask, first)._replace(unpadded=True)
    return TokenLayout(mask)


def check_seq_idx(seq_idx: torch.Tensor, shape: tuple[int, int]) -> None:
    """Raise `ValueError` unless `seq_idx` has an integer for every position of a batch `[B, T]`."""
    if not isinstance(seq_idx, torch.Tensor) or seq_idx.is_floating_point() or seq_idx.shape != tuple(shape):
        found = f"{list(seq_idx.shape)} of {seq_idx.dtype}" if isinstance(seq_idx, torch.Tensor) else type(seq_idx)
        raise ValueError(f"`seq_idx` must be integers of the shape {list(shape)} of the input, got {found}")


def find_starts(shape: tuple[int, int], inputs: dict[str, Any], options: dict[str, Any]) -> torch.Tensor | None:
    """Return `[B, T]` bool, True = the first token of a sequence, for the arguments of a padding-free batch, or None.

    Args:
        shape: `(B, T)`.
        inputs, options: the arguments of a `forward`, of which `position_ids` is in either.
    """
    if options.get("cu_seq_lens_q") is not None:
        return _starts(options["cu_seq_lens_q"], shape)
    if is_program():
        return None
    positions = inputs.get("position_ids", options.get("position_ids"))
    if options.get("seq_idx") is not None:
        starts = options["seq_idx"].diff(dim=1) != 0
    elif positions is not None and inputs.get("attention_mask") is None:
        starts = positions.view(-1, positions.shape[-1]).diff(dim=1) <= 0
    else:
        return None
    return nn.functional.pad(starts, (1, 0), value=True).expand(shape) if starts.any() else None


def _bounds(options: dict[str, Any]) -> torch.Tensor | None:
    """Return `cu_seq_lens_q` or None, and refuse other bounds of keys, and lengths without bounds."""
    cu_seqlens, longest = options.get("cu_seq_lens_q"), options.get("max_length_q")
    others = {name: options.get(name) for name in ("cu_seq_lens_k", "max_length_q", "max_length_k")}
    if cu_seqlens is None:
        if named := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{', '.join(named)} without cu_seq_lens_q: pass that as well, or leave them out")
        return None
    keys = others["cu_seq_lens_k"]
    if keys is not None and keys is not cu_seqlens:
        told = can_look(keys) and can_look(cu_seqlens)
        if keys.shape != cu_seqlens.shape or (told and (keys != cu_seqlens).any()):
            raise ValueError("cu_seq_lens_k differs from cu_seq_lens_q, but tokens attend to their own sequence")
    if (keys := others["max_length_k"]) not in (None, longest):
        raise ValueError(f"max_length_k is {keys} and max_length_q {longest}, but tokens attend to their own sequence")
    return cu_seqlens


def _starts(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return `[B, T]` bool, True where a sequence begins."""
    starts = cu_seqlens.new_zeros(shape[0] * shape[1] + 1, dtype=torch.bool)
    return starts.index_fill(0, cu_seqlens.long(), True)[:-1].view(shape)


def _lay_end_to_end(mask: torch.Tensor | None, starts: torch.Tensor) -> TokenLayout:
    """Return the ragged layout of the tokens that `mask` `[B, T]` keeps; `starts` `[B, T]` is True where one begins.

    This waits for the device, which counts the tokens.
    """
    sequence, places = starts.flatten().cumsum(dim=0) - 1, None
    count = int(sequence[-1]) + 1
    if mask is not None:
        places = mask.flatten().nonzero()[:, 0]
        sequence = sequence[places]
    lengths = torch.bincount(sequence, minlength=count)
    cu_seqlens = nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return TokenLayout(None, cu_seqlens, int(lengths.max()), places, (starts.shape[0], starts.shape[1]))
