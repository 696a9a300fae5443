"""One query of causal gated attention in PyTorch: two vector-matrix products, without blocks."""

from typing import Any

import torch
from torch import Tensor

from ..upcast import upcast_dtype
from . import reference


def step(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, function: str,
    column: Tensor | None, start: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Return `reference.attend` for one query `[B, 1, Z]` in `column` `[B]` of the keys, None = the last."""
    keys = key.shape[1]
    dtype = upcast_dtype(query, value)
    value_dtype = product_dtype(value, dtype)
    query, scale = query.to(dtype).mT, 1.0
    if function == "softmax":
        scale = query.shape[1] ** -0.5
    elif column is None and start is None:
        scale = 1.0 / keys
    else:
        visible: Any = keys if column is None else column + 1
        query = query / (visible if start is None else (visible + start).clamp(min=1))[:, None, None]
    # [B, S, 1]: on CPU, many short rows times a column take half the time of one row times many columns.
    bias = query.new_zeros(()) if bias is None else _select(bias, keys, column)
    scores = torch.baddbmm(bias.to(dtype), key.to(dtype), query, alpha=scale).mT
    keep = _keep(keys, mask, column, start, key.device)
    if function != "softmax":
        weights = getattr(reference, function)(scores)
    elif keep is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        weights = torch.softmax(scores.masked_fill(~keep, torch.finfo(dtype).min), dim=-1)
    if keep is not None:
        weights = weights.masked_fill(~keep, 0.0)
    weights = torch.dropout(weights, dropout, train=True) if dropout > 0.0 else weights
    return torch.bmm(weights.to(value_dtype), value.to(value_dtype)).to(value.dtype)


def product_dtype(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products with the value, which dominate: its own, unless it is slow (float16 on CPU)."""
    return dtype if value.dtype == torch.float16 and value.device.type == "cpu" else value.dtype


def _select(bias: Tensor, keys: int, column: Tensor | None) -> Tensor:
    """Return the bias between the query and each key, `[S, 1]` or `[B, S, 1]`."""
    middle = bias.shape[0] // 2
    if column is None:
        return bias[middle - keys + 1 : middle + 1, None]
    place = torch.arange(keys, device=bias.device) + (middle - column[:, None])
    return bias[place.clamp(0, bias.shape[0] - 1)][..., None]


def _keep(
    keys: int, mask: Tensor | None, column: Tensor | None, start: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return the mask of the visible keys, `[B, 1, S]`, or None if all are visible."""
    keep = None if mask is None else mask[:, None]
    if column is None and start is None:
        return keep
    place = torch.arange(keys, device=device)
    if column is not None:
        later = place > column[:, None, None]
        keep = ~later if keep is None else keep & ~later
    if start is not None:
        started = place >= -start[:, None, None]
        keep = started if keep is None else keep & started
    return keep
