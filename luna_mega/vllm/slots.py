"""Cache layers whose states are in slots of a server.

A slot stores the state of one sequence in one layer. The tensors of a layer have the shape `[slots, ...]`, and layers
read and write the rows of the current sequences. No function synchronizes with the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from luna_mega.kernels.api import LunaCausalState, TimestepNormState
from luna_mega.kernels.support import locate
from luna_mega.modeling_common.attention import KeyValueCacheLayer
from luna_mega.modeling_common.cache import Constants
from luna_mega.modeling_common.key_window import KeyWindow
from luna_mega.modeling_common.layout import DENSE, Layout
from luna_mega.modeling_common.masks import can_look
from luna_mega.modeling_common.padding_free import PaddingFreeLayout
from luna_mega.modeling_luna.modeling_luna import LunaCacheLayer
from luna_mega.modeling_mega.modeling_mega import MegaCacheLayer
from luna_mega.modeling_megalodon.modeling_megalodon import MegalodonCacheLayer

_NORMS = ("norm", "final")


@dataclass
class Sequences:
    """S sequences that are processed together in one step of all layers."""

    slots: torch.Tensor  # `[S]`, slot of each sequence
    before: torch.Tensor  # `[S]` int64, number of tokens in the slot; 0 for a new sequence, whose slot has old content
    layout: Layout = DENSE  # of the new tokens: varlen, or `DENSE` for one token per sequence
    kept: dict[str, Any] = field(default_factory=dict, init=False)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return `compute()`, which is called in the first layer only and is the same for all layers."""
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]

    def find_new(self) -> torch.Tensor | None:
        """Return the mask `[S]` of new sequences, or None if there is none, which only a CPU checks."""
        new = self.before == 0
        return None if can_look(new) and not new.any() else new

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """Return a copy `[S, ...]` of the slots, with zeros for new sequences."""
        rows, new = state.index_select(0, self.slots), self.once("new", self.find_new)
        return rows if new is None else rows.masked_fill_(new.view(-1, *(1,) * (rows.dim() - 1)), 0.0)

    def write(self, state: torch.Tensor, rows: torch.Tensor):
        """Write `[S, ...]` to the slots."""
        state[self.slots] = rows.to(state.dtype)


class ChunkSlots(KeyValueCacheLayer):
    """Cache of one block with chunked attention: moving averages `[slots, D, ...]`, and the current chunk.

    Keys and values are `[slots, C, Z]` and `[slots, C, V]`; position p of a sequence is in column p modulo C.
    """

    def __init__(self, states: tuple[torch.Tensor, ...], sequences: Sequences, constants: Constants):
        super().__init__()
        self.states, self.sequences, self._constants = states, sequences, constants
        self.average, self.position = sequences.read(states[0]), sequences.before

    def store(self, length: int = 0, *, average: torch.Tensor):
        """Write the moving averages to the slots."""
        self.sequences.write(self.states[0], average)

    def extend(self, keys, values, mask, chunk_size) -> KeyWindow:
        """Add keys and values of positions that are all kept, and return those visible to these positions."""
        if isinstance(self.sequences.layout, PaddingFreeLayout):
            return self._extend_varlen(keys, values, chunk_size)
        slots = self.sequences.slots
        column, count = self.sequences.once("columns", lambda: self._columns(chunk_size))
        for state, new in zip(self.states[1:3], (keys, values), strict=True):
            state[slots, column] = new[:, 0].to(state.dtype)
        keys, values = (state[:, :count] for state in self.states[1:3])
        return KeyWindow(keys, values, chunk_size, offset=count - 1, step=True, column=column, slots=slots)

    def _columns(self, chunk_size):
        """Return the columns of the new positions, and an upper bound for the number of columns in use."""
        column = self.sequences.before % chunk_size
        # Reading the maximum would synchronize with a GPU, so all columns are used there.
        return column, int(column.max()) + 1 if can_look(column) else chunk_size

    def _extend_varlen(self, keys, values, chunk_size):
        """Insert the cached keys of each sequence before its new keys, so that it starts with a complete chunk."""
        places = self.sequences.once("places", lambda: self._places(keys.shape[1], chunk_size))
        slots, column, is_kept, source, following, is_open, varlen, columns = places
        tensors = []
        for state, new in zip(self.states[1:3], (keys, values), strict=True):
            window = torch.where(is_kept, state[slots, column], new[0, source].to(state.dtype))
            self.sequences.write(state, window[following].masked_fill_(~is_open, 0.0))
            tensors.append(window[None])
        return KeyWindow(*tensors, chunk_size, varlen=varlen, places=columns)

    def _places(self, total, chunk_size):
        """Return the indices of all keys: slot and column of cached keys, index of new keys, and destinations."""
        slots, before, layout = self.sequences.slots, self.sequences.before, self.sequences.layout
        bounds, kept = layout.cu_seqlens.long(), before % chunk_size
        # The number of cached keys is unknown without a synchronization. The maximum is allocated then, and the unused
        # rest follows the last sequence, which causal attention does not read.
        room = int(kept.sum()) if can_look(kept) else len(kept) * (chunk_size - 1)
        joined = torch.cat([bounds[:1], bounds[1:] + kept.cumsum(0)])
        joined[-1] = total + room
        longest = int(joined.diff().max()) if can_look(joined) else layout.max_seqlen + room
        row, column = locate(joined, total + room)
        new_row, new_column = locate(bounds, total)
        places = joined[new_row] + kept[new_row] + new_column
        source = (bounds[row] + column - kept[row]).clamp(0, total - 1)
        is_kept = (column < kept[row])[:, None]
        lengths, columns = bounds.diff(), torch.arange(chunk_size, device=before.device)
        opened = ((before + lengths) % chunk_size)[:, None]  # positions of the current chunk after the new ones
        following = ((joined[:-1] + kept + lengths)[:, None] - opened + columns).clamp(max=total + room - 1)
        is_open, column = (columns < opened)[..., None], column.clamp(max=chunk_size - 1)
        return slots[row], column, is_kept, source, following, is_open, (joined, longest), places


class MegaSlots(ChunkSlots, MegaCacheLayer):
    """Cache of one Mega block in slots."""


class MegalodonSlots(ChunkSlots, MegalodonCacheLayer):
    """Cache of one Megalodon block in slots, with `[slots, 2, 2, G]`: means and variances of two norms.

    The second norm is the final norm, which is used in the last block. Both include all tokens of a sequence.
    """

    def statistics(self, norm: str) -> TimestepNormState:
        """Return the statistics of a norm."""
        mean, variance = self.sequences.read(self.states[3][:, _NORMS.index(norm)]).unbind(1)
        return TimestepNormState(self.sequences.before, mean, variance)

    def store_statistics(self, norm: str, state: TimestepNormState):
        """Write the statistics of a norm to the slots."""
        self.sequences.write(self.states[3][:, _NORMS.index(norm)], torch.stack(state[1:], 1))


class LunaSlots(LunaCacheLayer):
    """Cache of one Luna decoder layer in slots: means `[slots, H, K, L]` and `[slots, H, L, K]`.

    `pack_query` `[L, H, K]` is the projected P of the layer.
    """

    def __init__(self, states: tuple[torch.Tensor, ...], sequences: Sequences, pack_query: torch.Tensor):
        super().__init__()
        self.states, self.sequences = states, sequences
        self.pack_query = pack_query.expand(len(sequences.slots), -1, -1, -1)
        means = (sequences.read(state) for state in states)
        self.store_state(LunaCausalState(*means, sequences.before.clone()), 0)
        self.is_initialized = True

    def store_state(self, state: LunaCausalState, length: int):
        """Replace the state, and write it to the slots if there are new positions."""
        super().store_state(state, length)
        if length:
            for slots, mean in zip(self.states, state[:2], strict=True):
                self.sequences.write(slots, mean)
