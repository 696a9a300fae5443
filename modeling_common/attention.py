"""The cache layer with keys and values of the gated attention of Mega and Megalodon."""

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.kernels.for_models import EXPORTED, KeyWindow, mode, roll_columns, take_columns
from luna_mega.modeling_common.cache import StateLayer
from luna_mega.modeling_common.masks import can_look


def cached_backend(config: PreTrainedConfig, cache: StateLayer | None, output_weights: bool) -> str | None:
    """Return the backend of attention: "reference" with a cache and "eager" attention; None = the default.

    Without a cache, "eager" computes the attention weights (see `returns_weights`), which always uses the reference.
    """
    return None if cache is None or output_weights or config._attn_implementation != "eager" else "reference"


class KeyValueCacheLayer(StateLayer):
    """The keys and values of B sequences that remain visible to the attention of one block.

    `keys` `[B, S, Z]`, `values` `[B, S, V]`, `mask` `[B, S]`: position p of a sequence is in column p; with attention
    chunks of size S, in column p modulo S. Dropped tokens have no position. Columns after the last position are
    undefined. `position` `[B]`: the number of positions so far.
    """

    # `_aligned`: no sequence has had padding, so all have the same length. `_owned`: no other object uses the tensors,
    # so they may be written in place. `_used`: the number of columns in use. `_chunk`: the chunk size or None.
    __slots__ = ("_aligned", "_chunk", "_owned", "_used")
    # Tensors, or None before the first position.
    keys: Any
    values: Any
    mask: Any
    position: Any
    _used: int | None

    def reset(self) -> None:
        """Remove all keys and values."""
        super().reset()
        self._aligned, self._owned = True, False

    def extend(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, chunk_size: int | None
    ) -> KeyWindow:
        """Add keys, values and mask (None = all) of T positions, and return the window visible to their queries."""
        exporting, self._chunk = mode() == EXPORTED, chunk_size
        self._aligned = aligned = mask is None and not exporting and getattr(self, "_aligned", False)
        if not aligned and mask is None:
            mask = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        # Inputs of exported programs and tensors that autograd has saved must not be changed in place.
        tensors = (keys, values) if self.keys is None else (keys, values, self.keys)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if keys.shape[1] == 1 and not needs_grad and not exporting:
            return self._write(keys, values, mask)
        self._owned = not needs_grad
        if aligned:
            return self._append_aligned(keys, values)
        return self._append((keys, values, mask))

    def make_static(self, max_length: int | None) -> None:
        count = max_length if self._chunk is None else self._chunk
        if count is None or count < self.seen and self._chunk is None:
            raise ValueError(
                f"without chunks, a static cache requires max_length of at least the {self.seen} positions so far, got "
                f"{max_length}"
            )
        self.keys, self.values, self.mask = (_fill(x[:, :count], count) for x in (self.keys, self.values, self.mask))
        super().make_static(max_length)
        self._aligned, self._owned, self._used = False, True, count

    def check_room(self) -> None:
        if self._chunk is None and self.seen >= self.keys.shape[1]:
            raise ValueError(f"the static cache has max_length={self.keys.shape[1]}, and is full; make a longer one")

    def start(self, mask: torch.Tensor | None) -> Any:
        """Return the position of the first new column, `[B]`: negative if padding precedes the first token; None = 0.

        `mask` `[B, T]` applies to the new columns; None = all are kept.
        """
        if mask is None:
            return self.position
        first = mask.int().argmax(dim=1)
        return -first if self.position is None else torch.where(self.position > 0, self.position, -first)

    def _write(self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> KeyWindow:
        """Write one position of each sequence to its next column.

        If `mask` is None, all sequences are at the same position.
        """
        chunk_size, past_length = self._chunk, self.seen
        if not self.is_static:
            self._make_room(keys, values, past_length + 1)
        column: Any = past_length if mask is None else self.position
        if chunk_size is not None:
            column = column % chunk_size
        elif self.is_static:
            column = column.clone()  # `store` writes `position` in place
        if mask is None:
            self._used = used = column + 1
            self.keys[:, column:used], self.values[:, column:used] = keys, values
            self.store(1, position=self.position + 1)
            return KeyWindow(self.keys[:, :used], self.values[:, :used], chunk_size, offset=column, step=True)
        rows = torch.arange(len(keys), device=keys.device)
        self.keys[rows, column], self.values[rows, column] = keys[:, 0], values[:, 0]
        self.mask[rows, column] = mask[:, 0]
        if self.is_static:
            self._used = self.keys.shape[1]
        elif chunk_size is None:
            self._used = past_length + 1
        else:  # all columns if reading `column` would wait for the device
            self._used = int(column.max()) + 1 if can_look(column) else chunk_size
        self.store(1, position=self.position + mask[:, 0])
        keys, values, mask = (x[:, : self._used] for x in (self.keys, self.values, self.mask))
        return KeyWindow(keys, values, chunk_size, mask, offset=self._used - 1, step=True, column=column)

    def _make_room(self, keys: torch.Tensor, values: torch.Tensor, columns: int) -> None:
        """Extend the buffers to at least `columns`: to the size of a chunk, or to twice the current size."""
        columns = self._chunk or columns
        if self.keys is None:
            self.position = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
            old = (keys[:, :0], values[:, :0], keys.new_empty(len(keys), 0, dtype=torch.bool))
        else:
            owned = getattr(self, "_owned", False)
            if owned and not torch.compiler.is_compiling():  # torch.compile does not support inference mode
                owned = self.keys.is_inference() == keys.is_inference()
            if owned and self.keys.shape[1] >= columns:
                return
            old = (self.keys, self.values, self.mask)
        count = self._chunk or max(columns, 2 * old[0].shape[1])
        self.keys, self.values, self.mask = (_fill(x, count) for x in old)
        self._owned = True

    def _append_aligned(self, keys: torch.Tensor, values: torch.Tensor) -> KeyWindow:
        """Add positions of sequences that are all at the same position."""
        (batch, length, _), past_length, chunk_size = keys.shape, self.seen, self._chunk
        before = past_length if chunk_size is None else past_length % chunk_size
        if before:
            keys, values = (torch.cat((x[:, :before], y), 1) for x, y in ((self.keys, keys), (self.values, values)))
        window, count = KeyWindow(keys, values, chunk_size, offset=before, step=length == 1), before + length
        if chunk_size is not None:
            first, count = count - count % chunk_size, chunk_size
            keys, values = (_fill(x[:, first:], chunk_size) for x in (keys, values))
        mask = keys.new_ones(batch, count, dtype=torch.bool)
        position = torch.full((batch,), past_length + length, device=keys.device)
        self.store(length, keys=keys, values=values, mask=mask, position=position)
        self._used = count
        return window

    def _append(self, new: tuple[Any, ...]) -> KeyWindow:
        """Add keys, values and mask of sequences at different positions.

        Earlier columns are moved directly before the new ones.
        """
        mask, chunk_size = new[-1], self._chunk
        length, width, start = mask.shape[1], 0, self.start(mask)
        past_lengths = torch.zeros_like(start) if self.position is None else self.position
        position = past_lengths + mask.sum(dim=1)
        if self.keys is not None:
            before = past_lengths if chunk_size is None else past_lengths % chunk_size
            width = self.keys.shape[1] if chunk_size is None else chunk_size - 1
            if mode() != EXPORTED:
                width = min(width, self.seen)
            columns = roll_columns(before - width, width)
            old: Any = (take_columns(x[:, :width], columns) for x in (self.keys, self.values, self.mask))
            new = tuple(torch.cat(pair, dim=1) for pair in zip(old, new, strict=True))
        origin = 0 if chunk_size is None else position - position % chunk_size  # the position of column 0
        columns = torch.arange(chunk_size or width + length, device=mask.device) + (width + origin - start)[:, None]
        kept = (take_columns(x, columns.clamp(max=width + length - 1)) for x in new)
        self.store(length, position=position, **dict(zip(("keys", "values", "mask"), kept, strict=True)))
        self._used = None
        keys, values, mask = new
        return KeyWindow(keys, values, chunk_size, mask, start - width, offset=width, step=length == 1)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the sequences by `beam_idx`. On a CPU, only sequences that move and columns in use are copied."""
        if not getattr(self, "_owned", False) or self.keys.device.type != "cpu" or len(beam_idx) != len(self.keys):
            super().reorder_cache(beam_idx)
            return
        rows = (beam_idx != torch.arange(len(beam_idx))).nonzero()[:, 0]
        if len(rows) == 0:
            return
        source_rows = beam_idx[rows]
        for name, tensor in self.tensors.items():
            part = tensor[:, : self._used] if name in ("keys", "values", "mask") else tensor
            part[rows] = part[source_rows]


def _fill(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return a copy of `[B, T, ...]` with `count` columns; new columns are 0, or True in a mask."""
    return pad(x, (*(0, 0) * (x.dim() - 2), 0, count - x.shape[1]), value=x.dtype == torch.bool)
