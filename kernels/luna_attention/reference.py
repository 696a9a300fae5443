"""Luna's pack and unpack attention as defined in the paper (section 3.1, equations 3 to 5).

This file is the specification: all faster implementations are tested against it. Shapes: context `[B, M, H, K]`, packed
sequence P `[B, L, H, K]`, query `[B, T, H, K]`. Masks are boolean, True = attend.
"""

import torch
from torch import Tensor

from ..upcast import upcast


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return softmax(scale * Q K^T) V per head, `[B, T, H, K]`, and the weights `[B, H, T, M]`.

    Scores and softmax are float32 (float64 for float64 inputs). The result of a query without visible keys is 0.
    """
    scores = torch.einsum("bthk,bmhk->bhtm", upcast(query) * scale, upcast(key))
    if mask is not None:
        masked = ~mask[:, None, None, :]
        scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    if mask is not None:
        weights = weights.masked_fill(masked, 0.0)
    weights = torch.dropout(weights.to(value.dtype), dropout, train=True)
    return torch.einsum("bhtm,bmhk->bthk", weights, value), weights
