"""Coefficients, powers and taps of the complex average from its parameters, in real numbers.

q = exp(log_decay + 2 pi i turn). The number of turns is float64: over thousands of positions a float32 angle would be
off by whole units. Only the angle that is left without whole turns is rounded to float32.
"""

import math
from typing import NamedTuple

import torch

from luna_mega.kernels._export import expm1
from luna_mega.kernels._op import without_autocast
from luna_mega.kernels.damped_ema import coefficients as damped


class Coefficients(NamedTuple):
    """log |q| and its angle in turns, `[D, N]`, p `[D, N]` and gamma / sqrt(N) `[D, N, 2]`; the turns are float64."""

    log_decay: torch.Tensor
    turn: torch.Tensor
    weight_in: torch.Tensor
    weight_out: torch.Tensor


def coefficients(
    input_logit: torch.Tensor, damping_logit: torch.Tensor, phase_logit: torch.Tensor, projection: torch.Tensor
) -> Coefficients:
    """Return the coefficients of the recurrence; the decay and p are those of a damped average without expansion."""
    states = input_logit.shape[1]
    one = torch.ones_like(input_logit)
    log_decay, weight_in, _ = damped.coefficients(input_logit, damping_logit, one, one)
    number = torch.arange(1, states + 1, dtype=torch.float64, device=one.device) / states
    turn = torch.sigmoid(phase_logit.double())[:, None] * number
    return Coefficients(log_decay, turn, weight_in, projection / math.sqrt(states))


def angle(turn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the angle of a number of turns, without whole turns."""
    return (turn - torch.round(turn)).to(dtype) * (2 * math.pi)


def powers(log_decay: torch.Tensor, turn: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return q^t as real pairs `[D, N, 2, E]` for the exponents t `[E]`, float64."""
    phase = angle(turn[..., None] * exponents, log_decay.dtype)
    size = torch.exp(log_decay[..., None] * exponents.to(log_decay.dtype))
    return torch.stack((size * torch.cos(phase), size * torch.sin(phase)), -2)


def powers_less_one(log_decay: torch.Tensor, turn: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return q^t - 1 for one exponent as real pairs `[D, N, 2]`, accurate where q is close to 1."""
    phase = angle(turn * exponent, log_decay.dtype)
    loss, sine = expm1(log_decay * exponent), torch.sin(phase)
    real = loss * torch.cos(phase) - 2.0 * torch.sin(0.5 * phase).square()
    return torch.stack((real, (loss + 1.0) * sine), -1)


def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of complex numbers, real pairs in the last dimension."""
    return b * a[..., :1] + torch.stack((-b[..., 1], b[..., 0]), -1) * a[..., 1:]


def complex_ema_coefficients(
    input_logit: torch.Tensor,
    damping_logit: torch.Tensor,
    phase_logit: torch.Tensor,
    projection: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:
    """Return the coefficients that `complex_ema_step` computes from the four parameters, as real pairs `[D, N, 2]`.

    They hold until the parameters change: q - 1, the weight of the input in the state, and the weights of the real and
    of the imaginary part of the state in y. `dtype`: the dtype of the states.
    """
    with without_autocast(input_logit.device.type):
        parameters = (x.to(dtype) for x in (input_logit, damping_logit, phase_logit, projection))
        log_decay, turn, weight_in, weight_out = coefficients(*parameters)
        entry = torch.stack((weight_in, torch.zeros_like(weight_in)), -1)
        return powers_less_one(log_decay, turn, 1), entry, weight_out * weight_out.new_tensor((1.0, -1.0))
