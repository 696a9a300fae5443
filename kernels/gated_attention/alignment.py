"""Align every row of a batch, so that chunks begin at multiples of their size and padding is out of the way."""

from collections.abc import Callable

import torch
from torch import nn


def in_columns(run: Callable) -> Callable:
    """Return a function that takes any call, from a `run` that needs chunks to begin at multiples of their size."""

    def run_any(query, key, value, mask, chunk_size, offset, start, **rest):
        if start is not None:
            begun = torch.arange(key.shape[1], device=key.device) + start[:, None] >= 0
            mask = begun if mask is None else mask & begun
        columns = None
        if chunk_size is not None and (start is not None or query.shape[1] != key.shape[1]):
            tokens = with_chunks_in_columns(query, key, value, mask, chunk_size, offset, start)
            (query, key, value, mask, columns), offset, start = tokens, 0, None
        result = run(
            query=query, key=key, value=value, mask=mask, chunk_size=chunk_size, offset=offset, start=start, **rest
        )
        if columns is None:
            return result
        return take(result, columns) if isinstance(result, torch.Tensor) else (take(result[0], columns), *result[1:])

    return run_any


def in_last_column(run: Callable) -> Callable:
    """Return a step, whose query stands in the `column` `[B]` of the keys (None: the last), by a causal `run`."""

    def run_step(key, value, mask, column, start, slots, **call):
        if slots is not None:
            key, value = key[slots], value[slots]
        if column is not None:
            # What is behind the query goes to the beginning, before the first position.
            shift = column + 1 - key.shape[1]
            key, value, mask = (take(x, rotation(shift, key.shape[1])) for x in (key, value, mask))
            start = shift if start is None else shift + start
        tokens = {"key": key, "value": value, "mask": mask, "start": start, "offset": key.shape[1] - 1}
        return run(**tokens, causal=True, chunk_size=None, row_offset=None, **call)

    return run_step


def with_chunks_in_columns(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    chunk_size: int,
    offset: int,
    start: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move every row so that its chunks begin at multiples of `chunk_size`; the last result finds the queries again.

    With offset 0 the first token goes to column 0, and the padding before it to the end. Else the first chunk may begin
    before the first key, and the columns in between are at the end. Returns query, key, value, mask and the columns
    `[B, T]` in which the queries stand now.
    """
    (batch, queries, _), keys = query.shape, key.shape[1]
    if start is None:
        start = torch.zeros(batch, dtype=torch.int64, device=key.device)
    shift, count = (start, keys) if offset == 0 else (start % chunk_size, keys + chunk_size - 1)
    place = torch.arange(count, device=key.device) - shift[:, None]
    inside, columns = (place >= 0) & (place < keys), rotation(-shift, count)
    query, key, value = (take(fill(x, before, count), columns) for x, before in ((query, offset), (key, 0), (value, 0)))
    mask = inside if mask is None else inside & take(fill(mask, 0, count), columns)
    back = rotation(shift, count)[:, offset : offset + queries]
    return query, key, value, mask, back


def rotation(shift: torch.Tensor, count: int) -> torch.Tensor:
    """Return the columns `[B, count]` to take so that every row of `count` columns moves left by its `shift` `[B]`."""
    # As a tensor, because ONNX takes no remainder by a size of an exported program.
    return (torch.arange(count, device=shift.device) + shift[:, None]) % torch.full((), max(count, 1))


def to_end(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return `[B, T, ...]` with the first `lengths` `[B]` positions of each row at its end, after the others."""
    return take(x, rotation(lengths - x.shape[1], x.shape[1]))


def take(x: torch.Tensor | None, columns: torch.Tensor) -> torch.Tensor | None:
    """Return the columns `[B, C]` of `[B, T]` or `[B, T, W]`; None of None."""
    if x is None or x.dim() == 2:
        return None if x is None else x.gather(1, columns)
    # take_along_dim would fix the batch size of an exported program
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[2]))


def fill(x: torch.Tensor, before: int, count: int) -> torch.Tensor:
    """Fill `[B, T]` or `[B, T, W]` up to `count` columns with zeros, `before` of them at the beginning."""
    after = count - before - x.shape[1]
    return x if before == after == 0 else nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), before, after))


def unless_zero(rows: torch.Tensor | None) -> torch.Tensor | None:
    """Return None in place of rows that are all zero, where looking at them costs nothing."""
    if type(rows) is not torch.Tensor or rows.device.type != "cpu" or torch.jit.is_tracing():
        return rows
    return rows if torch.compiler.is_compiling() or rows.any() else None
