"""The damped EMA by Triton kernels, as custom operators."""

import torch

from luna_mega.kernels.common.triton_average import register_gradient
from luna_mega.kernels.common.triton_launch import contiguous
from luna_mega.kernels.damped_ema import triton_backward, triton_forward, triton_step

INPUTS = (
    "Tensor x, Tensor? mask, Tensor? skip, Tensor log_q, Tensor weight_in, Tensor weight_out, Tensor? initial_state"
)
OPTIONS = "bool shift, Tensor? cu_seqlens, SymInt max_seqlen"
STEP_INPUTS = (
    "Tensor x, Tensor state, Tensor input_logit, Tensor damping_logit, Tensor expansion, Tensor projection, "
    "Tensor? skip, Tensor? mask"
)


def damped_ema(
    x, coefficients, skip=None, mask=None, shift=False, initial_state=None, return_state=False,
    cu_seqlens=None, max_seqlen=0,
):  # fmt: skip
    """Return `reference.damped_ema` without truncation, for ragged sequences where there are `cu_seqlens`."""
    # A program reads neighbouring channels, so channels come last.
    coefficients = (rows.mT.contiguous() for rows in coefficients)
    initial = None if initial_state is None else initial_state.mT.contiguous()
    output, last = torch.ops.luna_mega.damped_ema_triton(
        x, mask, skip, *coefficients, initial, return_state, shift, cu_seqlens, max_seqlen
    )
    return output, last.mT.contiguous() if return_state else None


def step(x, state, parameters, skip, mask):
    """Return `reference.step` of the parameters: computing the coefficients first would take longer than the step."""
    return torch.ops.luna_mega.damped_ema_step_triton(x, state, *parameters, skip, mask)


@torch.library.custom_op(
    "luna_mega::damped_ema_triton",
    mutates_args=(),
    schema=f"({INPUTS}, bool return_state, {OPTIONS}) -> (Tensor, Tensor)",
)
def _damped_ema(x, *inputs):
    return triton_forward.forward(x, *contiguous(*inputs[:6]), *inputs[6:])


@_damped_ema.register_fake
def _(x, mask, skip, log_q, weight_in, weight_out, initial_state, return_state, shift, cu_seqlens, max_seqlen):
    sequences = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    last = log_q.new_empty((sequences, len(log_q), x.shape[2]) if return_state else 0)
    return x.new_empty(x.shape), last


@torch.library.custom_op(
    "luna_mega::damped_ema_triton_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor? last_gradient, {INPUTS}, {OPTIONS}) -> Tensor[]",
)
def _damped_ema_backward(gradient, last_gradient, x, *inputs):
    return triton_backward.backward(gradient, *contiguous(last_gradient), x, *contiguous(*inputs[:6]), *inputs[6:])


@_damped_ema_backward.register_fake
def _(gradient, last_gradient, x, mask, skip, log_q, weight_in, weight_out, initial_state, *_):
    inputs = (x, skip, log_q, weight_in, weight_out, initial_state)
    return [log_q.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs]


register_gradient(_damped_ema, _damped_ema_backward, tensors=7)


@torch.library.custom_op(
    "luna_mega::damped_ema_step_triton", mutates_args=(), schema=f"({STEP_INPUTS}) -> (Tensor, Tensor)"
)
def _step(x, *inputs):
    return triton_step.forward_step(x, *contiguous(*inputs))


@_step.register_fake
def _(x, state, *_):
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _save_step_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def _backward_step(ctx, gradient, next_gradient):
    x, state, *parameters, skip, mask, after = ctx.saved_tensors
    input_logit, damping_logit, expansion, projection = (parameter.float() for parameter in parameters)
    value, gradient, scale = x.float(), gradient.float(), projection.shape[1] ** -0.5
    gate, damping = torch.sigmoid(input_logit), torch.sigmoid(damping_logit)
    grad_skip = None
    if skip is not None:
        average = torch.addcmul((scale * projection * after).sum(-1), skip.float(), value)
        gradient = torch.ops.aten.silu_backward(gradient, average)
        grad_skip = (gradient * value).sum(0).to(skip.dtype)
    arriving = next_gradient + gradient[..., None] * (scale * projection)
    received = arriving if mask is None else arriving.masked_fill(~mask[:, None, None], 0.0)  # dropped: the state holds
    grad_x = (received * gate * expansion).sum(-1)
    if skip is not None:
        grad_x = grad_x + gradient * skip.float()
    grad_entry = (received * value[..., None]).sum(0)
    grad_loss = -(received * state).sum(0)  # of gate damping = 1 - q
    grads = (
        (grad_entry * expansion + grad_loss * damping) * gate * (1 - gate),
        grad_loss * gate * damping * (1 - damping),
        grad_entry * gate,
        scale * (gradient[..., None] * after).sum(0),
    )
    grads = (grad.to(parameter.dtype) for grad, parameter in zip(grads, parameters, strict=True))
    return grad_x.to(x.dtype), arriving - received * gate * damping, *grads, grad_skip, None


_step.register_autograd(_backward_step, setup_context=_save_step_for_backward)
