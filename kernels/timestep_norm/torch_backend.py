"""Timestep norm in PyTorch: operators that compute it with the passes of a backend, and the step."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._custom_operator import register
from .._mode import FORMULAS, mode
from ..upcast import upcast_dtype
from . import torch_passes
from .reference import TimestepNormState
from .torch_passes import affine, counts, over_time

INPUTS = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, Tensor count, Tensor mean, Tensor variance, int groups, "
    "float eps"
)


def timestep_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    mask: Tensor | None = None, *, initial_state: TimestepNormState, run: Callable[..., Any] | None = None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Return `reference.timestep_norm`; `run` is the operator, None = this file's."""
    count, mean, variance = initial_state
    if run is None:
        run = _in_formula if mode() in FORMULAS else operator
    y, _, _, _, mean, variance = run(x, weight, bias, mask, count, mean, variance, groups, eps)
    return y, TimestepNormState(count + (x.shape[1] if mask is None else mask.sum(1)), mean, variance)


def step(
    x: Tensor, state: TimestepNormState, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float,
    mask: Tensor | None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Return `reference.step` in few operations, because call overhead dominates for one position."""
    count = state.count + (1 if mask is None else mask)
    share = count.double().reciprocal()[:, None]
    signal = x.double()
    if mask is not None:
        signal, share = signal.masked_fill(~mask[:, None], 0.0), share.masked_fill(~mask[:, None], 0.0)
    signal = signal.unflatten(1, (groups, -1))
    spread, own = torch.var_mean(signal, -1, correction=0)
    away = own - state.mean
    mean = torch.addcmul(state.mean, away, share)
    variance = torch.lerp(state.variance, torch.addcmul(spread, away, own - mean), share)
    y = (signal - mean[..., None]) * torch.rsqrt(variance + eps)[..., None]
    y = affine(y.flatten(1).to(upcast_dtype(x, weight)), weight, bias).to(x.dtype)
    y = y if mask is None else y.masked_fill(~mask[:, None], 0.0)
    return y, TimestepNormState(count, mean, variance)


def _in_formula(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, count: Tensor, mean: Tensor,
    variance: Tensor, groups: int, eps: float,
) -> tuple[Tensor, None, None, None, Tensor, Tensor]:  # fmt: skip
    """Compute the result with operators of PyTorch only."""
    number = counts(count, mask, x.shape[1])
    signal = x.to(upcast_dtype(x, weight))
    signal = signal if mask is None else signal.masked_fill(~mask[..., None], 0.0)
    signal = signal.unflatten(2, (groups, -1))
    middle = signal.mean(-1)
    around = signal - middle[..., None]
    moments = middle.double(), around.square().mean(-1).double()
    means, totals = over_time(count, mean, variance, number, *moments, mask)
    variances = totals / number
    rstd = torch.rsqrt(variances + eps).to(signal.dtype)
    y = (around + (middle - means).to(signal.dtype)[..., None]) * rstd[..., None]
    y = affine(y.flatten(2), weight, bias).to(x.dtype)
    if mask is not None:
        y = y.masked_fill(~mask[..., None], 0.0)
    return y, None, None, None, means[:, -1], variances[:, -1]


def _forward(
    passes: ModuleType, x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, count: Tensor,
    mean: Tensor, variance: Tensor, groups: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result, m_t, M_t and the rstd of S_t for the backward pass, and the last mean and variance."""
    own, spread = passes.moments(x, mask, groups, upcast_dtype(x, weight))
    means, rstd, *last = passes.statistics(own, spread, mask, count, mean, variance, eps)
    return passes.apply(x, mask, means, rstd, weight, bias), own, means, rstd, *last


def _fake(
    x: Tensor, weight: Tensor | None, mean: Tensor, groups: int, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    means = mean.new_empty(*x.shape[:2], groups)
    own, rstd = (torch.empty_like(means, dtype=upcast_dtype(x, weight)) for _ in range(2))
    return x.new_empty(x.shape), own, means, rstd, torch.empty_like(mean), torch.empty_like(mean)


def _backward(
    passes: ModuleType, gradient: Tensor, grad_mean: Tensor | None, grad_variance: Tensor | None, own: Tensor,
    means: Tensor, rstd: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    count: Tensor, mean: Tensor, variance: Tensor, groups: int, eps: float,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x, weight, bias and the initial mean and variance; None for arguments that are None."""
    sums, products, *grads = passes.sums(gradient, x, mask, means, rstd, weight, bias)
    last = grad_mean, grad_variance, x.shape[2] // groups
    stretches, shifts, *initial = passes.statistics_backward(sums, products, own, means, rstd, mask, count, mean, *last)
    grad_x = passes.apply_backward(gradient, x, mask, stretches, shifts, rstd, weight)
    pairs = zip(grads, (weight, bias), strict=True)
    return [grad_x, *(None if t is None else grad.to(t.dtype) for grad, t in pairs), *initial]


def register_norm(name: str, passes: ModuleType) -> Callable[..., Any]:
    """Register the operator `name` and its backward, computed by a module with the functions of `torch_passes`."""
    return register(
        name,
        INPUTS,
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        partial(_forward, passes),
        _fake,
        partial(_backward, passes),
        flops=lambda **_: (0, 0),
        differentiable=("x", "weight", "bias", "mean", "variance"),
        gradients={0: (), 4: ("weight", "bias", "variance"), 5: ("weight", "bias")},
        saved="Tensor own, Tensor means, Tensor rstd",
        save=lambda inputs, outputs: outputs[1:4],
        formula=_in_formula,
    )


operator = register_norm("timestep_norm", torch_passes)
