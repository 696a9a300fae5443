"""The recurrence and its steps with Triton kernels, as custom operators."""

import torch
from torch import Tensor

from .._custom_operator import no_second_derivative, register
from ..common.triton_launch import contiguous
from ..sequences import Sequences
from . import formula, triton_scan, triton_scan_backward, triton_step
from .coefficients import Coefficients, complex_coefficients, damped_coefficients
from .torch_backend import flops


def average(
    x: Tensor, coefficients: Coefficients | tuple[Tensor, ...], skip: Tensor | None, sequences: Sequences, shift: bool,
    truncation: object, initial_state: Tensor | None, return_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `damped_ema` without truncation, or `complex_ema`, whose parameters the kernels convert to coefficients.

    With `Coefficients`, return `diagonal_ssm` (input weight 1) for real states without a skip, or for complex states in
    one direction.
    """
    values: list[Tensor | None] = list(coefficients)
    fused = not isinstance(coefficients, Coefficients)
    if not fused:
        values[2] = None  # the input weight is 1
    options = return_state, shift, sequences.bounds, sequences.longest or 0, fused
    output, last, _ = _operator(x, sequences.mask, skip, *values, initial_state, *options)
    return output, last if return_state else None


def _fake(
    x: Tensor, first: Tensor, weight_out: Tensor, cu_seqlens: Tensor | None, return_state: bool, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    # Two directions have twice as many rows, but no states.
    shape = (len(x) if cu_seqlens is None else len(cu_seqlens) - 1, x.shape[2], *weight_out.shape[1:])
    last = x.new_empty(shape if return_state else 0, dtype=torch.float32)
    numbers = 3 if weight_out.dim() == 2 else 10
    return x.new_empty(x.shape), last, x.new_empty((numbers, *first.shape[::-1]), dtype=torch.float32)


def _formula(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, first: Tensor, second: Tensor | None, third: Tensor | None,
    weight_out: Tensor, initial: Tensor | None, return_state: bool, shift: bool, cu_seqlens: Tensor | None,
    max_seqlen: int, fused: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if cu_seqlens is not None:
        raise no_second_derivative("moving_average", " of varlen calls")
    if fused:
        assert second is not None and third is not None
        compute = damped_coefficients if weight_out.dim() == 2 else complex_coefficients
        coefficients = compute(first.float(), second.float(), third.float(), weight_out.float())
    else:
        coefficients = Coefficients(first, second, torch.ones_like(first), weight_out)
    return formula.average(x, coefficients, skip, Sequences(mask), shift, None, initial, return_state)


# `first` to `weight_out` are the parameters of `damped_ema` or `complex_ema` (`fused`), or log |q|, the turns of q
# (None: real), None, and the weight of the state.
_operator = register(
    "moving_average_triton",
    "Tensor x, Tensor? mask, Tensor? skip, Tensor first, Tensor? second, Tensor? third, Tensor weight_out, "
    "Tensor? initial, bool return_state, bool shift, Tensor? cu_seqlens, SymInt max_seqlen, bool fused",
    "(Tensor, Tensor, Tensor)",
    triton_scan.forward,
    _fake,
    triton_scan_backward.backward,
    flops=lambda x, first, weight_out, **_: flops(x.shape[0] * x.shape[1] * first.numel(), weight_out.dim() == 3),
    differentiable=("x", "skip", "first", "second", "third", "weight_out", "initial"),
    gradients={0: (), 1: ("skip", "weight_out")},
    saved="Tensor coefficients",
    save=lambda inputs, outputs: outputs[2:],
    formula=_formula,
)


def step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the result and the state of one position, without gradients.

    `coefficients` are the four parameters of `damped_ema`, or the result of `step_coefficients` if q is complex.
    """
    first, *damping, weight_in, weight_out = coefficients
    output, after = _step(x, state, first, damping[0] if damping else None, weight_in, weight_out, skip, mask)
    return output, after


_step = register(
    "moving_average_step_triton",
    "Tensor x, Tensor state, Tensor rates, Tensor? damping_logit, Tensor weight_in, Tensor weight_out, Tensor? skip, "
    "Tensor? mask",
    "(Tensor, Tensor)",
    lambda x, *inputs: triton_step.step(x, *contiguous(*inputs)),
    lambda x, state, **_: (x.new_empty(x.shape), state.new_empty(state.shape)),
    flops=lambda state, weight_out, **_: flops(state.numel() // (weight_out.dim() - 1), weight_out.dim() == 3),
)
