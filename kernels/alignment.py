"""Align the rows of a batch, so that chunks start at multiples of their size and padding does not affect positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._mode import TRANSFORMED, mode


def in_columns(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for any call, based on `run`, which requires chunks to start at multiples of their size."""

    def run_any(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, chunk_size: int | None, offset: int,
        start: Tensor | None, **rest: Any,
    ) -> Any:  # fmt: skip
        if start is not None:
            started = torch.arange(key.shape[1], device=key.device) + start[:, None] >= 0
            mask = started if mask is None else mask & started
        columns = None
        if chunk_size is not None and (start is not None or query.shape[1] != key.shape[1]):
            tokens = with_chunks_in_columns(query, key, value, mask, chunk_size, offset, start)
            (query, key, value, mask, columns), offset, start = tokens, 0, None
        result = run(
            query=query, key=key, value=value, mask=mask, chunk_size=chunk_size, offset=offset, start=start, **rest
        )
        if columns is None:
            return result
        if isinstance(result, Tensor):
            return take_columns(result, columns)
        return take_columns(result[0], columns), *result[1:]

    return run_any


def in_last_column(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step whose query is in `column` `[B]` of the keys (None: the last), based on a causal `run`."""

    def run_step(
        key: Tensor, value: Tensor, mask: Tensor | None, column: Tensor | None, start: Tensor | None, **call: Any,
    ) -> Tensor:  # fmt: skip
        if column is not None:
            # Keys after the query move to the start, before the first position.
            shift = column + 1 - key.shape[1]
            columns = roll_columns(shift, key.shape[1])
            key, value = take_columns(key, columns), take_columns(value, columns)
            mask = None if mask is None else take_columns(mask, columns)
            start = shift if start is None else shift + start
        tokens = {"key": key, "value": value, "mask": mask, "start": start, "offset": key.shape[1] - 1}
        return run(**tokens, causal=True, chunk_size=None, row_offset=None, **call)

    return run_step


def with_chunks_in_columns(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, chunk_size: int, offset: int, start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotate every row so that a chunk starts at column 0; return also the columns of the queries.

    With offset 0 the first token moves to column 0, and the padding before it to the end. Otherwise the first chunk may
    start before the first key; the columns in between move to the end. Returns query, key, value, mask and the new
    columns `[B, T]` of the queries.
    """
    (batch, queries, _), keys = query.shape, key.shape[1]
    if start is None:
        start = torch.zeros(batch, dtype=torch.int64, device=key.device)
    shift, count = (start, keys) if offset == 0 else (start % chunk_size, keys + chunk_size - 1)
    place = torch.arange(count, device=key.device) - shift[:, None]
    inside, columns = (place >= 0) & (place < keys), roll_columns(-shift, count)
    query, key, value = (
        take_columns(pad_columns(x, before, count), columns) for x, before in ((query, offset), (key, 0), (value, 0))
    )
    mask = inside if mask is None else inside & take_columns(pad_columns(mask, 0, count), columns)
    back = roll_columns(shift, count)[:, offset : offset + queries]
    return query, key, value, mask, back


def roll_columns(shift: Tensor, count: int) -> Tensor:
    """Return the column indices `[B, count]` that rotate each row of `count` columns left by its `shift` `[B]`."""
    # A tensor, because ONNX does not support the remainder of a dynamic size.
    return (torch.arange(count, device=shift.device) + shift[:, None]) % torch.full((), max(count, 1), device="cpu")


def to_end(x: Tensor, lengths: Tensor) -> Tensor:
    """Return `[B, T, ...]` with the first `lengths` `[B]` positions of each row moved to its end."""
    return take_columns(x, roll_columns(lengths - x.shape[1], x.shape[1]))


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return the columns `[B, C]` of `[B, T]` or `[B, T, W]`."""
    if x.dim() == 2:
        return x.gather(1, columns)
    # take_along_dim would fix the batch size of an exported program.
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[2]))


def pad_columns(x: Tensor, before: int, count: int) -> Tensor:
    """Zero-pad `[B, T]` or `[B, T, W]` to `count` columns, with `before` of the new columns at the start."""
    after = count - before - x.shape[1]
    if before == after == 0:
        return x
    return nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), before, after))


def drop_zero_rows(shift: Tensor | None) -> Tensor | None:
    """Return None if no row is shifted and this can be checked without device synchronization, else `shift` `[B]`."""
    if type(shift) is not Tensor or shift.device.type != "cpu" or mode() >= TRANSFORMED:
        return shift
    return shift if shift.any() else None
