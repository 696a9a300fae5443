"""The damped EMA in Triton as PyTorch operators."""

import torch

from luna_mega.kernels.damped_ema.triton_backward import backward
from luna_mega.kernels.damped_ema.triton_forward import forward


def damped_ema(
    x, coefficients, skip=None, mask=None, shift=False, initial_state=None, return_state=False,
    cu_seqlens=None, max_seqlen=0,
):  # fmt: skip
    """`reference.damped_ema` without truncation; with `cu_seqlens` of sequences laid end to end."""
    # Programs run through channels, so channels come last.
    coefficients = (rows.mT.contiguous() for rows in coefficients)
    initial = None if initial_state is None else initial_state.mT.contiguous()
    output, last = torch.ops.luna_mega.damped_ema_triton(
        x, mask, skip, *coefficients, initial, return_state, shift, cu_seqlens, max_seqlen
    )
    return output, last.mT.contiguous() if return_state else None


@torch.library.custom_op("luna_mega::damped_ema_triton", mutates_args=())
def _damped_ema(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    skip: torch.Tensor | None,
    log_q: torch.Tensor,
    weight_in: torch.Tensor,
    weight_out: torch.Tensor,
    initial_state: torch.Tensor | None,
    return_state: bool,
    shift: bool,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward`."""
    tensors = _contiguous(mask, skip, log_q, weight_in, weight_out, initial_state)
    return forward(x, *tensors, return_state, shift, cu_seqlens, max_seqlen)


@_damped_ema.register_fake
def _(x, mask, skip, log_q, weight_in, weight_out, initial_state, return_state, shift, cu_seqlens, max_seqlen):
    sequences = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    last = log_q.new_empty((sequences, len(log_q), x.shape[2]) if return_state else 0)
    return x.new_empty(x.shape), last


@torch.library.custom_op("luna_mega::damped_ema_triton_backward", mutates_args=())
def _damped_ema_backward(
    gradient: torch.Tensor,
    last_gradient: torch.Tensor | None,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    skip: torch.Tensor | None,
    log_q: torch.Tensor,
    weight_in: torch.Tensor,
    weight_out: torch.Tensor,
    initial_state: torch.Tensor | None,
    shift: bool,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
) -> list[torch.Tensor]:
    """`backward`."""
    last_gradient, mask, *rest = _contiguous(last_gradient, mask, skip, log_q, weight_in, weight_out, initial_state)
    return backward(gradient, last_gradient, x, mask, *rest, shift, cu_seqlens, max_seqlen)


@_damped_ema_backward.register_fake
def _(gradient, last_gradient, x, mask, skip, log_q, weight_in, weight_out, initial_state, *_):
    inputs = (x, skip, log_q, weight_in, weight_out, initial_state)
    return [log_q.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs]


def _contiguous(*tensors):
    return (None if tensor is None else tensor.contiguous() for tensor in tensors)


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.return_state, ctx.shift, cu_seqlens, ctx.max_seqlen = inputs
    ctx.save_for_backward(*tensors, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient, last_gradient):
    *tensors, cu_seqlens = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(tensors[0])
    grads = torch.ops.luna_mega.damped_ema_triton_backward(
        gradient, last_gradient if ctx.return_state else None, *tensors, ctx.shift, cu_seqlens, ctx.max_seqlen
    )
    x, _, *rest = tensors
    grad_x, *grads = (None if tensor is None else grad for tensor, grad in zip((x, *rest), grads, strict=True))
    return grad_x, None, *grads, None, None, None, None


_damped_ema.register_autograd(_backward, setup_context=_save_for_backward)
