"""Causal Luna attention in Triton: one pass with both sums in registers for L up to 64, two passes above."""

import torch
import triton
import triton.language as tl

from luna_mega.kernels import _dispatch, _triton
from luna_mega.kernels.luna_causal_attention.reference import LunaCausalState
from luna_mega.kernels.luna_causal_attention.torch_backend import _count
from luna_mega.kernels.luna_causal_attention.triton_common import (
    activate,
    block,
    load_kept,
    load_rows,
    load_used,
    pack_dropout,
    per_row,
    rows_contiguous,
    softmax,
    straight,
    unpack_dropout,
)
from luna_mega.kernels.luna_causal_attention.triton_fused import Fused
from luna_mega.kernels.luna_causal_attention.triton_scans import Scans

FUSED_ROWS = 64


def attend(
    query: torch.Tensor,
    pack_query: torch.Tensor,
    pack_key: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    pack_mask: torch.Tensor | None,
    activation: str,
    state: LunaCausalState | None,
    dropout: float,
) -> tuple[torch.Tensor, LunaCausalState]:
    """`reference.attend`."""
    if query.shape[1] == 1:
        tokens = (query[:, 0], pack_query, pack_key[:, 0], key[:, 0], value[:, 0])
        output, state = step(*tokens, None if mask is None else mask[:, 0], pack_mask, activation, state, dropout)
        return output[:, None], state
    key_mean, value_mean, seen = (None, None, None) if state is None else state
    count = _count(mask, query, seen)
    # The backward pass draws the dropped weights again from this seed.
    options = (activation, dropout, _seed(dropout, query), _dispatch.float32_precision())
    output, key_mean, value_mean = torch.ops.luna_mega.luna_causal_attention_triton(
        query, pack_key, key, value, pack_query, count, mask, pack_mask, key_mean, value_mean, seen, *options
    )
    return output, LunaCausalState(key_mean, value_mean, count[:, -1].clone())


def _seed(dropout, query):
    return torch.randint(2**62, (1,), device=query.device) if dropout > 0.0 else None


def step(
    query: torch.Tensor,
    pack_query: torch.Tensor,
    pack_key: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    pack_mask: torch.Tensor | None,
    activation: str,
    state: LunaCausalState | None,
    dropout: float,
) -> tuple[torch.Tensor, LunaCausalState]:
    """`reference.step`."""
    state = (None, None, None) if state is None else state
    options = (activation, dropout, _seed(dropout, query), _dispatch.float32_precision())
    output, *state = torch.ops.luna_mega.luna_causal_attention_step_triton(
        query, pack_key, key, value, pack_query, mask, pack_mask, *state, *options
    )
    return output, LunaCausalState(*state)


def _call(tokens, pack_query, count, masks, state, *options):
    tokens = tuple(map(rows_contiguous, tokens))
    count, *masks, seen = (None if x is None else x.contiguous() for x in (count, *masks, state[2]))
    kernels = Fused if pack_query.shape[1] <= FUSED_ROWS else Scans
    return kernels(tokens, rows_contiguous(pack_query), count, masks, (*state[:2], seen), *options)


def forward(
    query, pack_key, key, value, pack_query, count, mask, pack_mask, key_mean, value_mean, seen, *options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, and the means behind the last token, float32."""
    tokens, masks, state = (query, pack_key, key, value), (mask, pack_mask), (key_mean, value_mean, seen)
    return _call(tokens, pack_query, count, masks, state, *options).forward()


def backward(
    grads, query, pack_key, key, value, pack_query, count, mask, pack_mask, key_mean, value_mean, seen, *options
) -> list[torch.Tensor]:
    """Gradients of query, pack_key, key, value, pack_query, and of the means, which may be empty."""
    tokens, masks, state = (query, pack_key, key, value), (mask, pack_mask), (key_mean, value_mean, seen)
    call = _call(tokens, pack_query, count, masks, state, *options)
    grads, first = call.backward(rows_contiguous(grads[0]), *grads[1:])
    for mean, grad in zip(state[:2], first, strict=True):
        grads.append(query.new_empty(0) if mean is None else per_row(grad, seen).to(mean.dtype))
    return grads


@torch.library.custom_op("luna_mega::luna_causal_attention_triton", mutates_args=())
def _attend(
    query: torch.Tensor,
    pack_key: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack_query: torch.Tensor,
    count: torch.Tensor,
    mask: torch.Tensor | None,
    pack_mask: torch.Tensor | None,
    key_mean: torch.Tensor | None,
    value_mean: torch.Tensor | None,
    seen: torch.Tensor | None,
    activation: str,
    dropout: float,
    seed: torch.Tensor | None,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, and the means behind the last token."""
    with _dispatch.without_autocast(query.device.type):
        return forward(
            query, pack_key, key, value, pack_query, count, mask, pack_mask, key_mean, value_mean, seen,
            activation, dropout, seed, precision,
        )  # fmt: skip


@_attend.register_fake
def _(query, pack_key, key, value, pack_query, *rest):
    batch, _, heads, size = query.shape
    rows, width = pack_query.shape[1], value.shape[3]
    key_mean = query.new_empty((batch, heads, size, rows), dtype=torch.float32)
    return value.new_empty(value.shape), key_mean, key_mean.new_empty((batch, heads, rows, width))


@torch.library.custom_op("luna_mega::luna_causal_attention_triton_backward", mutates_args=())
def _attend_backward(
    grad_output: torch.Tensor,
    grad_key_mean: torch.Tensor | None,
    grad_value_mean: torch.Tensor | None,
    query: torch.Tensor,
    pack_key: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack_query: torch.Tensor,
    count: torch.Tensor,
    mask: torch.Tensor | None,
    pack_mask: torch.Tensor | None,
    key_mean: torch.Tensor | None,
    value_mean: torch.Tensor | None,
    seen: torch.Tensor | None,
    activation: str,
    dropout: float,
    seed: torch.Tensor | None,
    precision: str,
) -> list[torch.Tensor]:
    """Gradients of query, pack_key, key, value, pack_query, and of the means, which may be empty."""
    grads = (grad_output, grad_key_mean, grad_value_mean)
    with _dispatch.without_autocast(query.device.type):
        return backward(
            grads, query, pack_key, key, value, pack_query, count, mask, pack_mask, key_mean, value_mean, seen,
            activation, dropout, seed, precision,
        )  # fmt: skip


@_attend_backward.register_fake
def _(grad_output, grad_key_mean, grad_value_mean, *inputs):
    return [inputs[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in (*inputs[:5], *inputs[8:10])]


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.activation, ctx.dropout, seed, ctx.precision = inputs
    ctx.save_for_backward(*tensors, seed)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_output, *grad_means):
    *tensors, seed = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(tensors[3])
    grads = torch.ops.luna_mega.luna_causal_attention_triton_backward(
        grad_output, *grad_means, *tensors, ctx.activation, ctx.dropout, seed, ctx.precision
    )
    grads[5:] = (None if x is None else grad for x, grad in zip(tensors[8:10], grads[5:], strict=True))
    return *grads[:5], None, None, None, *grads[5:], None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save_for_backward)


@triton.jit
def _step_kernel(
    Q, PK, K, V, PQ, MASK, PACK_MASK, SEED, MEAN_K, MEAN_V, SEEN, Y, NEXT_K, NEXT_V, COUNT,
    scale, dropout, q_b, q_h, pk_b, pk_h, k_b, k_h, v_b, v_h, pq_b, pq_l, pq_h, H,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr, ELU: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """One token of one head: the means move by 1 / count of the way to the new token."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    rows, at_k, at_v = tl.arange(0, BL), tl.arange(0, BK), tl.arange(0, BV)
    token = tl.arange(0, 1)
    kept = load_kept(MASK, b, token, token < 1, 1)
    count = kept.to(tl.int64)
    if SEEN is not None:
        count += tl.load(SEEN + b)
    # A first token that is masked starts from 0.
    rate = tl.where(kept | (count == 0), 1.0 / tl.maximum(count, 1).to(tl.float32), 0.0)[:, None]
    used = load_used(PACK_MASK, b, L, BL)
    pack_query = load_rows(PQ + b * pq_b + h * pq_h, pq_l, rows, used, SIZE, BK).to(tl.float32)
    pack_key = tl.load(PK + b * pk_b + h * pk_h + at_k, mask=(at_k < SIZE) & kept, other=0.0).to(tl.float32)
    scores = tl.sum(pack_query * pack_key[None, :], 1) * scale
    packed = tl.where(used, activate(scores, ELU), 0.0)
    if SEED is not None:
        packed *= tl.sum(pack_dropout(SEED, head, token, dropout, L, BL), 0)
    k = tl.load(K + b * k_b + h * k_h + at_k, mask=(at_k < SIZE) & kept, other=0.0).to(tl.float32)
    mean = k[:, None] * packed[None, :]
    offsets, inside = straight(SIZE, L, BK, BL)
    if MEAN_K is not None:
        before = tl.load(MEAN_K + head * SIZE * L + offsets, mask=inside, other=0.0)
        mean = before + (mean - before) * rate
    else:
        mean *= rate
    tl.store(NEXT_K + head * SIZE * L + offsets, mean, mask=inside)
    q = tl.load(Q + b * q_b + h * q_h + at_k, mask=at_k < SIZE, other=0.0).to(tl.float32)
    w = softmax(tl.sum(q[:, None] * mean, 0)[None, :] * scale, used)
    if SEED is not None:
        w *= unpack_dropout(SEED, head, token, dropout, L, BL)
    v = tl.load(V + b * v_b + h * v_h + at_v, mask=(at_v < WIDTH) & kept, other=0.0).to(tl.float32)
    mean = packed[:, None] * v[None, :]
    offsets, inside = straight(L, WIDTH, BL, BV)
    if MEAN_V is not None:
        before = tl.load(MEAN_V + head * WIDTH * L + offsets, mask=inside, other=0.0)
        mean = before + (mean - before) * rate
    else:
        mean *= rate
    tl.store(NEXT_V + head * WIDTH * L + offsets, mean, mask=inside)
    y = tl.sum(tl.sum(w, 0)[:, None] * mean, 0)
    tl.store(Y + head * WIDTH + at_v, y.to(Y.dtype.element_ty), mask=at_v < WIDTH)
    if h == 0:
        tl.store(COUNT + b + token, count)


def forward_step(
    query, pack_key, key, value, pack_query, mask, pack_mask, key_mean, value_mean, seen, activation, dropout, seed
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result and the next state."""
    tokens = tuple(map(rows_contiguous, (query, pack_key, key, value)))
    pack_query = rows_contiguous(pack_query)
    mask, pack_mask, seen = (None if x is None else x.contiguous() for x in (mask, pack_mask, seen))
    means = (None if x is None else x.float().contiguous() for x in (key_mean, value_mean))
    outputs = _empty_step(query, value, pack_query)
    (batch, heads, size), rows, width = query.shape, pack_query.shape[1], value.shape[2]
    numbers = (size**-0.5, dropout, *(s for x in tokens for s in x.stride()[:2]), *pack_query.stride()[:3], heads)
    tile = block(rows) * block(max(size, width))
    _triton.launch(
        _step_kernel, (batch * heads,), *tokens, pack_query, mask, pack_mask, seed, *means, seen, *outputs, *numbers,
        SIZE=size, WIDTH=width, L=rows, ELU=activation == "elu", BK=block(size), BV=block(width), BL=block(rows),
        num_warps=4 if tile <= 4096 else 8, num_stages=1,
    )  # fmt: skip
    return outputs


def _empty_step(query, value, pack_query):
    (batch, heads, size), rows, width = query.shape, pack_query.shape[1], value.shape[2]
    key_mean = query.new_empty((batch, heads, size, rows), dtype=torch.float32)
    value_mean = key_mean.new_empty((batch, heads, rows, width))
    return value.new_empty(value.shape), key_mean, value_mean, query.new_empty((batch,), dtype=torch.int64)


@torch.library.custom_op("luna_mega::luna_causal_attention_step_triton", mutates_args=())
def _step(
    query: torch.Tensor,
    pack_key: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack_query: torch.Tensor,
    mask: torch.Tensor | None,
    pack_mask: torch.Tensor | None,
    key_mean: torch.Tensor | None,
    value_mean: torch.Tensor | None,
    seen: torch.Tensor | None,
    activation: str,
    dropout: float,
    seed: torch.Tensor | None,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result and the next state; `precision` is that of the backward pass."""
    inputs = (query, pack_key, key, value, pack_query, mask, pack_mask, key_mean, value_mean, seen)
    return forward_step(*inputs, activation, dropout, seed)


@_step.register_fake
def _(query, pack_key, key, value, pack_query, *rest):
    return _empty_step(query, value, pack_query)


def _save_step_for_backward(ctx, inputs, output):
    *tensors, ctx.activation, ctx.dropout, seed, ctx.precision = inputs
    ctx.save_for_backward(*tensors, seed, output[3])
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def _backward_step(ctx, grad_output, *grads):
    """Of a sequence of one token."""
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
