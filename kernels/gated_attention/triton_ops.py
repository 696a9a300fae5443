"""Gated attention with Triton kernels, as custom operators."""

import torch
from torch import Tensor

from .. import _dispatch
from .._custom_operator import no_second_derivative, register
from ..common.triton_launch import random_seed
from . import reference, torch_backend, triton_backward, triton_products

INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? mask, Tensor? bounds, str function, bool causal, "
    "SymInt chunk, SymInt offset, float dropout, Tensor? seed, str precision"
)


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, function: str, causal: bool,
    chunk_size: int | None, offset: int, dropout: float, cu_seqlens: Tensor | None = None, max_seqlen: int = 0,
) -> Tensor:  # fmt: skip
    """Return `reference.attend`, for varlen sequences if `cu_seqlens` is given."""
    bounds = None
    if cu_seqlens is not None:
        bounds = segment_bounds(cu_seqlens, chunk_size, query.shape[1])
        chunk_size = max_seqlen if chunk_size is None else chunk_size
    elif chunk_size is None:
        chunk_size = max(query.shape[1], key.shape[1])
    seed = random_seed(dropout, query.device)
    return _operator(
        query, key, value, bias, mask, bounds, function, causal, max(chunk_size, 1), offset, dropout, seed,
        _dispatch.float32_precision(),
    )[0]  # fmt: skip


def segment_bounds(cu_seqlens: Tensor, chunk_size: int | None, total: int) -> Tensor:
    """Return the start and the end (exclusive) of every chunk as tokens, `[segments, 2]` int32.

    The table has the maximum possible number of rows, `total // chunk_size` plus one per sequence; unused rows are
    empty segments.
    """
    cu_seqlens = cu_seqlens.to(torch.int32)
    if chunk_size is None:
        return torch.stack((cu_seqlens[:-1], cu_seqlens[1:]), dim=1)
    chunks = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    ends = chunks.cumsum(0, dtype=torch.int32)
    segment = torch.arange(total // chunk_size + len(chunks), device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(ends, segment, right=True).clamp(max=len(chunks) - 1)
    start = cu_seqlens[sequence] + (segment - ends[sequence] + chunks[sequence]) * chunk_size
    stop = cu_seqlens[sequence + 1]
    return torch.stack((torch.minimum(start, stop), torch.minimum(start + chunk_size, stop)), dim=1)


def _fake(query: Tensor, value: Tensor, function: str, **_: object) -> tuple[Tensor, Tensor]:
    lse = query.shape[:2] if function == "softmax" else (0,)
    return value.new_empty(*query.shape[:2], value.shape[2]), query.new_empty(lse, dtype=torch.float32)


def _flops(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, chunk: int, **_: object
) -> tuple[int, int]:
    if bounds is None:
        keys = key.shape[1]
        pairs = query.shape[1] * keys if chunk >= keys else keys // chunk * chunk**2 + (keys % chunk) ** 2
        pairs *= len(query)
    elif bounds.is_meta or type(bounds) is not Tensor:  # without values, such as fake tensors: the longest sequences
        pairs = query.shape[1] * min(chunk, key.shape[1])
    else:
        pairs = int(bounds.long().diff().square().sum())
    return torch_backend.count_flops(query, value, pairs, recompute=True)


def _formula(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, bounds: Tensor | None,
    function: str, causal: bool, chunk: int, offset: int, dropout: float, *_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    if bounds is not None or dropout > 0.0:
        raise no_second_derivative("gated_attention", " of varlen calls or with dropout")
    size = chunk if chunk < key.shape[1] else None
    scoring = (bias, mask, function, causal, size, offset)
    return reference.attend(query, key, value, *scoring)[0], None


_operator = register(
    "gated_attention_triton",
    INPUTS,
    "(Tensor, Tensor)",
    triton_products.forward,
    _fake,
    triton_backward.backward,
    flops=_flops,
    differentiable=("query", "key", "value", "bias"),
    saved="Tensor? output, Tensor lse",
    save=lambda inputs, outputs: (outputs[0] if inputs[6] == "softmax" else None, outputs[1]),
    formula=_formula,
)
