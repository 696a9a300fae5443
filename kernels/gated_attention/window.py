"""Keys and values that are visible to queries, and the attention of one or several heads to them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .op import attend_last, gated_attention


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

    keys: Tensor
    values: Tensor
    chunk_size: int | None
    mask: Tensor | None = None
    start: Tensor | None = None
    offset: int = 0
    step: bool = False
    column: Tensor | None = None
    varlen: tuple[Tensor, int] | None = None

    def length(self) -> int:
        """Return the length of the longest sequence of keys."""
        return self.keys.shape[1] if self.varlen is None else self.varlen[1]

    def by_head(self, heads: int) -> "KeyWindow":
        """Return the heads, next to each other in keys and values, as sequences: rows, or parts of the one row."""
        keys, values = self.split(self.keys, heads), self.split(self.values, heads)
        if self.varlen is None:
            mask, start = (None if x is None else x.repeat_interleave(heads, 0) for x in (self.mask, self.start))
            return self._replace(keys=keys, values=values, mask=mask, start=start)
        (bounds, longest), length = self.varlen, self.keys.shape[1]
        before = torch.arange(heads, device=bounds.device)[:, None] * length
        bounds = pad((bounds[:-1] + before).flatten(), (0, 1), value=heads * length)
        return self._replace(keys=keys, values=values, varlen=(bounds, longest))

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Return the heads of `[B, T, H K]` as rows `[B H, T, K]`, or those of one varlen row as `[1, H T, K]`."""
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return x.flatten(0, 1) if self.varlen is None else x.flatten(1, 2)


def attend(
    query: Tensor, window: KeyWindow, heads: int | None = None, return_weights: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the attention of queries `[B, T, H Z]` to a window, `[B, T, H V]`, and the weights or None.

    Args:
        query: queries of all heads.
        window: visible keys and values.
        heads: H, with the heads of queries, keys and values next to each other; None = one, and weights without H.
        return_weights: also return the attention weights.
        options: further arguments of `gated_attention`: `bias`, `function`, `causal`, `dropout` and `backend`.
    """
    if window.step and not return_weights:
        return _attend_step(query, window, heads or 1, **options), None
    length = query.shape[1]
    if heads is not None:
        query, window = window.split(query, heads), window.by_head(heads)
    if window.varlen is not None:
        options |= dict(zip(("cu_seqlens", "max_seqlen"), window.varlen, strict=True))
    options |= {"mask": window.mask, "start": window.start, "chunk_size": window.chunk_size, "offset": window.offset}
    options |= {"return_weights": return_weights, "heads": heads}
    result: Any = gated_attention(query, window.keys, window.values, **options)
    attended, weights = result if return_weights else (result, None)
    if heads is not None:
        attended = attended.view(-1, heads, length, attended.shape[-1]).transpose(1, 2).flatten(2)
    return attended, weights


def _attend_step(query: Tensor, window: KeyWindow, heads: int, causal: bool, **options: Any) -> Tensor:
    """Return `attend` of one query, `[B, 1, H V]`, head by head: the heads of a cache are not copied."""
    one_chunk = window.column is not None or window.start is None  # the keys belong to it
    options |= {"chunk_size": None if one_chunk else window.chunk_size, "mask": window.mask, "start": window.start}
    options |= {"column": window.column}
    tensors = query, window.keys, window.values
    if heads == 1:
        return attend_last(*tensors, **options)
    split = (x.chunk(heads, -1) for x in tensors)
    return torch.cat([attend_last(*head, **options) for head in zip(*split, strict=True)], -1)
