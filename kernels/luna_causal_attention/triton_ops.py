"""Causal Luna attention with Triton kernels, as custom operators."""

import torch

from luna_mega.kernels import _op
from luna_mega.kernels.common.triton_launch import random_seed
from luna_mega.kernels.luna_causal_attention import autograd, reference, triton_backward, triton_forward, triton_step
from luna_mega.kernels.luna_causal_attention.reference import LunaCausalState

TOKENS = "Tensor query, Tensor pack_key, Tensor key, Tensor value, Tensor pack_query"
REST = (
    "Tensor? mask, Tensor? pack_mask, Tensor? key_mean, Tensor? value_mean, Tensor? seen, str activation, "
    "float dropout, Tensor? seed, str precision"
)


def attend(
    query, pack_query, pack_key, key, value, mask, pack_mask, activation, state: LunaCausalState | None, dropout
):
    """Return `reference.attend`."""
    if query.shape[1] == 1:
        tokens = (query[:, 0], pack_query, pack_key[:, 0], key[:, 0], value[:, 0])
        output, state = step(*tokens, None if mask is None else mask[:, 0], pack_mask, activation, state, dropout)
        return output[:, None], state
    key_mean, value_mean, seen = (None, None, None) if state is None else state
    count = reference.token_count(mask, query, seen)
    options = (activation, dropout, random_seed(dropout, query.device), _op.float32_precision())
    output, key_mean, value_mean = torch.ops.luna_mega.luna_causal_attention_triton(
        query, pack_key, key, value, pack_query, count, mask, pack_mask, key_mean, value_mean, seen, *options
    )
    return output, LunaCausalState(key_mean, value_mean, count[:, -1].clone())


def step(
    query, pack_query, pack_key, key, value, mask, pack_mask, activation, state: LunaCausalState | None, dropout,
    inplace=False,
):  # fmt: skip
    """Return `reference.step`; with `inplace`, float32 means of the state are overwritten."""
    inputs = (query, pack_key, key, value, pack_query, mask, pack_mask, *(state or (None, None, None)), activation)
    options = (dropout, random_seed(dropout, query.device))
    if inplace and all(mean.dtype == torch.float32 and mean.is_contiguous() for mean in state[:2]):
        output, *state = triton_step.forward_step(*inputs, *options, into=state[:2])
    else:
        precision = _op.float32_precision()
        output, *state = torch.ops.luna_mega.luna_causal_attention_step_triton(*inputs, *options, precision)
    return output, LunaCausalState(*state)


@torch.library.custom_op(
    "luna_mega::luna_causal_attention_triton",
    mutates_args=(),
    schema=f"({TOKENS}, Tensor count, {REST}) -> (Tensor, Tensor, Tensor)",
)
def _attend(query, *inputs):
    with _op.without_autocast(query.device.type):
        return triton_forward.forward(query, *inputs)


@_attend.register_fake
def _(query, pack_key, key, value, pack_query, *_):
    batch, _, heads, size = query.shape
    rows, width = pack_query.shape[1], value.shape[3]
    key_mean = query.new_empty((batch, heads, size, rows), dtype=torch.float32)
    return value.new_empty(value.shape), key_mean, key_mean.new_empty((batch, heads, rows, width))


@torch.library.custom_op(
    "luna_mega::luna_causal_attention_triton_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad_output, Tensor? grad_key_mean, Tensor? grad_value_mean, "
        f"{TOKENS}, Tensor count, {REST}) -> Tensor[]"
    ),
)
def _attend_backward(grad_output, *inputs):
    with _op.without_autocast(grad_output.device.type):
        return triton_backward.backward(grad_output, *inputs)


autograd.register(_attend, _attend_backward)


@torch.library.custom_op(
    "luna_mega::luna_causal_attention_step_triton",
    mutates_args=(),
    schema=f"({TOKENS}, {REST}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _step(*inputs):
    *inputs, _ = inputs  # the precision is used by the backward pass only
    return triton_step.forward_step(*inputs)


@_step.register_fake
def _(query, pack_key, key, value, pack_query, *_):
    return triton_step.empty_step(query, value, pack_query)


def _save_step_for_backward(ctx, inputs, output):
    *tensors, ctx.activation, ctx.dropout, seed, ctx.precision = inputs
    ctx.save_for_backward(*tensors, seed, output[3])
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def _backward_step(ctx, grad_output, *grads):
    """Return the gradients of a sequence of one token."""
    *tokens, pack_query, mask, pack_mask, key_mean, value_mean, seen, seed, count = ctx.saved_tensors
    grad_output = torch.zeros_like(tokens[3]) if grad_output is None else grad_output
    grad_output, count, *tokens = (x[:, None] for x in (grad_output, count, *tokens))
    masks = (None if mask is None else mask[:, None], pack_mask)
    grads = torch.ops.luna_mega.luna_causal_attention_triton_backward(
        grad_output, *grads[:2], *tokens, pack_query, count, *masks, key_mean, value_mean, seen,
        ctx.activation, ctx.dropout, seed, ctx.precision,
    )  # fmt: skip
    grads[:4] = (grad[:, 0] for grad in grads[:4])
    grads[5:] = (None if x is None else grad for x, grad in zip((key_mean, value_mean), grads[5:], strict=True))
    return *grads[:5], None, None, *grads[5:], None, None, None, None, None


_step.register_autograd(_backward_step, setup_context=_save_step_for_backward)
