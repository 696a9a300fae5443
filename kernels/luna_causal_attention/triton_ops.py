"""Causal Luna attention with Triton kernels, as custom operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _dispatch
from .._custom_operator import no_second_derivative, register
from ..common.triton_launch import random_seed
from . import torch_backend, triton_backward, triton_forward, triton_step
from .reference import LunaCausalState

INPUTS = f"{torch_backend.INPUTS}, str precision"


def attend(
    query: Tensor, pack_query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    pack_mask: Tensor | None, activation: str, state: LunaCausalState | None, dropout: float,
) -> tuple[Tensor, LunaCausalState]:  # fmt: skip
    """Return `reference.attend`."""
    if query.shape[1] == 1:
        one = (query[:, 0], pack_query, pack_key[:, 0], key[:, 0], value[:, 0])
        output, state = step(*one, None if mask is None else mask[:, 0], pack_mask, activation, state, dropout)
        return output[:, None], state
    options = (activation, dropout, random_seed(dropout, query.device), _dispatch.float32_precision())
    tokens = (query, pack_key, key, value)
    return torch_backend.run_operator(_operator, tokens, pack_query, mask, pack_mask, state, *options)


def step(
    query: Tensor, pack_query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    pack_mask: Tensor | None, activation: str, state: LunaCausalState | None, dropout: float, inplace: bool = False,
) -> tuple[Tensor, LunaCausalState]:  # fmt: skip
    """Return `reference.step`; with `inplace`, float32 means of the state are overwritten."""
    before: Sequence[Any] = state or (None, None, None)
    seed = random_seed(dropout, query.device)
    inputs = (query, pack_key, key, value, pack_query, mask, pack_mask, *before, activation, dropout, seed)
    if inplace and all(mean.dtype == torch.float32 and mean.is_contiguous() for mean in before[:2]):
        output, *after = triton_step.forward_step(*inputs, into=before[:2])
    else:
        output, *after = _step_operator(*inputs, _dispatch.float32_precision())
    return output, LunaCausalState(*after)


def _check_formula(dropout: float) -> None:
    if dropout > 0.0:
        raise no_second_derivative("luna_causal_attention", " with dropout")


def _formula(*inputs: Any) -> tuple[Tensor, ...]:
    _check_formula(inputs[-3])
    return torch_backend.formula(*inputs[:-1])


_operator = register(
    "luna_causal_attention_triton",
    INPUTS,
    "(Tensor, Tensor, Tensor)",
    triton_forward.forward,
    torch_backend.empty,
    triton_backward.backward,
    flops=torch_backend.flops,
    differentiable=torch_backend.DIFFERENTIABLE,
    gradients=torch_backend.GRADIENTS,
    formula=_formula,
)


def _step_formula(*inputs: Any) -> tuple[Tensor, ...]:
    query, pack_key, key, value, pack_query, mask, pack_mask, *before, activation, dropout, _, _ = inputs
    _check_formula(dropout)
    state = None if before[2] is None else LunaCausalState(before[0], before[1], before[2])
    tokens = (query, pack_query, pack_key, key, value)
    output, state = torch_backend.step(*tokens, mask, pack_mask, activation, state, dropout)
    return output, *state


def _step_backward(
    grad_output: Tensor, grad_key_mean: Tensor | None, grad_value_mean: Tensor | None, count: Tensor, *inputs: Any
) -> list[Tensor | None]:
    """Return the gradients of a step by treating it as a sequence of one token."""
    *tokens, pack_query, mask, pack_mask = inputs[:7]
    grad_output, count, *tokens = (x[:, None] for x in (grad_output, count, *tokens))
    mask = None if mask is None else mask[:, None]
    inputs = (*tokens, pack_query, count, mask, pack_mask, *inputs[7:])
    grads = triton_backward.backward(grad_output, grad_key_mean, grad_value_mean, *inputs)
    return [*(None if grad is None else grad[:, 0].contiguous() for grad in grads[:4]), *grads[4:]]


_step_operator = register(
    "luna_causal_attention_step_triton",
    INPUTS.replace("Tensor count, ", ""),
    "(Tensor, Tensor, Tensor, Tensor)",
    lambda *inputs: triton_step.forward_step(*inputs[:-1]),  # the precision is used by the backward pass only
    lambda query, value, pack_query, **_: triton_step.empty_step(query, value, pack_query),
    _step_backward,
    flops=torch_backend.flops,
    differentiable=torch_backend.DIFFERENTIABLE,
    gradients=torch_backend.GRADIENTS,
    saved="Tensor count",
    save=lambda inputs, outputs: outputs[3:],
    formula=_step_formula,
)
