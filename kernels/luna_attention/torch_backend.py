"""Pack and unpack attention in PyTorch with the fused SDPA kernels; memory is linear in the length."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .._custom_operator import differentiate_formula, register
from .._mode import EXPORTED, TRANSFORMED, mode
from ..dropout import dropout as drop
from ..upcast import upcast_dtype
from . import reference


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Return `reference.attend` without the weights. Shapes `[B, T, H, K]`, mask `[B, M]`."""
    current = mode()
    if current == TRANSFORMED:  # PyTorch's fused kernels have no tangents and no second derivatives
        return reference.attend(query, key, value, mask, scale, dropout)[0]
    # Exported programs must not depend on this package, so export uses PyTorch's own operator.
    if query.device.type != "cpu" or current == EXPORTED:
        return sdpa(query, key, value, mask, scale, dropout)
    if dropout > 0.0 and not torch.compiler.is_compiling():
        return _in_steps(query, key, value, mask, scale, dropout)
    # The CPU kernel divides by the lengths, which crashes the process if one is 0.
    if dropout > 0.0 or not query.numel() or not key.numel():
        return sdpa(query, key, value, mask, scale, dropout)
    if torch.compiler.is_compiling():  # the compiler would decompose the kernel and materialize the weights
        return operator(query, key, value, mask, scale)[0]
    if not torch.is_grad_enabled():
        return flash(query, key, value, mask, scale)[0]
    return _Flash.apply(query, key, value, mask, scale)  # type: ignore[no-untyped-call]


def _in_steps(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Attend with dropout in separate operations.

    PyTorch has no fused CPU kernel for dropout, and its math path takes twice as long.
    """
    batch, _, heads, _ = query.shape
    tied = key is value
    query, key = (x.transpose(1, 2).flatten(0, 1) for x in (query, key))
    value = key if tied else value.transpose(1, 2).flatten(0, 1)
    scores = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=scale)
    dtype = upcast_dtype(scores)
    if mask is not None:
        masked = ~mask[:, None].expand(-1, heads, -1).flatten(0, 1)[:, None]
        scores = scores.to(dtype).masked_fill(masked, torch.finfo(dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=dtype)
    if mask is not None:
        weights = weights.masked_fill(masked, 0.0)
    output = torch.bmm(drop(weights.to(value.dtype), dropout), value)
    return output.unflatten(0, (batch, heads)).transpose(1, 2)


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Attend with the kernel selected by PyTorch, on any device."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if mask is None:
        output = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scale)
        return output.transpose(1, 2)
    # Some SDPA kernels do not define rows without visible keys. Such a row attends to all keys; its result is then set
    # to 0.
    any_key = mask.any(dim=-1, keepdim=True)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(mask | ~any_key)[:, None, None, :], dropout_p=dropout, scale=scale
    )
    return output.transpose(1, 2).masked_fill(~any_key[:, :, None, None], 0.0)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask[:, None, None], 0.0, float("-inf")).to(dtype)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Return tensors `[B, H, T, K]` whose last dimension is contiguous, which PyTorch's CPU kernel does not check."""
    return [(x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in tensors]


def flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result of the CPU flash attention kernel and its log-sum-exp `[B, H, T]`.

    The inputs are `[B, T, H, K]` with any strides. The softmax is computed in float32. Result and log-sum-exp are
    0 for rows without visible keys.
    """
    output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(query, key, value),
        attn_mask=None if mask is None else _additive(mask, query.dtype),
        scale=scale,
    )
    return output.transpose(1, 2), log_sum_exp


def flash_backward(
    grad_output: Tensor, output: Tensor, log_sum_exp: Tensor, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, computed with the backward kernel of `flash`."""
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(grad_output, query, key, value, output),
        log_sum_exp,
        0.0,
        False,
        attn_mask=None if mask is None else _additive(mask, query.dtype),
        scale=scale,
    )
    return tuple(x.transpose(1, 2) for x in gradients)


def _formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, None]:
    return reference.attend(query, key, value, mask, scale)[0], None


class _Flash(Function):
    """The result of `flash` in eager mode, whose gradient can be differentiated; PyTorch's own cannot."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        output, log_sum_exp = flash(query, key, value, mask, scale)
        ctx.save_for_backward(output, log_sum_exp, query, key, value, mask)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        output, log_sum_exp, query, key, value, mask = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = [query, key, value, mask, ctx.scale]
            return (*differentiate_formula(_formula, inputs, (0, 1, 2), [grad], (0,)), None, None)
        return (*flash_backward(grad, output, log_sum_exp, query, key, value, mask, ctx.scale), None, None)


def empty(query: Tensor, **_rest: object) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the result and the log-sum-exp."""
    batch, length, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((batch, heads, length), dtype=upcast_dtype(query))


def flops(query: Tensor, key: Tensor, **_rest: object) -> tuple[int, int]:
    """Return the FLOPs of an operator and of its gradient; with varlen tokens one of the two has a batch size of 1."""
    product = 2 * min(len(query), len(key)) * query.shape[1] * key.shape[1] * query.shape[2] * query.shape[3]
    return 2 * product, 5 * product


operator = register(
    "attend",
    "Tensor query, Tensor key, Tensor value, Tensor? mask, float scale",
    "(Tensor, Tensor)",
    lambda *inputs: tuple(x.contiguous() for x in flash(*inputs)),
    empty,
    lambda *inputs: [x.contiguous() for x in flash_backward(*inputs)],
    flops=flops,
    differentiable=("query", "key", "value"),
    saved="Tensor output, Tensor log_sum_exp",
    save=lambda inputs, outputs: outputs,
    formula=_formula,
)
