"""Compute the coefficients of both averages from their parameters, and powers of q in real numbers.

q = exp(log_decay + 2 pi i turn); `turn` is None if q is real. The number of turns is float64: over thousands of
positions a float32 angle would be off by entire turns. The angle is rounded to float32 after removing them.

The gradients of the coefficients are in closed form. Autograd would run some sixty operations on tensors of a few
thousand numbers, which takes as long as the average of a short batch. Compiled and exported programs use autograd.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._dispatch import Arguments, without_autocast
from .._export import expm1, is_eager
from ..upcast import as_complex, upcast_dtype
from . import reference


class Coefficients(NamedTuple):
    """log |q|, its angle in turns (float64, None = real), and the weights of the input in the state and of the state.

    `[R, N]` each. The last weight of a complex average is `[D, N, 2]`, real pairs.
    """

    log_decay: Tensor
    turn: Tensor | None
    weight_in: Tensor
    weight_out: Tensor

    def rows(self, block: slice) -> "Coefficients":
        """Return the coefficients of some rows."""
        turn = None if self.turn is None else self.turn[block]
        return Coefficients(self.log_decay[block], turn, self.weight_in[block], self.weight_out[block])

    @property
    def parts(self) -> int:
        """The real numbers in a state: 1 or 2."""
        return 1 if self.turn is None else 2


def with_coefficients(
    compute: Callable[..., Any], x: Tensor, parameters: tuple[Tensor, ...], coefficients: Any = None, **rest: Any
) -> Arguments:
    """Return a call with coefficients instead of parameters, in float32 or float64.

    `compute` returns the coefficients of the parameters. A step may get them from an earlier call.
    """
    dtype = upcast_dtype(x, *parameters)
    if coefficients is None:
        coefficients = compute(*(parameter.to(dtype) for parameter in parameters))
    for name in ("skip", "state", "initial_state"):
        if (value := rest.get(name)) is not None and value.dtype != dtype:  # `to` takes time in any case
            rest[name] = value.to(dtype)
    return {"x": x, "coefficients": coefficients, **rest}


def damped_coefficients(*parameters: Tensor) -> Coefficients:
    """Return `reference.damped_coefficients`."""
    compute = _Coefficients.apply if is_eager() else reference.damped_coefficients
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
    turn = torch.sigmoid(phase_logit.double())[:, None] * number
    return Coefficients(log_decay, turn, weight_in, projection.contiguous() / math.sqrt(states))


def angle(turn: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the angle of a number of turns, without entire turns."""
    return (turn - torch.round(turn)).to(dtype) * (2 * math.pi)


def powers(log_decay: Tensor, turn: Tensor | None, exponents: Tensor) -> Tensor:
    """Return q^t as numbers of P real parts, `[R, N, P, E]`, for the integers t `[E]`."""
    size = torch.exp(log_decay[..., None] * exponents.to(log_decay.dtype))
    if turn is None:
        return size[..., None, :]
    phase = angle(turn[..., None] * exponents.double(), log_decay.dtype)
    return torch.stack((size * torch.cos(phase), size * torch.sin(phase)), -2)


def powers_less_one(log_decay: Tensor, turn: Tensor | None, exponent: int) -> Tensor:
    """Return q^t - 1 for one exponent, `[R, N, P]`, accurate for q close to 1."""
    loss = expm1(log_decay * exponent)
    if turn is None:
        return loss[..., None]
    phase = angle(turn * exponent, log_decay.dtype)
    real = loss * torch.cos(phase) - 2.0 * torch.sin(0.5 * phase).square()
    return torch.stack((real, (loss + 1.0) * torch.sin(phase)), -1)


def times(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of numbers whose 1 or 2 real parts are the last dimension."""
    if a.shape[-1] == 1:
        return a * b
    return b * a[..., :1] + torch.stack((-b[..., 1], b[..., 0]), -1) * a[..., 1:]


def conjugate(pairs: Tensor) -> Tensor:
    """Return the conjugates of real pairs, without a constant tensor, which CUDA graphs cannot copy to the device."""
    return torch.stack((pairs[..., 0], -pairs[..., 1]), -1)


def damped_step_coefficients(*parameters: Tensor) -> tuple[Tensor, ...]:
    """Return `ema_coefficients` in the dtype of the parameters."""
    log_q, weight_in, weight_out = reference.damped_coefficients(*parameters)
    return expm1(log_q), weight_in, weight_out


def complex_step_coefficients(*parameters: Tensor) -> tuple[Tensor, ...]:
    """Return `complex_ema_coefficients` in the dtype of the parameters."""
    log_decay, turn, weight_in, weight_out = complex_coefficients(*parameters)
    entry = torch.stack((weight_in, torch.zeros_like(weight_in)), -1)
    return powers_less_one(log_decay, turn, 1), entry, conjugate(weight_out)


def reference_coefficients(change: Tensor, weight_in: Tensor, weight_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, q and the weight of the state, as in `reference.complex_coefficients`, from coefficients of a step."""
    if change.dim() == 2:
        return weight_in, change + 1.0, weight_out
    q, weight_out = as_complex(change) + 1.0, as_complex(conjugate(weight_out))
    return weight_in[..., 0], q, weight_out


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
    with without_autocast(input_logit.device.type):
        return damped_step_coefficients(*(x.to(dtype) for x in (input_logit, damping_logit, expansion, projection)))


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
    with without_autocast(input_logit.device.type):
        return complex_step_coefficients(*(x.to(dtype) for x in (input_logit, damping_logit, phase_logit, projection)))


class _Coefficients(Function):
    @staticmethod
    def forward(*parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return reference.damped_coefficients(*parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, grad_log_q: Tensor, grad_in: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        input_logit, damping_logit, expansion = ctx.saved_tensors
        weight, damping = torch.sigmoid(input_logit), torch.sigmoid(damping_logit)
        rest, undamped = torch.sigmoid(-input_logit), torch.sigmoid(-damping_logit)
        # Without cancellation: 1 - q is the product of two sigmoids, and q is a sum of their complements.
        q = torch.addcmul(rest, weight, undamped)
        # d log q / d logit = -(1 - sigmoid(logit)) (1 - q) / q
        through = (grad_log_q * weight * damping / q).masked_fill(q < reference.LEAST, 0.0)
        grad_expansion = grad_in * weight
        grad_input = torch.addcmul(-through, grad_expansion, expansion) * rest
        return grad_input, -through * undamped, grad_expansion, grad_out / math.sqrt(grad_out.shape[-1])
