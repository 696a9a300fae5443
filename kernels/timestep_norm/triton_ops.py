"""Timestep norm with Triton kernels, as custom operators."""

import torch
from torch import Tensor

from .._custom_operator import has_gradients, register
from . import torch_backend, triton_kernels
from .reference import TimestepNormState

operator = torch_backend.register_norm("timestep_norm_triton", triton_kernels)


def step(
    x: Tensor, state: TimestepNormState, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float,
    mask: Tensor | None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Return `reference.step`, in one launch if no gradient is required."""
    if has_gradients((x, weight, bias, state.mean, state.variance)):
        arguments = x[:, None], groups, weight, bias, eps, None if mask is None else mask[:, None]
        y, state = torch_backend.timestep_norm(*arguments, initial_state=state, run=operator)
        return y[:, 0], state
    y, *state = _step_operator(x, weight, bias, mask, *state, groups, eps)
    return y, TimestepNormState(*state)


_step_operator = register(
    "timestep_norm_step_triton",
    torch_backend.INPUTS,
    "(Tensor, Tensor, Tensor, Tensor)",
    triton_kernels.step,
    lambda x, count, mean, variance, **_: (x.new_empty(x.shape), *map(torch.empty_like, (count, mean, variance))),
    flops=lambda **_: (0, 0),
)
