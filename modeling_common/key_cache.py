"""Memory of attention between calls: keys and values, of constant size where attention is in chunks."""

from typing import NamedTuple

import torch
from torch import nn

from luna_mega.kernels.gated_attention.alignment import rotation, take
from luna_mega.modeling_common.cache import StateLayer
from luna_mega.modeling_common.layout import TokenLayout


class Reach(NamedTuple):
    """The keys `[B, S, Z]` and values `[B, S, V]` that new positions attend to, among them their own.

    `mask` `[B, S]`: None = all. `start` `[B]`: the position of the first key; None = 0, or the first of a chunk.
    `column` `[B]`: the column of a single new position, None = the last. `layout`: of ragged sequences `[1, S, ...]`,
    which begin with a chunk, and the places of the new positions in them. `slots` `[B]`: the rows of keys and values
    that belong to the sequences, None = there are no others.
    """

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None
    start: torch.Tensor | None = None
    column: torch.Tensor | None = None
    layout: TokenLayout | None = None
    slots: torch.Tensor | None = None


class KeyLayer(StateLayer):
    """The keys and values that the attention of one block can still reach, over B sequences.

    `keys` `[B, S, Z]`, `values` `[B, S, V]`, `mask` `[B, S]`: position p of a sequence is in column p, or with chunks,
    whose size is S, in column p modulo S. Dropped tokens have no position. Columns after the last position have no
    meaning. `position` `[B]`: the number of positions so far.
    """

    # `_even`: no sequence has had padding so far, so that all are at one position, a number. `_owned`: nobody else has
    # the tensors, which may be written in place. `_used`: the columns that are in use.
    __slots__ = ("_even", "_owned", "_used")

    def reset(self):
        """Forget everything."""
        super().reset()
        self._even, self._owned = True, False

    def extend(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, chunk_size: int | None
    ) -> Reach:
        """Add keys, values and mask (None: all are kept) of T positions, and return what these attend to."""
        exporting = torch.compiler.is_exporting()
        self._even = even = mask is None and not exporting and getattr(self, "_even", False)
        if not even and mask is None:
            mask = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        # Programs are to have no inputs that change, and autograd needs what it has seen unchanged.
        tensors = (keys, values) if self.keys is None else (keys, values, self.keys)
        records = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if keys.shape[1] == 1 and not records and not exporting:
            return self._write_even(keys, values, chunk_size) if even else self._write(keys, values, mask, chunk_size)
        self._owned = not records
        if even:
            return self._extend_even(keys, values, chunk_size)
        return self._extend(keys, values, mask, chunk_size)

    def start(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the position of the next column in each sequence, `[B]`: below 0 where padding comes first.

        `mask` `[B, T]` is that of the next columns, None = all are kept. The result None means 0.
        """
        if mask is None:
            return self.position
        first = mask.int().argmax(dim=1)
        return -first if self.position is None else torch.where(self.position > 0, self.position, -first)

    def _write_even(self, keys, values, chunk_size):
        """Write one position of all sequences into the same column."""
        column = self.seen if chunk_size is None else self.seen % chunk_size
        self._make_room(keys, values, column + 1, chunk_size)
        self.keys[:, column : column + 1] = keys
        self.values[:, column : column + 1] = values
        self.store(1, position=self.position + 1)
        self._used = column + 1
        return Reach(self.keys[:, : column + 1], self.values[:, : column + 1])

    def _write(self, keys, values, mask, chunk_size):
        """Write one position of each sequence into the column that is next for it."""
        self._make_room(keys, values, self.seen + 1, chunk_size)
        row, position = torch.arange(len(keys), device=keys.device), self.position
        column = position if chunk_size is None else position % chunk_size
        for buffer, new in ((self.keys, keys), (self.values, values), (self.mask, mask)):
            buffer[row, column] = new[:, 0]
        count = self.seen + 1
        self.store(1, position=position + mask[:, 0])
        if chunk_size is not None:
            # Looking at the columns is free on a CPU; elsewhere, and in programs, all are read.
            free = keys.device.type == "cpu" and not torch.compiler.is_compiling()
            count = int(column.max()) + 1 if free else chunk_size
        self._used = count
        return Reach(*(x[:, :count] for x in (self.keys, self.values, self.mask)), None, column)

    def _make_room(self, keys, values, columns, chunk_size):
        """Make the buffers at least `columns` wide: as wide as a chunk, or twice their width whenever they grow."""
        columns = chunk_size or columns
        if self.keys is None:
            self.position = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
            old = (keys[:, :0], values[:, :0], keys.new_empty(len(keys), 0, dtype=torch.bool))
        else:
            owned = getattr(self, "_owned", False)
            if owned and not torch.compiler.is_compiling():  # which knows no inference mode
                owned = self.keys.is_inference() == keys.is_inference()
            if owned and self.keys.shape[1] >= columns:
                return
            old = (self.keys, self.values, self.mask)
        count = chunk_size or max(columns, 2 * old[0].shape[1])
        self.keys, self.values, self.mask = (_fill(x, count) for x in old)
        self._owned = True

    def _extend_even(self, keys, values, chunk_size):
        """Extend sequences that are at the same position."""
        (batch, length, _), seen = keys.shape, self.seen
        before = seen if chunk_size is None else seen % chunk_size
        if before:
            keys, values = (torch.cat((x[:, :before], y), 1) for x, y in ((self.keys, keys), (self.values, values)))
        reach, count = Reach(keys, values), before + length
        if chunk_size is not None:
            first, count = count - count % chunk_size, chunk_size
            keys, values = (_fill(x[:, first:], chunk_size) for x in (keys, values))
        mask = keys.new_ones(batch, count, dtype=torch.bool)
        position = torch.full((batch,), seen + length, device=keys.device)
        self.store(length, keys=keys, values=values, mask=mask, position=position)
        self._used = count
        return reach

    def _extend(self, keys, values, mask, chunk_size):
        """Extend sequences at any positions: what they have moves to the columns before the new ones."""
        length, width, start = mask.shape[1], 0, self.start(mask)
        begun = torch.zeros_like(start) if self.position is None else self.position
        position = begun + mask.sum(dim=1)
        new = (keys, values, mask)
        if self.keys is not None:
            before = begun if chunk_size is None else begun % chunk_size
            width = self.keys.shape[1] if chunk_size is None else chunk_size - 1
            if not torch.compiler.is_exporting():
                width = min(width, self.seen)
            columns = rotation(before - width, width)
            old = (take(x[:, :width], columns) for x in (self.keys, self.values, self.mask))
            new = [torch.cat(pair, dim=1) for pair in zip(old, new, strict=True)]
        opened = 0 if chunk_size is None else position - position % chunk_size  # the position of column 0
        columns = torch.arange(chunk_size or width + length, device=keys.device) + (width + opened - start)[:, None]
        kept = (take(x, columns.clamp(max=width + length - 1)) for x in new)
        self.store(length, position=position, **dict(zip(("keys", "values", "mask"), kept, strict=True)))
        self._used = None
        return Reach(*new, start - width)

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Put the sequences in the order of `beam_idx`; on a CPU only those that move, and columns that are in use."""
        if not getattr(self, "_owned", False) or self.keys.device.type != "cpu" or len(beam_idx) != len(self.keys):
            super().reorder_cache(beam_idx)
            return
        moved = (beam_idx != torch.arange(len(beam_idx))).nonzero()[:, 0]
        if len(moved) == 0:
            return
        origin = beam_idx[moved]
        for name, tensor in self.tensors.items():
            part = tensor[:, : self._used] if name in ("keys", "values", "mask") else tensor
            part[moved] = part[origin]


def _fill(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return a copy of `[B, T, ...]` with `count` columns, the new ones filled with zeros, or True in a mask."""
    return nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, count - x.shape[1]), value=x.dtype == torch.bool)
