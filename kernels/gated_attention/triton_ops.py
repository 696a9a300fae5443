"""Gated attention with Triton kernels, as custom operators."""

import torch

from luna_mega.kernels import _op
from luna_mega.kernels.common.triton_launch import random_seed
from luna_mega.kernels.gated_attention import triton_backward, triton_forward

INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? mask, Tensor? bounds, str function, bool causal, "
    "SymInt chunk, SymInt offset, float dropout, Tensor? seed, str precision"
)


def attend(
    query, key, value, bias, mask, function, causal, chunk_size, offset, dropout, cu_seqlens=None, max_seqlen=None
) -> torch.Tensor:
    """Return `reference.attend`, for varlen sequences if `cu_seqlens` is given."""
    bounds = None
    if cu_seqlens is not None:
        bounds = segment_bounds(cu_seqlens, chunk_size, query.shape[1])
        chunk_size = max_seqlen if chunk_size is None else chunk_size
    elif chunk_size is None:
        chunk_size = max(query.shape[1], key.shape[1])
    seed = random_seed(dropout, query.device)
    return torch.ops.luna_mega.gated_attention_triton(
        query, key, value, bias, mask, bounds, function, causal, max(chunk_size, 1), offset, dropout, seed,
        _op.float32_precision(),
    )[0]  # fmt: skip


def segment_bounds(cu_seqlens: torch.Tensor, chunk_size: int | None, total: int) -> torch.Tensor:
    """Return the start and the end (exclusive) of every chunk as tokens, `[segments, 2]` int32.

    The table has the maximum possible number of rows, `total // chunk_size` plus one per sequence; unused rows are
    empty segments.
    """
    cu_seqlens = cu_seqlens.to(torch.int32)
    if chunk_size is None:
        return torch.stack((cu_seqlens[:-1], cu_seqlens[1:]), dim=1)
    chunks = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    behind = chunks.cumsum(0, dtype=torch.int32)
    segment = torch.arange(total // chunk_size + len(chunks), device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(behind, segment, right=True).clamp(max=len(chunks) - 1)
    start = cu_seqlens[sequence] + (segment - behind[sequence] + chunks[sequence]) * chunk_size
    stop = cu_seqlens[sequence + 1]
    return torch.stack((torch.minimum(start, stop), torch.minimum(start + chunk_size, stop)), dim=1)


@torch.library.custom_op("luna_mega::gated_attention_triton", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)")
def _attend(*inputs):
    return triton_forward.forward(*inputs)


@_attend.register_fake
def _(query, key, value, bias, mask, bounds, function, *_):
    lse = query.shape[:2] if function == "softmax" else (0,)
    return value.new_empty(*query.shape[:2], value.shape[2]), query.new_empty(lse, dtype=torch.float32)


@torch.library.custom_op(
    "luna_mega::gated_attention_triton_backward",
    mutates_args=(),
    schema=f"(Tensor grad_output, Tensor? output, Tensor lse, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend_backward(grad_output, output, lse, query, *inputs):
    *gradients, grad_bias = triton_backward.backward(grad_output, output, lse, query, *inputs)
    return *gradients, query.new_empty(0) if grad_bias is None else grad_bias


@_attend_backward.register_fake
def _(grad_output, output, lse, query, key, value, bias, *_):
    grad_bias = query.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return *(x.new_empty(x.shape) for x in (query, key, value)), grad_bias


def _save_for_backward(ctx, inputs, output):
    query, key, value, bias, mask, bounds, *ctx.options, seed, ctx.precision = inputs
    attended = output[0] if ctx.options[0] == "softmax" else None
    ctx.save_for_backward(attended, output[1], query, key, value, bias, mask, bounds, seed)


def _backward(ctx, grad_output, _):
    *tensors, seed = ctx.saved_tensors
    *gradients, grad_bias = torch.ops.luna_mega.gated_attention_triton_backward(
        grad_output, *tensors, *ctx.options, seed, ctx.precision
    )
    return *gradients, None if tensors[5] is None else grad_bias, *[None] * 9


_attend.register_autograd(_backward, setup_context=_save_for_backward)
