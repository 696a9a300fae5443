"""Gated attention of Mega and Megalodon to the keys and values of a layout or a cache: `KeyWindow` and `attend`."""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from luna_mega.kernels.api import gated_attention, gated_attention_step


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
        slots: `[B]`, the rows of keys and values that belong to the sequences; None = all.
        varlen: `cu_seqlens` `[S + 1]` and `max_seqlen` of keys in one row; None = one sequence per row.
        places: `[total]`, the columns of the queries in that row; None = all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    chunk_size: int | None
    mask: torch.Tensor | None = None
    start: torch.Tensor | None = None
    offset: int = 0
    step: bool = False
    column: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    varlen: tuple[torch.Tensor, int] | None = None
    places: torch.Tensor | None = None

    def length(self) -> int:
        """Return the length of the longest sequence of keys."""
        return self.keys.shape[1] if self.varlen is None else self.varlen[1]


def attend(
    query: torch.Tensor,
    window: KeyWindow,
    heads: int | None = None,
    return_weights: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the attention of queries `[B, T, H Z]` to a window, `[B, T, H V]`, and the weights or None.

    Args:
        query: queries of all heads.
        window: visible keys and values.
        heads: H, with the heads of queries, keys and values next to each other; None = one, and weights without H.
        return_weights: also return the attention weights.
        options: further arguments of `gated_attention`: `bias`, `function`, `causal` and `dropout`.
    """
    if window.step and not return_weights:
        return attend_step(query, window, heads, **options), None
    if window.varlen is not None:
        options |= dict(zip(("cu_seqlens", "max_seqlen"), window.varlen, strict=True))
        if window.places is not None:  # zeros in the columns of earlier keys
            query = query.new_zeros(1, window.keys.shape[1], query.shape[2]).index_copy(1, window.places, query)
    else:
        options |= {"mask": window.mask, "start": window.start}
    options |= {"chunk_size": window.chunk_size, "offset": window.offset, "return_weights": return_weights}
    result: Any
    if heads is not None:
        result = attend_by_head(query, window, heads, options)
    else:
        result = gated_attention(query, window.keys, window.values, **options)
    attended, weights = result if return_weights else (result, None)
    return (attended if window.places is None else attended[:, window.places]), weights


def attend_step(
    query: torch.Tensor, window: KeyWindow, heads: int | None, causal: bool, **options: Any
) -> torch.Tensor:
    """Return `attend` of one query, `[B, 1, H V]`, head by head: the heads of a cache are not copied."""
    one_chunk = window.column is not None or window.start is None  # the keys belong to it
    options |= {"chunk_size": None if one_chunk else window.chunk_size, "mask": window.mask, "start": window.start}
    options |= {"column": window.column, "slots": window.slots}
    if heads in (None, 1):
        return gated_attention_step(query[:, 0], window.keys, window.values, **options)[:, None]
    split = (x.chunk(heads, -1) for x in (query[:, 0], window.keys, window.values))
    return torch.cat([gated_attention_step(*head, **options) for head in zip(*split, strict=True)], -1)[:, None]


def attend_by_head(
    query: torch.Tensor, window: KeyWindow, heads: int, options: dict[str, Any]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return `gated_attention` of several heads, which are sequences of a larger batch or of a longer row."""
    length, varlen = query.shape[1], window.varlen is not None
    if varlen:
        before = torch.arange(heads, device=query.device)[:, None] * length
        bounds = (options["cu_seqlens"][:-1] + before).flatten()
        options |= {"cu_seqlens": pad(bounds, (0, 1), value=heads * length)}
    else:
        rows = {name: options[name] for name in ("mask", "start")}
        options |= {name: None if x is None else x.repeat_interleave(heads, 0) for name, x in rows.items()}
    tensors = (by_head(x, heads, varlen) for x in (query, window.keys, window.values))
    result: Any = gated_attention(*tensors, heads=heads, **options)
    attended, weights = result if options["return_weights"] else (result, None)
    attended = attended.view(-1, heads, length, attended.shape[-1]).transpose(1, 2).flatten(2)
    return attended if weights is None else (attended, weights)


def by_head(x: torch.Tensor, heads: int, varlen: bool = False) -> torch.Tensor:
    """Return the heads of `[B, T, H K]` as rows `[B H, T, K]`, or one row with `varlen` as `[1, H T, K]`."""
    x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return x.flatten(1, 2) if varlen else x.flatten(0, 1)
