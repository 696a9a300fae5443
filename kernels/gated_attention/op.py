"""Attention of Mega's gated layer: one head, three attention functions, a relative bias, full or in chunks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._dispatch import Arguments, Op
from .._mode import COMPILED, EXPORTED, TRANSFORMED, mode
from ..alignment import drop_zero_rows, in_columns, in_last_column, pad_columns, roll_columns, take_columns
from ..checks import check_dropout, check_mask
from ..sequences import Sequences, check_cu_seqlens, in_rows
from . import reference, torch_backend, torch_step


def _reference(**call: Any) -> Tensor:
    return reference.attend(**call)[0]


def _triton(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, function: str, causal: bool,
    chunk_size: int | None, offset: int, row_offset: Tensor | None, start: Tensor | None, dropout: float, **varlen: Any,
) -> Tensor:  # fmt: skip
    # Imported lazily because Triton decides at import time whether kernels are interpreted.
    from . import triton_ops

    if start is not None and causal and function != "softmax":
        # The kernels divide by the query's column plus 1, not by its position plus 1.
        visible = torch.arange(offset + 1, offset + query.shape[1] + 1, device=query.device)
        query = query * (visible / (visible + start[:, None]).clamp(min=1))[..., None].to(query.dtype)
    options = (function, causal, chunk_size, offset, dropout)
    if row_offset is None:
        return triton_ops.attend(query, key, value, bias, mask, *options, **varlen)
    # The kernels do not support an offset per row, so padding moves to the end.
    query = take_columns(query, roll_columns(-row_offset.clamp(max=0), query.shape[1]))
    columns = roll_columns(row_offset.clamp(min=0), key.shape[1])
    key, value = take_columns(key, columns), take_columns(value, columns)
    mask = None if mask is None else take_columns(mask, columns)
    attended = triton_ops.attend(query, key, value, bias, mask, *options)
    return take_columns(attended, roll_columns(row_offset.clamp(max=0), query.shape[1]))


def _with_weights(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, chunk_size: int | None,
    dropout: float, heads: int | None = None, **rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the weights; the weights are `[B, chunks, C, C]`, or `[B, 1, T, S]` without chunks."""
    (batch, length, _), chunks = query.shape, 1
    if chunk_size is not None:
        size = max(min(chunk_size, length), 1)
        if mask is None:
            mask = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
        chunks = -(-length // size)
        # Pad an incomplete last chunk.
        query, key, value, mask = (
            pad_columns(x, 0, length + -length % size).unflatten(1, (chunks, size)).flatten(0, 1)
            for x in (query, key, value, mask)
        )
    weights = reference.weights(query, key, bias, mask, chunk_size=None, **rest).unflatten(0, (batch, chunks))
    weights = weights if heads is None else weights.unflatten(0, (batch // heads, heads))
    dropped = torch.dropout(weights.to(value.dtype), dropout, train=True).view(batch, *weights.shape[-3:])
    output = dropped @ value.unflatten(0, (batch, chunks))
    return output.flatten(1, 2)[:, :length], weights


def _unsupported(query: Tensor, value: Tensor, offset: int, row_offset: Tensor | None, **_: object) -> str | None:
    for name, dtype in (("query and key are", query.dtype), ("value is", value.dtype)):
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"{name} {dtype}; the kernels support float32, float16 and bfloat16"
    if query.shape[2] > 256:
        return f"query and key have size {query.shape[2]}; the kernels support up to 256"
    if row_offset is not None and offset > 0 and query.shape[1] > 1:
        return f"row_offset is combined with offset {offset}; the kernels support only offset 0"
    return None


def _round(call: Arguments) -> Arguments:
    # Tensor cores need 16-bit operands, as autocast would produce.
    return call | {name: call[name].to(call["value"].dtype) for name in ("query", "key")}


def _fast(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run`, or the reference for single queries with `row_offset` (it is not slower)."""
    run = in_columns(run)

    def run_any(**call: Any) -> Any:
        single = call["row_offset"] is not None and call["query"].shape[1] == 1
        return _reference(**call) if single else run(**call)

    return run_any


_fast_triton = _fast(_triton)


def _any_triton(sequences: Sequences, **call: Any) -> Tensor:
    if sequences.bounds is not None:
        call |= {"cu_seqlens": sequences.bounds, "max_seqlen": sequences.longest}
    return _fast_triton(mask=sequences.mask, **call)


ATTEND = Op(
    "gated_attention",
    {
        "reference": in_rows(_reference, "query", "key", "value"),
        "torch": in_rows(_fast(torch_backend.attend), "query", "key", "value"),
        "triton": _any_triton,
    },
    _unsupported,
    with_weights=in_rows(in_columns(_with_weights)),
    under_autocast=_round,
)


_triton_in_last_column = in_last_column(_fast_triton)


def _triton_step(column: Tensor | None, **call: Any) -> Tensor:
    # Moving the columns of all keys and values would take longer than the products of PyTorch.
    run = _triton_in_last_column if column is None else torch_step.step
    return run(column=column, **call)


STEP = Op(
    "gated_attention_step",
    {"reference": in_last_column(_reference), "torch": torch_step.step, "triton": _triton_step},
    partial(_unsupported, offset=0, row_offset=None),
    under_autocast=_round,
)


def gated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    function: str = "softmax",
    causal: bool = False,
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    offset: int = 0,
    row_offset: Tensor | None = None,
    start: Tensor | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
    heads: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute f(Q K^T / divisor + bias) V with one head and a value of any width (Mega sections 3.2 to 3.5).

    Chunks and the divisor of causal attention count from the first token of a sequence (`start`). The result for a
    sequence is therefore the same with left or right padding, and in one call or in several calls with cached keys.

    Args:
        query: `[B, T, Z]`, in the dtype of `key`.
        key: `[B, S, Z]`.
        value: `[B, S, V]`.
        bias: `[2M - 1]`, any floating-point dtype; entry `M - 1 + (j - i)` is added to the score of a query in column i
            and a key in column j. M is at least the largest number of columns in use, or the chunk size.
        function: `"softmax"`, with divisor sqrt(Z), or `"laplace"` or `"relu2"`, with unnormalized weights. The divisor
            of the latter is the number of unmasked keys in the chunk or, if causal, the query's 1-based position in the
            chunk, including padding.
        causal: queries attend only to keys up to their own column.
        chunk_size: positions attend within chunks of this length; T may be any length. None = full attention.
        mask: `[B, S]` bool, True = attend to this key; None = all. Masked keys and values must be finite, as in
            `scaled_dot_product_attention`.
        offset: column of the first query among the keys, for cached decoding (S = number of keys so far) or
            cross-attention.
        row_offset: `[B]` integers added to `offset`, for cross-attention (not causal, no chunks) with left padding of
            different lengths: n is the padding of the keys minus the padding of the queries. If n > 0, the first n keys
            must be masked; if n < 0, the first -n queries are padding.
        start: `[B]` integers, the position of the first column in its sequence; None = 0. It is negative for left
            padding and positive if old keys were dropped. Keys before position 0 are masked, and outputs of queries
            before position 0 are undefined. With chunks and offset 0 it must be at most 0.
        dropout: dropout probability of the weights (pass 0 in evaluation).
        return_weights: also return the weights, `[B, 1, T, S]`, or `[B, chunks, C, C]` with chunks, the first of which
            starts at the first token. The reference computes them on every backend. Not supported with `cu_seqlens`.
        heads: with `return_weights`: the rows are the H heads of each sequence, in order, and the weights are `[B / H,
            H, chunks, C, C]`.
        cu_seqlens: `[sequences + 1]` int32 or int64, for varlen sequences: B is 1, T = S, and sequence b is
            `[cu_seqlens[b], cu_seqlens[b + 1])`. Columns and chunks count from the start of the sequence. Not supported
            with offset, row_offset or start.
        max_seqlen: upper bound of the sequence lengths; None = computed, which synchronizes the device. Compiled
            programs with a bias and without `chunk_size` need it.
        backend: as in `luna_pack`. `"triton"` supports row_offset only with offset 0.

    Returns:
        `[B, T, V]` in the dtype of `value`, or (output, weights) if `return_weights` is set. Scores and weights are
        computed in float32, also under autocast, but `"triton"` first rounds query and key to the dtype of `value`.
        The result of a query without visible keys is 0, with gradient 0. For the backward pass `"torch"` stores the
        scores if they need no more bytes than `value` and the output.

    Raises:
        ValueError: if shapes, dtypes or options do not match, the function is unknown, the bias is too short, or the
            backend does not exist.

    Example:
        >>> import torch
        >>> x, value, bias = torch.randn(2, 100, 16), torch.randn(2, 100, 64), torch.zeros(2 * 32 - 1)
        >>> gated_attention(x, x, value, bias, function="laplace", chunk_size=32).shape
        torch.Size([2, 100, 64])
    """
    op, length = ATTEND.name, query.shape[1]
    options = (function, causal, chunk_size, offset, dropout)
    _check_call(op, query, key, value, mask, *options, row_offset=row_offset, start=start)
    # Reading the values on a GPU would synchronize the device.
    if start is not None and chunk_size not in (None, 1) and offset == 0 and start.device.type == "cpu":
        if mode() < TRANSFORMED and (start > 0).any():
            raise ValueError(
                f"{op}: start is {start.tolist()}, so the first keys of a chunk are missing; pass the number of "
                "earlier keys as offset"
            )
    if cu_seqlens is not None:
        if query.shape[0] != 1 or length != key.shape[1] or offset != 0 or not (row_offset is start is None):
            raise ValueError(
                f"{op} with cu_seqlens needs batch size 1, queries and keys of the same length, and no offset, "
                f"row_offset or start, got query {list(query.shape)}, key {list(key.shape)} and offset {offset}"
            )
        compares = chunk_size is None and bias is not None
        max_seqlen = check_cu_seqlens(op, cu_seqlens, max_seqlen, length, compares_length=compares)
    longest: Any = max(offset + length, key.shape[1]) if cu_seqlens is None else max_seqlen
    # In a program the length may vary, so chunks longer than the input are padded.
    short = chunk_size is not None and mode() < COMPILED and offset == 0 and longest <= chunk_size
    _check_bias(op, bias, longest if chunk_size is None or short else chunk_size)
    if chunk_size == 1 and start is not None:  # chunks start at every position
        start = start.clamp(max=0)
    if short and not return_weights:
        chunk_size = None
    call: Arguments = {"query": query, "key": key, "value": value, "bias": bias, "start": drop_zero_rows(start)}
    call |= {"function": function, "causal": causal, "chunk_size": chunk_size, "offset": offset, "dropout": dropout}
    call |= {"row_offset": drop_zero_rows(row_offset), "sequences": Sequences(mask, cu_seqlens, max_seqlen)}
    if return_weights:
        call["heads"] = heads
    return ATTEND(backend, call, return_weights)


def gated_attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    function: str = "softmax",
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    start: Tensor | None = None,
    column: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Compute the last position of a causal `gated_attention`, `[B, V]`, over the keys so far, including its own.

    For arguments and errors, see `gated_attention`; query is `[B, Z]`. Only the last `chunk_size` of the keys
    `[B, S, Z]` are read. `column` `[B]` is the column of the query's own key, from 0 to S - 1, if it is not the last.
    Later keys are ignored, the keys must belong to one chunk, and `chunk_size` must be None.

    Call `backward()` outside of autocast: PyTorch differentiates this function on a CPU, and computes products of
    gradients inside autocast in half precision.
    """
    if query.dim() != 2 or key.dim() != 3 or key.shape[1] == 0:
        raise ValueError(
            f"{STEP.name} needs query [batch, size] and key [batch, length, size] of length 1 or more, got "
            f"{list(query.shape)} and {list(key.shape)}"
        )
    options: Arguments = {"function": function, "chunk_size": chunk_size, "mask": mask, "start": start}
    options |= {"column": column, "dropout": dropout, "backend": backend}
    return attend_last(query[:, None], key, value, bias, **options)[:, 0]


def attend_last(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, function: str = "softmax",
    chunk_size: int | None = None, mask: Tensor | None = None, start: Tensor | None = None,
    column: Tensor | None = None, dropout: float = 0.0, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return `gated_attention_step`, `[B, 1, V]`, of a query `[B, 1, Z]`."""
    op, options = STEP.name, (function, True, chunk_size, 0, dropout)
    _check_call(op, query, key, value, mask, *options, start=start, column=column)
    if column is not None and chunk_size is not None:
        raise ValueError(f"{op}: column does not support chunk_size={chunk_size}; omit chunk_size")
    if chunk_size is not None:
        # The chunk's first position becomes position 0, so earlier keys are masked.
        last = window = key.shape[1] - 1
        if mode() == EXPORTED:  # slicing would fix the length of the keys
            start = torch.zeros_like(key[:, 0, 0], dtype=torch.int64) if start is None else start
        else:
            window = last % chunk_size if start is None else min(last, chunk_size - 1)
        key, value = key[:, last - window :], value[:, last - window :]
        mask = None if mask is None else mask[:, last - window :]
        start = None if start is None else (start + last) % chunk_size - window
    _check_bias(op, bias, key.shape[1])
    call: Arguments = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, "function": function}
    call |= {"column": column, "start": drop_zero_rows(start), "dropout": dropout}
    return STEP(backend, call)


def _check_call(
    op: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, function: str, causal: bool,
    chunk_size: int | None, offset: int, dropout: float, **by_sequence: Tensor | None,
) -> None:  # fmt: skip
    """Raise `ValueError` unless the arguments match; `by_sequence` are the integers `[B]` by name."""
    if not query.dim() == key.dim() == value.dim() == 3:
        raise ValueError(
            f"{op} needs [batch, length, size] tensors, got query {list(query.shape)}, key {list(key.shape)} and value "
            f"{list(value.shape)}"
        )
    if query.shape[::2] != key.shape[::2] or key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"{op}: query {list(query.shape)} and key {list(key.shape)} must agree in batch and size, key and value "
            f"{list(value.shape)} in batch and length"
        )
    if query.dtype != key.dtype or not (query.is_floating_point() and value.is_floating_point()):
        raise ValueError(
            f"{op} needs floating-point tensors, query and key of one dtype, got query {query.dtype}, key {key.dtype} "
            f"and value {value.dtype}"
        )
    check_mask(op, mask, key.shape[:2])
    queries, keys = query.shape[1], key.shape[1]
    if function not in reference.FUNCTIONS:
        raise ValueError(f"{op} does not support function {function!r}; choose one of {', '.join(reference.FUNCTIONS)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{op}: chunk_size must be at least 1, or None for full attention, got {chunk_size}")
    if offset < 0 or ((causal or chunk_size is not None) and offset + queries > keys):
        raise ValueError(
            f"{op}: {queries} queries from position {offset} on do not fit {keys} keys; causal attention and chunks "
            "need a key at the position of every query, and offset must not be negative"
        )
    check_dropout(op, dropout)
    for name, x in by_sequence.items():
        if x is not None and (x.dtype not in (torch.int32, torch.int64) or x.shape != query.shape[:1]):
            raise ValueError(f"{op} needs {name} [{query.shape[0]}] of int32 or int64, got {x.dtype} {list(x.shape)}")
    if by_sequence.get("row_offset") is not None and (causal or chunk_size is not None):
        raise ValueError(f"{op}: row_offset is only for cross-attention without chunks; omit row_offset")


def _check_bias(op: str, bias: Tensor | None, positions: int) -> None:
    if bias is None:
        return
    if bias.dim() != 1 or bias.shape[0] % 2 == 0 or not bias.is_floating_point():
        raise ValueError(f"{op} needs a floating-point bias of shape [2 M - 1], got {bias.dtype} {list(bias.shape)}")
    if (bias.shape[0] + 1) // 2 < positions:
        raise ValueError(
            f"{op}: a bias of length {bias.shape[0]} covers {(bias.shape[0] + 1) // 2} positions, but {positions} are "
            f"in use; pass a bias of length {2 * positions - 1}"
        )
