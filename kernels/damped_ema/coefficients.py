"""Coefficients and taps of the average from its parameters, with gradients in closed form.

Autograd would run through some sixty operations on tensors of a few thousand numbers, which takes as long as the
average of a short batch. The results are those of the plain operations bit for bit. Compiled, exported and traced
programs leave the gradients to autograd.
"""

import math

import torch
from torch import nn
from torch.autograd import Function

from luna_mega.kernels._export import expm1, in_program
from luna_mega.kernels._op import without_autocast
from luna_mega.kernels.damped_ema import reference
from luna_mega.kernels.damped_ema.reference import working_dtype

LEAST = 1e-30  # of q; below it the gradient of log q is 0


def coefficients(*parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `reference.coefficients`."""
    return (reference.coefficients if in_program() else _Coefficients.apply)(*parameters)


def ema_coefficients(
    input_logit: torch.Tensor,
    damping_logit: torch.Tensor,
    expansion: torch.Tensor,
    projection: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:
    """Return the coefficients that `damped_ema_step` computes from the four parameters `[D, N]`.

    They hold until the parameters change: q - 1, the weight of the input in the state, and the weight of the state in
    y. `dtype`: the dtype of the states.
    """
    with without_autocast(input_logit.device.type):
        parameters = (x.to(dtype) for x in (input_logit, damping_logit, expansion, projection))
        log_q, weight_in, weight_out = reference.coefficients(*parameters)
        return expm1(log_q), weight_in, weight_out


def from_parameters(run, coefficients=coefficients):
    """Return a function that takes parameters and calls `run` with the coefficients, in float32 or float64."""

    def run_parameters(x, parameters, **rest):
        dtype = working_dtype(x, parameters)
        made = coefficients(*(parameter.to(dtype) for parameter in parameters))
        for name in ("skip", "state", "initial_state"):
            if rest.get(name) is not None:
                rest[name] = rest[name].to(dtype)
        return run(x, coefficients=made, **rest)

    return run_parameters


def from_coefficients(run, compute=ema_coefficients):
    """Return a step that computes the coefficients where the call brings none."""

    def run_step(x, parameters, coefficients, skip, state, mask):
        dtype = working_dtype(x, parameters)
        if coefficients is None:
            coefficients = compute(*parameters, dtype=dtype)
        return run(x, state.to(dtype), coefficients, None if skip is None else skip.to(dtype), mask)

    return run_step


def series(weight: torch.Tensor, log_q: torch.Tensor, length: int) -> torch.Tensor:
    """Return sum_n weight_n q_n^t for t < length, `[R, length]` of `[R, N]`: q^(i c + j) = q^(i c) q^j."""
    return (_series if in_program() else _Series.apply)(weight, log_q, length)[0]


class _Coefficients(Function):
    @staticmethod
    def forward(*parameters):
        return reference.coefficients(*parameters)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx, grad_log_q, grad_in, grad_out):
        input_logit, damping_logit, expansion = ctx.saved_tensors
        weight, damping = torch.sigmoid(input_logit), torch.sigmoid(damping_logit)
        rest, undamped = torch.sigmoid(-input_logit), torch.sigmoid(-damping_logit)
        # Without cancellation: 1 - q is the product of two sigmoids, and q is a sum of their complements.
        q = torch.addcmul(rest, weight, undamped)
        # d log q / d logit = -(1 - sigmoid(logit)) (1 - q) / q
        through = (grad_log_q * weight * damping / q).masked_fill(q < LEAST, 0.0)
        grad_expansion = grad_in * weight
        grad_input = torch.addcmul(-through, grad_expansion, expansion) * rest
        return grad_input, -through * undamped, grad_expansion, grad_out / math.sqrt(grad_out.shape[-1])


def _series(weight, log_q, length):
    inner = 16 if length <= 256 else 64
    outer = torch.arange(-(-length // inner), device=log_q.device, dtype=log_q.dtype) * inner
    coarse = torch.exp(log_q[..., None] * outer)
    fine = torch.exp(log_q[..., None] * torch.arange(inner, device=log_q.device, dtype=log_q.dtype))
    return ((coarse * weight[..., None]).mT @ fine).flatten(-2)[..., :length], coarse, fine


class _Series(Function):
    @staticmethod
    def forward(weight, log_q, length):
        return _series(weight, log_q, length)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output[1:])

    @staticmethod
    def backward(ctx, grad, *_):
        if grad is None:
            return None, None, None
        weight, coarse, fine = ctx.saved_tensors
        blocks, inner = coarse.shape[2], fine.shape[2]
        grad = nn.functional.pad(grad, (0, blocks * inner - grad.shape[1])).unflatten(1, (blocks, inner))
        position = torch.arange(blocks * inner, device=grad.device, dtype=grad.dtype).view(blocks, inner)
        # Sums over the positions t within a block, of q^t and of t q^t.
        plain, lagged = (coarse * (fine @ x.mT) for x in (grad, position * grad))
        return plain.sum(-1), lagged.sum(-1) * weight, None
