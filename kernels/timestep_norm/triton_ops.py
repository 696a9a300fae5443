"""Timestep norm with Triton kernels, as custom operators."""

from typing import Any

import torch
from torch import Tensor

from .._custom_operator import has_gradients, register
from . import torch_backend, triton_kernels
from .reference import TimestepNormState

_operator = torch_backend.register_norm("timestep_norm_triton", triton_kernels)


def timestep_norm(x: Tensor, groups: int, **call: Any) -> tuple[Tensor, TimestepNormState]:
    """Return `reference.timestep_norm`."""
    return torch_backend.timestep_norm(x, groups, run=_operator, **call)


def step(
    x: Tensor, state: TimestepNormState, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float,
    mask: Tensor | None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Return `reference.step`, in one launch if no gradient is required."""
    if has_gradients((x, weight, bias, state.mean, state.variance)):
        mask = None if mask is None else mask[:, None]
        y, state = timestep_norm(x[:, None], groups, weight=weight, bias=bias, eps=eps, mask=mask, initial_state=state)
        return y[:, 0], state
    y, *state = _step_operator(x, weight, bias, mask, *state, groups, eps)
    return y, TimestepNormState(*state)


def _step_fake(
    x: Tensor, count: Tensor, mean: Tensor, variance: Tensor, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(count), torch.empty_like(mean), torch.empty_like(variance)


_step_operator = register(
    "timestep_norm_step_triton",
    torch_backend.INPUTS,
    "(Tensor, Tensor, Tensor, Tensor)",
    triton_kernels.step,
    _step_fake,
    flops=lambda **_: (0, 0),
)
