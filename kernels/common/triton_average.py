"""Autograd of moving averages that are custom operators."""

from collections.abc import Callable

import torch
from torch.library import CustomOpDef


def register_gradient(average: CustomOpDef, backward: Callable, tensors: int) -> None:
    """Register `backward` as the gradient of a moving average.

    The operator's arguments are x, mask, skip, coefficients and initial state (`tensors` tensors in total), then
    `return_state`, operator-specific options, `cu_seqlens` and `max_seqlen`. The arguments of `backward` are the
    gradients of output and last state, the tensors, the options, `cu_seqlens` and `max_seqlen`. It returns the
    gradients of all tensors except the mask.
    """

    def save(ctx, inputs, output):
        ctx.return_state, *ctx.options, cu_seqlens, ctx.max_seqlen = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], cu_seqlens)
        ctx.set_materialize_grads(False)

    def run(ctx, gradient, last_gradient):
        *given, cu_seqlens = ctx.saved_tensors
        if gradient is None:
            gradient = torch.zeros_like(given[0])
        last_gradient = last_gradient if ctx.return_state else None
        grads = backward(gradient, last_gradient, *given, *ctx.options, cu_seqlens, ctx.max_seqlen)
        x, _, *rest = given
        grad_x, *grads = (None if tensor is None else grad for tensor, grad in zip((x, *rest), grads, strict=True))
        return grad_x, None, *grads, *[None] * (3 + len(ctx.options))

    average.register_autograd(run, setup_context=save)
