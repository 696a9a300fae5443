"""The averages and `diagonal_ssm` with Triton kernels, as custom operators."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._custom_operator import no_second_derivative, register
from ..common.triton_launch import contiguous
from . import export, triton_diagonal, triton_scan, triton_scan_backward, triton_step
from .coefficients import Coefficients, complex_coefficients, damped_coefficients
from .torch_backend import flops


def average(
    x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None, initial_state: Tensor | None,
    return_state: bool, shift: bool = False, truncation: object = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `reference.damped_ema` without truncation, or `reference.complex_ema`."""
    output, last, _ = _average(x, mask, skip, *parameters, initial_state, return_state, shift, cu_seqlens, max_seqlen)
    return output, last if return_state else None


def _fake(
    x: Tensor, input_logit: Tensor, projection: Tensor, cu_seqlens: Tensor | None, return_state: bool, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    # A bidirectional average has twice as many rows of parameters, but no states.
    shape = (len(x) if cu_seqlens is None else len(cu_seqlens) - 1, x.shape[2], *projection.shape[1:])
    last = x.new_empty(shape if return_state else 0, dtype=torch.float32)
    numbers = 3 if projection.dim() == 2 else 10
    return x.new_empty(x.shape), last, x.new_empty((numbers, *input_logit.shape[::-1]), dtype=torch.float32)


def _parts(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, input_logit: Tensor, damping_logit: Tensor,
    expansion_or_phase: Tensor, projection: Tensor, initial: Tensor | None, return_state: bool, shift: bool,
    cu_seqlens: Tensor | None, max_seqlen: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if cu_seqlens is not None:
        raise no_second_derivative("damped_ema and complex_ema", " of varlen calls")
    compute = damped_coefficients if projection.dim() == 2 else complex_coefficients
    parameters = (input_logit, damping_logit, expansion_or_phase, projection)
    of = compute(*(parameter.float() for parameter in parameters))
    return export.average(x, of, skip, mask, shift, None, initial, return_state)


_average = register(
    "moving_average_triton",
    "Tensor x, Tensor? mask, Tensor? skip, Tensor input_logit, Tensor damping_logit, Tensor expansion_or_phase, "
    "Tensor projection, Tensor? initial, bool return_state, bool shift, Tensor? cu_seqlens, SymInt max_seqlen",
    "(Tensor, Tensor, Tensor)",
    triton_scan.forward,
    _fake,
    triton_scan_backward.backward,
    flops=lambda x, input_logit, projection, **_: flops(
        x.shape[0] * x.shape[1] * input_logit.numel(), projection.dim() == 3
    ),
    differentiable=("x", "skip", "input_logit", "damping_logit", "expansion_or_phase", "projection", "initial"),
    gradients={0: (), 1: ("skip", "projection")},
    saved="Tensor coefficients",
    save=lambda inputs, outputs: outputs[2:],
    parts=_parts,
)


def diagonal(
    x: Tensor, coefficients: Coefficients, skip: Tensor | None, mask: Tensor | None, initial_state: Tensor | None,
    return_state: bool, cu_seqlens: Tensor | None = None, max_seqlen: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `average` with coefficients whose weight of the input is 1."""
    of, options = coefficients, (initial_state, return_state, False, cu_seqlens, max_seqlen)
    output, last, _ = _diagonal(x, mask, skip, of.log_decay, of.turn, None, of.weight_out, *options)
    return output, last if return_state else None


def _diagonal_parts(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, log_decay: Tensor, turn: Tensor | None, weight_in: None,
    weight: Tensor, initial: Tensor | None, return_state: bool, shift: bool, cu_seqlens: Tensor | None, max_seqlen: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if cu_seqlens is not None:
        raise no_second_derivative("diagonal_ssm", " of varlen calls")
    of = Coefficients(log_decay, turn, torch.ones_like(log_decay), weight)
    return export.average(x, of, skip, mask, shift, None, initial, return_state)


# The inputs are those of `_average`, with coefficients in the places of the parameters.
_diagonal = register(
    "diagonal_ssm_triton",
    "Tensor x, Tensor? mask, Tensor? skip, Tensor log_decay, Tensor? turn, Tensor? weight_in, Tensor weight, "
    "Tensor? initial, bool return_state, bool shift, Tensor? cu_seqlens, SymInt max_seqlen",
    "(Tensor, Tensor, Tensor)",
    partial(triton_scan.forward, of=triton_diagonal),
    lambda log_decay, weight, **rest: _fake(input_logit=log_decay, projection=weight, **rest),
    partial(triton_scan_backward.backward, of=triton_diagonal),
    flops=lambda x, log_decay, turn, **_: flops(x.shape[0] * x.shape[1] * log_decay.numel(), turn is not None),
    differentiable=("x", "skip", "log_decay", "turn", "weight", "initial"),
    gradients={0: (), 1: ("skip", "weight")},
    saved="Tensor coefficients",
    save=lambda inputs, outputs: outputs[2:],
    parts=_diagonal_parts,
)


def _register_step(kind: str, values: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """Register the operator of a step, which has no gradient; `values` is the schema of its parameters."""
    is_complex = kind == "complex"
    return register(
        f"{kind}_ema_step_triton",
        f"Tensor x, Tensor state, {values}, Tensor? skip, Tensor? mask",
        "(Tensor, Tensor)",
        lambda x, *inputs: step(x, *contiguous(*inputs)),
        lambda x, state, **_: (x.new_empty(x.shape), state.new_empty(state.shape)),
        flops=lambda state, **_: flops(state.numel() // (1 + is_complex), is_complex),
    )


damped_step = _register_step(
    "damped",
    "Tensor input_logit, Tensor damping_logit, Tensor expansion, Tensor projection",
    triton_step.damped_step,
)
complex_step = _register_step("complex", "Tensor change, Tensor weight_in, Tensor weight_out", triton_step.complex_step)
