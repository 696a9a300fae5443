"""The complex average by Triton kernels, as custom operators."""

import torch

from luna_mega.kernels.common.triton_average import register_gradient
from luna_mega.kernels.common.triton_launch import contiguous
from luna_mega.kernels.complex_ema import triton_kernels
from luna_mega.kernels.complex_ema.coefficients import times

INPUTS = (
    "Tensor x, Tensor? mask, Tensor? skip, Tensor log_decay, Tensor turn, Tensor weight_in, Tensor weight_out, "
    "Tensor? initial"
)
STEP_INPUTS = "Tensor x, Tensor state, Tensor change, Tensor weight_in, Tensor weight_out, Tensor? skip, Tensor? mask"


def complex_ema(
    x, coefficients, skip=None, mask=None, initial_state=None, return_state=False, cu_seqlens=None, max_seqlen=0
):
    """Return `reference.complex_ema`, for ragged sequences where there are `cu_seqlens`."""
    output, last = torch.ops.luna_mega.complex_ema_triton(
        x, mask, skip, *coefficients, initial_state, return_state, cu_seqlens, max_seqlen
    )
    return output, last if return_state else None


def step(x, state, coefficients, skip, mask):
    """Return `reference.step`."""
    return torch.ops.luna_mega.complex_ema_step_triton(x, state, *coefficients, skip, mask)


@torch.library.custom_op(
    "luna_mega::complex_ema_triton",
    mutates_args=(),
    schema=f"({INPUTS}, bool return_state, Tensor? cu_seqlens, SymInt max_seqlen) -> (Tensor, Tensor)",
)
def _complex_ema(x, *inputs):
    return triton_kernels.forward(x, *contiguous(*inputs[:7]), *inputs[7:])


@_complex_ema.register_fake
def _(x, mask, skip, log_decay, turn, weight_in, weight_out, initial, return_state, cu_seqlens, max_seqlen):
    sequences = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    return x.new_empty(x.shape), log_decay.new_empty((sequences, *weight_out.shape) if return_state else 0)


@torch.library.custom_op(
    "luna_mega::complex_ema_triton_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor? last_gradient, {INPUTS}, Tensor? cu_seqlens, SymInt max_seqlen) -> Tensor[]",
)
def _complex_ema_backward(gradient, last_gradient, x, *inputs):
    return triton_kernels.backward(gradient, last_gradient, x, *contiguous(*inputs[:7]), *inputs[7:])


@_complex_ema_backward.register_fake
def _(gradient, last_gradient, x, mask, skip, log_decay, turn, weight_in, weight_out, initial, *_):
    inputs = (x, skip, log_decay, turn, weight_in, weight_out, initial)
    return [log_decay.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs]


register_gradient(_complex_ema, _complex_ema_backward, tensors=8)


@torch.library.custom_op(
    "luna_mega::complex_ema_step_triton", mutates_args=(), schema=f"({STEP_INPUTS}) -> (Tensor, Tensor)"
)
def _step(x, *inputs):
    return triton_kernels.step(x, *contiguous(*inputs))


@_step.register_fake
def _(x, state, *_):
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _save_step_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def _backward_step(ctx, gradient, next_gradient):
    x, state, change, weight_in, weight_out, skip, mask, after = ctx.saved_tensors
    gradient, value = gradient.float(), x.float()
    kept = value if mask is None else value.masked_fill(~mask[:, None], 0.0)
    arriving = next_gradient + gradient[..., None, None] * weight_out
    received = arriving if mask is None else arriving.masked_fill(~mask[:, None, None, None], 0.0)
    conjugate = received.new_tensor((1.0, -1.0))
    grad_x = (received * weight_in).flatten(2).sum(-1)
    grad_skip = None
    if skip is not None:
        grad_x, grad_skip = grad_x + gradient * skip, (gradient * kept).sum(0)
    if mask is not None:
        grad_x = grad_x.masked_fill(~mask[:, None], 0.0)
    return (
        grad_x.to(x.dtype),
        arriving + times(change * conjugate, received),
        times(state * conjugate, received).sum(0),
        (received * kept[..., None, None]).sum(0),
        (gradient[..., None, None] * after).sum(0),
        grad_skip,
        None,
    )


_step.register_autograd(_backward_step, setup_context=_save_step_for_backward)
