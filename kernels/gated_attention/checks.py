"""Argument checks of `gated_attention` and its step."""

import torch
from torch import Tensor

from ..checks import check_dropout, check_mask
from . import reference


def check_call(
    op: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, function: str, causal: bool,
    chunk_size: int | None, offset: int, dropout: float, **rows: Tensor | None,
) -> None:  # fmt: skip
    """Raise `ValueError` unless the arguments match; `rows` are the integers `[B]` by name."""
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
    for name, x in rows.items():
        if x is not None and (x.dtype not in (torch.int32, torch.int64) or x.shape != query.shape[:1]):
            raise ValueError(f"{op} needs {name} [{query.shape[0]}] of int32 or int64, got {x.dtype} {list(x.shape)}")
    if rows.get("row_offset") is not None and (causal or chunk_size is not None):
        raise ValueError(f"{op}: row_offset is only for cross-attention without chunks; omit row_offset")


def check_bias(op: str, bias: Tensor | None, positions: int) -> None:
    if bias is None:
        return
    if bias.dim() != 1 or bias.shape[0] % 2 == 0 or not bias.is_floating_point():
        raise ValueError(f"{op} needs a floating-point bias of shape [2 M - 1], got {bias.dtype} {list(bias.shape)}")
    if (bias.shape[0] + 1) // 2 < positions:
        raise ValueError(
            f"{op}: a bias of length {bias.shape[0]} covers {(bias.shape[0] + 1) // 2} positions, but {positions} are "
            f"in use; pass a bias of length {2 * positions - 1}"
        )
