"""Compute the coefficients of the recurrence from the parameters of an operator, and powers of q in real numbers.

q = exp(log_decay + 2 pi i turns); `turns` is None if q is real. Turns are float64: over thousands of positions a
float32 angle would be off by entire turns. Radians are rounded to float32 after removing entire turns.

The gradients of the coefficients are in closed form. Autograd would run some sixty operations on tensors of a few
thousand numbers, which takes as long as the average of a short batch. Compiled and exported programs use autograd.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .._dispatch import Arguments, without_autocast
from .._export import expm1, log1p
from .._mode import TRANSFORMED, mode
from ..upcast import upcast_dtype

LEAST = 1e-30  # lower bound of q; below, the gradient of log q is 0


class Coefficients(NamedTuple):
    """Coefficients of h_t = q h_{t-1} + p x_t, y_t = Re sum_n w_n h_{t,n}, `[R, N]` each.

    `log_decay` is log |q|, `turns` the angle of q in revolutions (float64, None = real), `weight_in` p, and
    `weight_out` w, for complex states real pairs `[D, N, 2]`.
    """

    log_decay: Tensor
    turns: Tensor | None
    weight_in: Tensor
    weight_out: Tensor

    def channel_rows(self, block: slice) -> "Coefficients":
        """Return some of the R rows."""
        turns = None if self.turns is None else self.turns[block]
        return Coefficients(self.log_decay[block], turns, self.weight_in[block], self.weight_out[block])

    @property
    def components(self) -> int:
        """P, the number of real numbers in a state: 1 or 2."""
        return 1 if self.turns is None else 2


def with_coefficients(
    compute: Callable[..., Any] | None, x: Tensor, parameters: tuple[Tensor, ...], coefficients: Any = None, **rest: Any
) -> Arguments:
    """Return a call with coefficients instead of parameters, in float32 or float64.

    `compute` returns the coefficients of the parameters; None = use the parameters as coefficients. A call of a step
    may already contain `coefficients`.
    """
    dtype = upcast_dtype(x, *parameters)
    if coefficients is None:
        coefficients = tuple([parameter.to(dtype) for parameter in parameters])
        coefficients = coefficients if compute is None else compute(*coefficients)
    for name in ("skip", "state", "initial_state"):
        if (value := rest.get(name)) is not None and value.dtype != dtype:  # `to` takes time even without a conversion
            rest[name] = value.to(dtype)
    return {"x": x, "coefficients": coefficients, **rest}


def log_decay(input_logit: Tensor, damping_logit: Tensor) -> Tensor:
    """Return log q = log(1 - sigmoid(input_logit) sigmoid(damping_logit)), at least log(1e-30), with finite gradients.

    For the product s of both sigmoids, log(1 - s) loses slow decays, for which s is below the rounding error of 1;
    log1p(-s) loses fast decays, for which s rounds to 1.
    """
    product = torch.sigmoid(input_logit) * torch.sigmoid(damping_logit)
    log_product = nn.functional.logsigmoid(input_logit) + nn.functional.logsigmoid(damping_logit)
    is_fast = product > 0.5
    # Both forms are evaluated everywhere, so each gets an argument at which its gradient is finite. The gradient of
    # `clamp` at a limit is 0 since torch 2.14, so `clamp` cannot select a product of exactly 0.5.
    slow = log1p(-torch.where(is_fast, 0.5, product))
    fast = torch.log(-torch.expm1(torch.where(is_fast, log_product, -math.log(2)).clamp(max=-LEAST)))
    return torch.where(is_fast, fast, slow)


def damped_formula(
    input_logit: Tensor, damping_logit: Tensor, expansion: Tensor, projection: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log q, the weight p beta of the input in the state, and the weight eta / sqrt(N) of the state in y."""
    weight_in = torch.sigmoid(input_logit) * expansion
    return log_decay(input_logit, damping_logit), weight_in, projection / math.sqrt(projection.shape[-1])


def damped_coefficients(*parameters: Tensor) -> Coefficients:
    """Return the coefficients of the recurrence from those of `damped_formula`."""
    compute = _Coefficients.apply if torch.is_grad_enabled() and mode() < TRANSFORMED else damped_formula
    log_decay, weight_in, weight_out = compute(*parameters)
    return Coefficients(log_decay, None, weight_in, weight_out)


def complex_coefficients(
    input_logit: Tensor, damping_logit: Tensor, phase_logit: Tensor, projection: Tensor
) -> Coefficients:
    """Return the coefficients of the recurrence; |q| and p equal a damped average's without expansion."""
    states = input_logit.shape[1]
    one = torch.ones_like(input_logit)
    log_decay, _, weight_in, _ = damped_coefficients(input_logit, damping_logit, one, one)
    number = torch.arange(1, states + 1, dtype=torch.float64, device=one.device) / states
    turns = torch.sigmoid(phase_logit.double())[:, None] * number
    return Coefficients(log_decay, turns, weight_in, projection.contiguous() / math.sqrt(states))


def to_radians(turns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an angle in radians, without entire turns."""
    return (turns - torch.round(turns)).to(dtype) * (2 * math.pi)


def powers(log_decay: Tensor, turns: Tensor | None, exponents: Tensor) -> Tensor:
    """Return q^t as numbers of P real parts, `[R, N, P, E]`, for the integers t `[E]`."""
    size = torch.exp(log_decay[..., None] * exponents.to(log_decay.dtype))
    if turns is None:
        return size[..., None, :]
    radians = to_radians(turns[..., None] * exponents.double(), log_decay.dtype)
    return torch.stack((size * torch.cos(radians), size * torch.sin(radians)), -2)


def powers_less_one(log_decay: Tensor, turns: Tensor | None, exponent: int) -> Tensor:
    """Return q^t - 1 for one exponent, `[R, N, P]`, accurate for q close to 1."""
    loss = expm1(log_decay * exponent)
    if turns is None:
        return loss[..., None]
    radians = to_radians(turns * exponent, log_decay.dtype)
    real = loss * torch.cos(radians) - 2.0 * torch.sin(0.5 * radians).square()
    return torch.stack((real, (loss + 1.0) * torch.sin(radians)), -1)


def times(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of numbers whose 1 or 2 real parts are the last dimension."""
    if a.shape[-1] == 1:
        return a * b
    return b * a[..., :1] + torch.stack((-b[..., 1], b[..., 0]), -1) * a[..., 1:]


def conjugate(pairs: Tensor) -> Tensor:
    """Return the conjugates of real pairs, without a constant tensor, which CUDA graphs cannot copy to the device."""
    return torch.stack((pairs[..., 0], -pairs[..., 1]), -1)


def diagonal_coefficients(*parameters: Tensor) -> Coefficients:
    """Return the coefficients from log |q|, the angle of q in radians if q is complex, and the weight of the state."""
    # The exponential of a strided tensor is rounded differently, so that results would depend on the strides.
    log_decay, *radians, weight = (parameter.contiguous() for parameter in parameters)
    turns = radians[0].double() / (2 * math.pi) if radians else None
    return Coefficients(log_decay, turns, torch.ones_like(log_decay), weight)


def step_coefficients(coefficients: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
    """Return q - 1, p and w for steps, all as real pairs if q is complex.

    w is conjugated, so that Re(w h) is the sum of products of both components.
    """
    if coefficients.turns is None:
        return expm1(coefficients.log_decay), coefficients.weight_in, coefficients.weight_out
    entry = torch.stack((coefficients.weight_in, torch.zeros_like(coefficients.weight_in)), -1)
    return powers_less_one(coefficients.log_decay, coefficients.turns, 1), entry, conjugate(coefficients.weight_out)


def coefficients_of_steps(
    compute: Callable[..., Coefficients], dtype: torch.dtype, *parameters: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with without_autocast(parameters[0].device.type):
        return step_coefficients(compute(*(parameter.to(dtype) for parameter in parameters)))


def ema_coefficients(
    input_logit: Tensor,
    damping_logit: Tensor,
    expansion: Tensor,
    projection: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Return the coefficients that `damped_ema_step` computes from the four parameters `[D, N]`.

    They are valid until the parameters change: q - 1, the weight of the input in the state, and the weight of the state
    in y. `dtype`: the dtype of the states.
    """
    return coefficients_of_steps(damped_coefficients, dtype, input_logit, damping_logit, expansion, projection)


def complex_ema_coefficients(
    input_logit: Tensor,
    damping_logit: Tensor,
    phase_logit: Tensor,
    projection: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Return the coefficients that `complex_ema_step` computes from the four parameters, as real pairs `[D, N, 2]`.

    They are valid until the parameters change: q - 1, the weight of the input in the state, and the weights of the real
    and of the imaginary part of the state in y. `dtype`: the dtype of the states.
    """
    return coefficients_of_steps(complex_coefficients, dtype, input_logit, damping_logit, phase_logit, projection)


class _Coefficients(Function):
    forward = staticmethod(damped_formula)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, grad_log_q: Tensor, grad_in: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        input_logit, damping_logit, expansion = ctx.saved_tensors
        weight, damping = torch.sigmoid(input_logit), torch.sigmoid(damping_logit)
        rest, undamped = torch.sigmoid(-input_logit), torch.sigmoid(-damping_logit)
        # q = 1 - weight damping would lose digits by cancellation, so it is computed as a sum.
        q = torch.addcmul(rest, weight, undamped)
        # d log q / d logit = -(1 - sigmoid(logit)) (1 - q) / q
        through = (grad_log_q * weight * damping / q).masked_fill(q < LEAST, 0.0)
        grad_expansion = grad_in * weight
        grad_input = torch.addcmul(-through, grad_expansion, expansion) * rest
        return grad_input, -through * undamped, grad_expansion, grad_out / math.sqrt(grad_out.shape[-1])
