"""Both averages with Triton kernels, as custom operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from luna_mega.kernels._custom_operator import register
from luna_mega.kernels.common.triton_launch import contiguous
from luna_mega.kernels.moving_average import (
    triton_coefficients,
    triton_complex,
    triton_damped_backward,
    triton_damped_forward,
    triton_step,
)
from luna_mega.kernels.moving_average.coefficients import conjugate, times
from luna_mega.kernels.moving_average.torch_backend import flops

INPUTS = "Tensor x, Tensor? mask, Tensor? skip, {}, Tensor? initial, bool return_state{}, {}"
VARLEN = "Tensor? cu_seqlens, SymInt max_seqlen"
DAMPED = "Tensor input_logit, Tensor damping_logit, Tensor expansion, Tensor projection"
COMPLEX = "Tensor input_logit, Tensor damping_logit, Tensor phase_logit, Tensor projection"


def damped_ema(
    x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None, shift: bool,
    initial_state: Tensor | None, return_state: bool, cu_seqlens: Tensor | None = None, max_seqlen: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `reference.damped_ema` without truncation, for varlen sequences if `cu_seqlens` is given."""
    output, last, _ = _damped(x, mask, skip, *parameters, initial_state, return_state, shift, cu_seqlens, max_seqlen)
    return output, last if return_state else None


def complex_ema(
    x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, return_state: bool, cu_seqlens: Tensor | None = None, max_seqlen: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `reference.complex_ema`, for varlen sequences if `cu_seqlens` is given."""
    output, last = _complex(x, mask, skip, *parameters, initial_state, return_state, cu_seqlens, max_seqlen)
    return output, last if return_state else None


def damped_step(
    x: Tensor, state: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `reference.damped_step` from the parameters: computing coefficients would take longer than the step."""
    return _damped_one(x, state, *parameters, skip, mask)


def complex_step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `reference.complex_step`."""
    return _complex_one(x, state, *coefficients, skip, mask)


def _damped_forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    mask, skip, *parameters, initial, return_state, shift, cu_seqlens, max_seqlen = contiguous(*rest)
    coefficients = triton_coefficients.damped(*parameters)
    options = _channels_last(initial), return_state, shift, cu_seqlens, max_seqlen
    output, last = triton_damped_forward.forward(x, mask, skip, coefficients, *options)
    return output, last.mT.contiguous() if return_state else last, coefficients


def _damped_backward(
    gradient: Tensor, last_gradient: Tensor | None, coefficients: Tensor, x: Tensor, *rest: Any
) -> Any:
    mask, skip, *parameters, initial, return_state, shift, cu_seqlens, max_seqlen = contiguous(*rest)
    options = _channels_last(initial), return_state, shift, cu_seqlens, max_seqlen
    grad_x, grad_skip, grad_initial, *sums = triton_damped_backward.backward(
        gradient, _channels_last(last_gradient), x, mask, skip, coefficients, *options
    )
    grad_skip = None if skip is None else grad_skip.to(skip.dtype)
    grad_initial = None if initial is None else grad_initial.mT.to(initial.dtype).contiguous()
    return [grad_x, grad_skip, *triton_coefficients.damped_backward(*sums, *parameters), grad_initial]


def _channels_last(state: Tensor | None) -> Tensor | None:
    """Convert states `[B, D, N]` to float32 `[B, N, D]`, because a program reads adjacent channels."""
    return None if state is None else state.float().mT.contiguous()


def _register_average(
    kind: str, parameters: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Register the operators of an average and of its gradient."""
    is_complex = kind == "complex"

    def fake(
        x: Tensor, input_logit: Tensor, projection: Tensor, cu_seqlens: Tensor | None, return_state: bool, **_: object
    ) -> tuple[Tensor, ...]:
        # A bidirectional average has twice as many rows of parameters, but no states.
        shape = (len(x) if cu_seqlens is None else len(cu_seqlens) - 1, x.shape[2], *projection.shape[1:])
        last = x.new_empty(shape if return_state else 0, dtype=torch.float32)
        coefficients = x.new_empty((3, *input_logit.shape[::-1]), dtype=torch.float32)
        return x.new_empty(x.shape), last, *(() if is_complex else (coefficients,))

    return register(
        f"luna_mega::{kind}_ema_triton",
        INPUTS.format(parameters, "" if is_complex else ", bool shift", VARLEN),
        "(Tensor, Tensor)" if is_complex else "(Tensor, Tensor, Tensor)",
        forward,
        fake,
        backward,
        flops=lambda x, input_logit, **_: flops(x.shape[0] * x.shape[1] * input_logit.numel(), is_complex),
        differentiable=["x", "skip", *(name.split()[1] for name in parameters.split(", ")), "initial"],
        gradients=(0, 1),
        saved="" if is_complex else "Tensor coefficients",
        save=lambda inputs, outputs: outputs[2:],
    )


_damped = _register_average("damped", DAMPED, _damped_forward, _damped_backward)
_complex = _register_average(
    "complex",
    COMPLEX,
    lambda x, *rest: triton_complex.forward(x, *contiguous(*rest)),
    lambda grad, of_last, x, *rest: triton_complex.backward(grad, *contiguous(of_last), x, *contiguous(*rest)),
)


def _register_step(
    kind: str, parameters: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Register the operator of a step.

    `backward` receives the inputs, the next state and the gradients of the results.
    """
    inputs = f"Tensor x, Tensor state, {parameters}, Tensor? skip, Tensor? mask"
    is_complex = kind == "complex"

    def run_backward(gradient: Tensor, next_gradient: Tensor | None, after: Tensor, *inputs: Any) -> Any:
        next_gradient = torch.zeros_like(after) if next_gradient is None else next_gradient
        return contiguous(*backward(*inputs, after, gradient, next_gradient))

    return register(
        f"luna_mega::{kind}_ema_step_triton",
        inputs,
        "(Tensor, Tensor)",
        lambda x, *inputs: forward(x, *contiguous(*inputs)),
        lambda x, state, **_: (x.new_empty(x.shape), state.new_empty(state.shape)),
        run_backward,
        flops=lambda state, **_: flops(state.numel() // (1 + is_complex), is_complex),
        differentiable=[argument.split()[-1] for argument in inputs.split(", ")[:-1]],
        gradients=(0, 1),
        saved="Tensor after",
        save=lambda inputs, outputs: outputs[1:],
    )


def _damped_step_backward(x: Tensor, state: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    *parameters, skip, mask, after, gradient, next_gradient = rest
    input_logit, damping_logit, expansion, projection = (parameter.float() for parameter in parameters)
    value, gradient, scale = x.float(), gradient.float(), projection.shape[1] ** -0.5
    gate, damping = torch.sigmoid(input_logit), torch.sigmoid(damping_logit)
    grad_skip = None
    if skip is not None:
        average = torch.addcmul((scale * projection * after).sum(-1), skip.float(), value)
        gradient = torch.ops.aten.silu_backward(gradient, average)
        grad_skip = (gradient * value).sum(0).to(skip.dtype)
    arriving = next_gradient + gradient[..., None] * (scale * projection)
    # A dropped position does not change the state.
    received = arriving if mask is None else arriving.masked_fill(~mask[:, None, None], 0.0)
    grad_x = (received * gate * expansion).sum(-1)
    if skip is not None:
        grad_x = grad_x + gradient * skip.float()
    grad_entry = (received * value[..., None]).sum(0)
    grad_loss = -(received * state).sum(0)  # gradient of gate damping = 1 - q
    grads = (
        (grad_entry * expansion + grad_loss * damping) * gate * (1 - gate),
        grad_loss * gate * damping * (1 - damping),
        grad_entry * gate,
        scale * (gradient[..., None] * after).sum(0),
    )
    of_parameters = (grad.to(parameter.dtype) for grad, parameter in zip(grads, parameters, strict=True))
    return grad_x.to(x.dtype), arriving - received * gate * damping, *of_parameters, grad_skip


def _complex_step_backward(
    x: Tensor, state: Tensor, change: Tensor, weight_in: Tensor, weight_out: Tensor, skip: Tensor | None,
    mask: Tensor | None, after: Tensor, gradient: Tensor, next_gradient: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    gradient, value = gradient.float(), x.float()
    kept = value if mask is None else value.masked_fill(~mask[:, None], 0.0)
    arriving = next_gradient + gradient[..., None, None] * weight_out
    received = arriving if mask is None else arriving.masked_fill(~mask[:, None, None, None], 0.0)
    grad_x = (received * weight_in).flatten(2).sum(-1)
    grad_skip = None
    if skip is not None:
        grad_x, grad_skip = grad_x + gradient * skip, (gradient * kept).sum(0)
    if mask is not None:
        grad_x = grad_x.masked_fill(~mask[:, None], 0.0)
    return (
        grad_x.to(x.dtype),
        arriving + times(conjugate(change), received),
        times(conjugate(state), received).sum(0),
        (received * kept[..., None, None]).sum(0),
        (gradient[..., None, None] * after).sum(0),
        grad_skip,
    )


_damped_one = _register_step("damped", DAMPED, triton_step.damped_step, _damped_step_backward)
_complex_one = _register_step(
    "complex", "Tensor change, Tensor weight_in, Tensor weight_out", triton_step.complex_step, _complex_step_backward
)
