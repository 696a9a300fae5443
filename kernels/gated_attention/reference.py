"""Attention of Mega's gated layer as defined in the paper (sections 3.2 to 3.5).

This file is the specification: all faster implementations are tested against it. Shapes: query `[B, T, Z]`, key `[B, S,
Z]`, value `[B, S, V]`; one head. Masks are boolean, True = attend.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..upcast import upcast

FUNCTIONS = ("softmax", "laplace", "relu2")

# Mean and standard deviation of the normal distribution whose CDF approximates squared ReLU: sqrt(1/2) and
# sqrt(1/(4 pi)), with the six digits of the original code.
LAPLACE_MEAN, LAPLACE_DEVIATION = 0.707107, 0.282095


def laplace(scores: Tensor) -> Tensor:
    """Return (1 + erf((s - mean) / (deviation sqrt(2)))) / 2."""
    return 0.5 * (1.0 + torch.erf((scores - LAPLACE_MEAN) / (LAPLACE_DEVIATION * math.sqrt(2.0))))


def relu2(scores: Tensor) -> Tensor:
    """Return the squared ReLU."""
    return torch.relu(scores).square()


def weights(
    query: Tensor, key: Tensor, bias: Tensor | None, mask: Tensor | None, function: str, causal: bool,
    chunk_size: int | None = None, offset: int = 0, row_offset: Tensor | None = None, start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return f(Q K^T / divisor + bias) for query `[..., T, Z]`, key `[..., S, Z]` and mask `[..., S]`: `[..., T, S]`.

    Query i is in column offset + row_offset + i of the keys; column 0 is position `start` of its sequence. The bias
    depends on the distance in columns, chunks and the divisor depend on positions. The computation is in float32
    (float64 for float64 inputs). A query without visible keys has weights of 0.
    """
    column = torch.arange(key.shape[-2], device=key.device)
    row = offset + torch.arange(query.shape[-2], device=query.device)[:, None]
    if row_offset is not None:
        row = row + row_offset[:, None, None]
    lag = column - row
    keep = lag <= 0 if causal else torch.ones_like(lag, dtype=torch.bool)
    if mask is not None:
        keep = keep & mask[..., None, :]
    if start is not None:  # from here on column and row are positions
        column, row = (x + start[:, None, None] for x in (column, row))
        keep = keep & (column >= 0)
    if chunk_size is not None:
        keep = keep & (column // chunk_size == row // chunk_size)
        row = row % chunk_size
    if function == "softmax":
        divisor: float | Tensor = math.sqrt(query.shape[-1])
    else:
        divisor = (row + 1 if causal else keep.sum(dim=-1, keepdim=True)).clamp(min=1)
    query, key = upcast(query), upcast(key)
    scores = query @ key.transpose(-1, -2) / divisor
    if bias is not None:
        size = bias.shape[-1]
        scores = scores + bias.to(scores.dtype)[..., (size // 2 + lag).clamp(0, size - 1)]
    if function == "softmax":
        result = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(dim=-1)
    else:
        result = {"laplace": laplace, "relu2": relu2}[function](scores)
    return result.masked_fill(~keep, 0.0)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *scoring: Any, dropout: float = 0.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return f(Q K^T / divisor + bias) V, `[B, T, V]`, and the weights before dropout, `[B, T, S]`.

    `scoring` and `options` are the arguments of `weights` after the key. The bias is a vector `[2M - 1]` with the entry
    of distance j - i = 0 at index M - 1.
    """
    result = weights(query, key, *scoring, **options)
    return torch.dropout(result.to(value.dtype), dropout, train=True) @ value, result
