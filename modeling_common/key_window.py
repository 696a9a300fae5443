"""Keys and values that are visible to queries, of a layout or a cache."""

from typing import NamedTuple

import torch


class KeyWindow(NamedTuple):
    """Keys and values visible to the queries, and the columns of the queries among them.

    Args:
        keys, values: `[B, S, Z]` and `[B, S, V]`.
        chunk_size: positions of an attention chunk; None = the entire sequence.
        mask: `[B, S]` bool, True = keep; None = all.
        start: `[B]`, the position of the first key; None = 0, or the first of a chunk.
        offset: the column of the first query.
        step: whether there is one query, the last position of a cache.
        column: `[B]`, the column of that query; None = the last.
        varlen: `cu_seqlens` `[S + 1]` and `max_seqlen` of keys in one row; None = one sequence per row.
    """

    keys: torch.Tensor
    values: torch.Tensor
    chunk_size: int | None
    mask: torch.Tensor | None = None
    start: torch.Tensor | None = None
    offset: int = 0
    step: bool = False
    column: torch.Tensor | None = None
    varlen: tuple[torch.Tensor, int] | None = None

    def length(self) -> int:
        """Return the length of the longest sequence of keys."""
        return self.keys.shape[1] if self.varlen is None else self.varlen[1]
