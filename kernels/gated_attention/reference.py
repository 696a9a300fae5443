"""The attention of Mega's gated layer as the paper writes it (sections 3.2 to 3.5).

This file is the specification: every faster path is tested against it. Shapes: query `[B, T, Z]`, key `[B, S, Z]`,
value `[B, S, V]`; one head. Masks are boolean, True = may be attended to.
"""

import math

import torch
from torch import nn

FUNCTIONS = ("softmax", "laplace", "relu2")

# Of the normal distribution whose cumulative function approximates squared ReLU: sqrt(1/2) and sqrt(1/(4 pi)), in the
# six digits of the original code.
LAPLACE_MEAN, LAPLACE_DEVIATION = 0.707107, 0.282095


def laplace(scores: torch.Tensor) -> torch.Tensor:
    """(1 + erf((s - mean) / (deviation sqrt(2)))) / 2."""
    return 0.5 * (1.0 + torch.erf((scores - LAPLACE_MEAN) / (LAPLACE_DEVIATION * math.sqrt(2.0))))


def relu2(scores: torch.Tensor) -> torch.Tensor:
    """Squared ReLU."""
    return torch.relu(scores).square()


def divisor(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, function: str, causal: bool, offset: int
) -> torch.Tensor | float:
    """sqrt(Z) for softmax; else the number of real keys, or i + 1 for the query at i where the attention is causal."""
    if function == "softmax":
        return math.sqrt(query.shape[-1])
    if causal:
        return 1.0 + offset + torch.arange(query.shape[-2], device=query.device)[:, None]
    return max(key.shape[-2], 1) if mask is None else mask.sum(dim=-1).clamp(min=1)[..., None, None]


def weights(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    function: str,
    causal: bool,
    offset: int = 0,
) -> torch.Tensor:
    """f(Q K^T / divisor + bias) for query `[..., T, Z]`, key `[..., S, Z]` and mask `[..., S]`: `[..., T, S]`.

    Computed in float32 (float64 for float64 inputs). A query with no key to attend to has weights of 0.
    """
    position = offset + torch.arange(query.shape[-2], device=query.device)
    lag = torch.arange(key.shape[-2], device=query.device) - position[:, None]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) / divisor(query, key, mask, function, causal, offset)
    if bias is not None:
        scores = scores + bias.to(wide)[bias.shape[0] // 2 + lag]
    keep = lag <= 0 if causal else torch.ones_like(lag, dtype=torch.bool)
    if mask is not None:
        keep = keep & mask[..., None, :]
    if function == "softmax":
        result = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(dim=-1)
    else:
        result = {"laplace": laplace, "relu2": relu2}[function](scores)
    return result.masked_fill(~keep, 0.0)


def attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    function: str = "softmax",
    causal: bool = False,
    chunk_size: int | None = None,
    mask: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """`weights` within every chunk, `[B, chunks, C, C]`; without chunks `[B, 1, T, S]`. Arguments as `attend`."""
    if chunk_size is not None and mask is None:
        mask = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
    query, key, mask = (None if x is None else into_chunks(x, chunk_size) for x in (query, key, mask))
    return weights(query, key, bias, mask, function, causal, offset)


def into_chunks(x: torch.Tensor, chunk_size: int | None) -> torch.Tensor:
    """`[B, T, ...]` -> `[B, chunks, C, ...]`; a last chunk that is short is filled up with 0 (section 3.5)."""
    if chunk_size is None:
        return x[:, None]
    size = min(chunk_size, x.shape[1])
    padding = (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % size)
    return nn.functional.pad(x, padding).unflatten(1, (-1, size))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    function: str,
    causal: bool,
    chunk_size: int | None = None,
    offset: int = 0,
    dropout: float = 0.0,
) -> torch.Tensor:
    """f(Q K^T / divisor + bias) V, `[B, T, V]`, for a bias vector `[2M - 1]` with the distance j - i = 0 at M - 1."""
    options = {"function": function, "causal": causal, "chunk_size": chunk_size, "mask": mask, "offset": offset}
    result = torch.dropout(attention_weights(query, key, bias, **options).to(value.dtype), dropout, train=True)
    return (result @ into_chunks(value, chunk_size)).flatten(1, 2)[:, : query.shape[1]]
