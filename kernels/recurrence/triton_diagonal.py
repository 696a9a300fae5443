"""The functions of `triton_coefficients` for `diagonal_ssm`, in PyTorch: the parameters are already coefficients.

The parameters are log |q|, the turns of q (float64, None = real), None, and the weight of the state.
"""

import torch
from torch import Tensor

from .coefficients import to_radians


def damped(log_decay: Tensor, turns: None, weight_in: None, weight: Tensor) -> Tensor:
    """Return log q, 1 and the weight of the state, `[3, N, R]` float32."""
    return torch.stack((log_decay, torch.ones_like(log_decay), weight)).mT.float().contiguous()


def complex_factors(log_decay: Tensor, turns: Tensor, weight_in: None, weight: Tensor) -> Tensor:
    """Return the 7 factors of `triton_coefficients.complex_factors`, 1, and the parts of the weight, `[10, N, D]`."""
    turns = turns - torch.round(turns)
    q = _q(log_decay, turns)
    rounded = torch.complex(q.real.float(), q.imag.float()).to(q.dtype)
    lost = torch.where(q.abs() > 1e-20, (q - rounded) / q, 0.0)
    rates = q.real, q.imag, lost.real, lost.imag, log_decay.double(), turns, turns - turns.float()
    factors = torch.stack((*rates, torch.ones_like(turns), *weight.double().unbind(-1)))
    return factors.mT.float().contiguous()


def backward(
    sums: Tensor, input_sums: Tensor | None, log_decay: Tensor, turns: Tensor | None, weight_in: None, weight: Tensor
) -> list[Tensor | None]:
    """Return the gradients of log |q|, the turns, None and the weight from the sums of `triton_scan_backward.backward`.

    If `input_sums` is None, the slopes of a real model are not yet multiplied by the weight.
    """
    if turns is None:
        grad_weight, slope = sums.transpose(0, 1).mT.flatten(1, 2)
        slope = slope * torch.exp(log_decay)
        slope = slope * weight if input_sums is None else slope
        return [slope.contiguous(), None, None, grad_weight.contiguous()]
    real, imaginary, slope_real, slope_imaginary = sums.reshape(4, *sums.shape[-2:]).mT.unbind()
    slope = torch.complex(slope_real.double(), slope_imaginary.double()) * _q(log_decay, turns)
    grad_weight = torch.stack((real, -imaginary), -1)
    grad_turns = (-2 * torch.pi * slope.imag).contiguous()
    return [slope.real.to(log_decay.dtype).contiguous(), grad_turns, None, grad_weight.contiguous()]


def _q(log_decay: Tensor, turns: Tensor) -> Tensor:
    return torch.polar(torch.exp(log_decay.double()), to_radians(turns, torch.float64))
