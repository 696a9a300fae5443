"""Causal Luna attention in PyTorch: chunks and prefix sums, recomputed in the backward pass."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .._custom_operator import register
from .._export import chunk_positions, lerp
from .._mode import COMPILED, FORMULAS, is_known, mode
from ..dropout import dropout_factors, host_seed
from ..upcast import upcast_dtype
from . import reference
from .reference import LunaCausalState

CHUNK = 64
SHORT = 16  # up to this number of tokens, call overhead dominates
# Tokens times heads in one block on CPU. On a GPU one block covers everything, because many small kernels are slower.
BLOCK_TOKENS = 2048
INPUTS = (
    "Tensor query, Tensor pack_key, Tensor key, Tensor value, Tensor pack_query, Tensor count, Tensor? mask, "
    "Tensor? pack_mask, Tensor? key_mean, Tensor? value_mean, Tensor? past, str activation, float dropout, Tensor? seed"
)
DIFFERENTIABLE = ("query", "pack_key", "key", "value", "pack_query", "key_mean", "value_mean")
GRADIENTS = {0: (), 1: ("query", "value", "value_mean"), 2: ("query", "key", "key_mean")}


def attend(
    query: Tensor, pack_query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    pack_mask: Tensor | None, activation: str, state: LunaCausalState | None, dropout: float,
) -> tuple[Tensor, LunaCausalState]:  # fmt: skip
    """Return `reference.attend`."""
    tokens = (query, pack_key, key, value)
    if mode() in FORMULAS:
        return _in_formula(tokens, pack_query, mask, pack_mask, activation, state, dropout)
    if is_known(query.shape[1] == 1):
        one = (query[:, 0], pack_query, pack_key[:, 0], key[:, 0], value[:, 0])
        output, state = step(*one, None if mask is None else mask[:, 0], pack_mask, activation, state, dropout)
        return output[:, None], state
    # Evaluated in this order, because comparing a length adds a guard to a compiled program.
    if state is None and mode() < COMPILED and query.shape[1] <= SHORT:
        return _short(*tokens, pack_query, mask, pack_mask, activation, dropout)
    options = (activation, dropout, host_seed(query, dropout))
    return run_operator(operator, tokens, pack_query, mask, pack_mask, state, *options)


def run_operator(
    run: Callable[..., Any], tokens: Sequence[Tensor], pack_query: Tensor, mask: Tensor | None,
    pack_mask: Tensor | None, state: LunaCausalState | None, *options: Any,
) -> tuple[Tensor, LunaCausalState]:  # fmt: skip
    """Return the output and the state of an operator; `options` are its inputs after the state."""
    before = (None, None, None) if state is None else state
    count = reference.token_count(mask, tokens[0], before[2])
    output, key_mean, value_mean = run(*tokens, pack_query, count, mask, pack_mask, *before, *options)
    return output, LunaCausalState(key_mean, value_mean, count[:, -1].clone())


def step(
    query: Tensor, pack_query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    pack_mask: Tensor | None, activation: str, state: LunaCausalState | None, dropout: float, inplace: bool = False,
) -> tuple[Tensor, LunaCausalState]:  # fmt: skip
    """Return `reference.step`; each mean moves by 1 / count of the distance to the new token.

    With `inplace`, the means and the count of the state are overwritten if they have the dtype of the result.
    """
    (batch, heads, size), dtype, working, tied = query.shape, query.dtype, upcast_dtype(query), key is value
    if dtype != working:
        query, pack_query, pack_key, key, value = (x.to(working) for x in (query, pack_query, pack_key, key, value))
    if mask is not None:
        pack_key, key, value = (x.masked_fill(~mask[:, None, None], 0.0) for x in (pack_key, key, value))
    masked = None
    if pack_mask is not None:
        pack_query = pack_query.masked_fill(~pack_mask[:, :, None, None], 0.0)
        masked = ~pack_mask.repeat_interleave(heads, dim=0)[:, None]
    # One product per head, [1, K] times [K, L]; a pack query stored as [B, H, L, K] is not copied.
    scores = torch.bmm(pack_key.reshape(-1, 1, size), pack_query.permute(0, 2, 3, 1).flatten(0, 1))
    packed = reference.activate(scores * size**-0.5, activation)
    if masked is not None:
        packed = packed.masked_fill(masked, 0.0)
    packed = torch.dropout(packed, dropout, train=True).view(batch, heads, 1, -1)
    key_mean = key.unsqueeze(3) * packed
    value_mean = key_mean.mT if tied else packed.mT * value.unsqueeze(2)
    rate, count = _rate(mask, batch, state, working, query.device, inplace)
    if state is None:
        key_mean, value_mean = key_mean * rate, value_mean * rate
    else:
        move = torch.Tensor.lerp_ if inplace else lerp
        key_mean = move(state.key_mean.to(working), key_mean, rate)
        value_mean = move(state.value_mean.to(working), value_mean, rate)
    scores = torch.bmm(query.reshape(-1, 1, size), key_mean.flatten(0, 1))
    weights = torch.dropout(reference.unpack_weights(scores * size**-0.5, masked), dropout, train=True)
    output = torch.bmm(weights, value_mean.flatten(0, 1)).view(value.shape)
    return output.to(dtype), LunaCausalState(key_mean, value_mean, count)


def _rate(
    mask: Tensor | None, batch: int, state: LunaCausalState | None, dtype: torch.dtype, device: torch.device,
    inplace: bool,
) -> tuple[Any, Tensor]:  # fmt: skip
    """Return the update rate of the means, `[B, 1, 1, 1]`, and the new token count `[B]`."""
    if state is None:
        count = torch.ones((batch,), dtype=torch.int64, device=device) if mask is None else mask.long()
    else:
        step = 1 if mask is None else mask
        count = state.count.add_(step) if inplace else state.count + step
    if mask is None:
        return count.to(dtype).reciprocal_().view(-1, 1, 1, 1), count
    rate = count.clamp(min=1).to(dtype).reciprocal_()
    # If the first token is masked, the state remains 0.
    return rate.masked_fill_(~mask & (count > 0), 0.0).view(-1, 1, 1, 1), count


def _short(
    query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, pack_query: Tensor, mask: Tensor | None,
    pack_mask: Tensor | None, activation: str, dropout: float,
) -> tuple[Tensor, LunaCausalState]:  # fmt: skip
    """Attend from the start of the sequence with few operations, which autograd differentiates."""
    (batch, length, heads, size), dtype, working = query.shape, query.dtype, upcast_dtype(query)
    if mask is not None:
        pack_key, key, value = (x.masked_fill(~mask[:, :, None, None], 0.0) for x in (pack_key, key, value))
    if pack_mask is not None:
        pack_query = pack_query.masked_fill(~pack_mask[:, :, None, None], 0.0)
    query, pack_key, key, value, pack_query = (
        x.to(working).transpose(1, 2).flatten(0, 1) for x in (query, pack_key, key, value, pack_query)
    )
    packed = reference.activate(torch.bmm(pack_key, pack_query.mT) * size**-0.5, activation)
    masked = None
    if pack_mask is not None:
        masked = ~pack_mask.repeat_interleave(heads, dim=0)[:, None]
        packed = packed.masked_fill(masked, 0.0)
    packed = torch.dropout(packed, dropout, train=True)
    if mask is None:
        count = torch.arange(1, length + 1, device=query.device).expand(batch, -1)
        rate = count[:1, :, None].to(working).reciprocal()
    else:
        count = mask.cumsum(dim=1)
        rate = count.clamp(min=1).to(working).reciprocal().repeat_interleave(heads, dim=0)[..., None]
    scores = torch.bmm(torch.bmm(query, key.mT).tril(), packed) * (rate * size**-0.5)
    weights = torch.dropout(reference.unpack_weights(scores, masked), dropout, train=True)
    output = torch.bmm(torch.bmm(weights, packed.mT).tril(), value) * rate
    packed_mean = packed.mT * rate[:, -1:]
    key_mean, value_mean = (x.unflatten(0, (batch, heads)) for x in ((packed_mean @ key).mT, packed_mean @ value))
    output = output.unflatten(0, (batch, heads)).transpose(1, 2).to(dtype)
    return output, LunaCausalState(key_mean, value_mean, count[:, -1].clone())


def _in_formula(
    tokens: Sequence[Tensor], pack_query: Tensor, mask: Tensor | None, pack_mask: Tensor | None, activation: str,
    state: LunaCausalState | None, dropout: float,
) -> tuple[Tensor, LunaCausalState]:  # fmt: skip
    """Attend with operators of PyTorch, so that one exported program supports any length."""
    batch, length = tokens[0].shape[:2]
    device = tokens[0].device
    position, kept = (x.flatten() for x in chunk_positions(length, CHUNK, device))
    kept = kept.expand(batch, -1)
    if mask is not None:
        kept = kept & mask[:, position]
    before = (None, None, None) if state is None else state
    count = reference.token_count(kept, kept, before[2])
    tokens = [x[:, position] for x in tokens]
    block = _Block(tokens, pack_query, count, (kept, pack_mask), before, activation, CHUNK)
    block.weigh(dropout, None)
    output = block.tokens(block.output())[:, torch.arange(length, device=device)]
    return output.to(pack_query.dtype), LunaCausalState(*block.means(), count[:, -1])


class _Block:
    """The computation for some heads of all sequences, as R = heads * batch * chunks matrices of C tokens.

    y_t = (1/t) w_t (sum over earlier chunks + sum over earlier tokens of the chunk). The scores of w_t have the same
    form.
    """

    def __init__(
        self, tokens: Sequence[Tensor], pack_query: Tensor, count: Tensor, masks: tuple[Tensor | None, Tensor | None],
        state: Sequence[Tensor | None], activation: str, chunk: int,
    ) -> None:  # fmt: skip
        (query, pack_key, key, value), (mask, pack_mask), (key_mean, value_mean, past) = tokens, masks, state
        self.batch, _, self.heads, size = query.shape
        self.chunk, self.activation, self.scale = chunk, activation, size**-0.5
        self.dtype = upcast_dtype(query)
        if mask is not None:  # with zero key and value, a token contributes nothing for any pack weights
            pack_key, key, value = (x.masked_fill(~mask[:, :, None, None], 0.0) for x in (pack_key, key, value))
        self.query, self.pack_key, self.key, self.value = map(self.chunks, (query, pack_key, key, value))
        if pack_mask is not None:
            pack_query = pack_query.masked_fill(~pack_mask[:, :, None, None], 0.0)
        self.pack_query = pack_query.permute(2, 0, 1, 3).flatten(0, 1).to(self.dtype) * self.scale
        # Before the first kept token the sums are 0, and so is the result.
        rate = count.clamp(min=1).to(self.dtype).reciprocal()
        self.last_rate = self.per_head(rate[:, -1, None, None, None])
        rate = nn.functional.pad(rate, (0, -rate.shape[1] % chunk))
        self.rate = self.per_head(rate).reshape(-1, chunk, 1)
        self.past = None if past is None else self.per_head(past.to(self.dtype)[:, None, None, None])
        self.initial_key, self.initial_value = (self.state_sum(mean, self.past) for mean in (key_mean, value_mean))
        self.masked = None
        if pack_mask is not None:
            masked = self.per_head(~pack_mask[:, None, None])
            self.masked = masked.expand(-1, rate.shape[1] // chunk, -1, -1).flatten(0, 1)

    def chunks(self, x: Tensor) -> Tensor:
        """Return `[B, T, H, K]` as `[R, C, K]`, padded with zeros."""
        x = x.permute(2, 0, 1, 3).to(self.dtype)
        return nn.functional.pad(x, (0, 0, 0, -x.shape[2] % self.chunk)).reshape(-1, self.chunk, x.shape[3])

    def tokens(self, x: Tensor) -> Tensor:
        """Return `[R, C, K]` as `[B, T, H, K]`, including the padding."""
        return x.reshape(self.heads, self.batch, -1, x.shape[2]).permute(1, 2, 0, 3)

    def per_sequence(self, x: Tensor) -> Tensor:
        """Return `[R, C, K]` as `[H B, T, K]`."""
        return x.view(self.pack_query.shape[0], -1, x.shape[2])

    def per_head(self, x: Tensor) -> Tensor:
        """Return `[B, ...]` as `[H B, ...]`."""
        return x.expand(self.heads, *x.shape).flatten(0, 1)

    def state_sum(self, mean: Tensor | None, factor: Any) -> Tensor | float:
        """Return `[B, H, K, L]` as `[H B, 1, K, L]`, times the factor of each sequence."""
        return 0.0 if mean is None else mean.transpose(0, 1).flatten(0, 1)[:, None].to(self.dtype) * factor

    def state(self, x: Tensor, factor: Any) -> Tensor:
        """Return sums `[H B, 1, K, L]` times the factor as `[B, H, K, L]`."""
        return (x * factor).unflatten(0, (self.heads, self.batch)).squeeze(2).transpose(0, 1)

    def before(self, sums: Tensor, first: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return `first` plus the sums of earlier chunks, `[R, K, L]`, and plus all sums, `[H B, 1, K, L]`."""
        sums = sums.unflatten(0, (self.heads * self.batch, -1))
        sums = _prefix_sums(torch.cat([torch.zeros_like(sums[:, :1]) + first, sums], dim=1))
        return sums[:, :-1].flatten(0, 1), sums[:, -1:]

    def after(self, sums: Tensor, last: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return the equivalent of `before` in reversed time."""
        shape = (self.heads * self.batch, -1)
        sums, total = self.before(sums.unflatten(0, shape).flip(1).flatten(0, 1), last)
        return sums.unflatten(0, shape).flip(1).flatten(0, 1), total

    def weigh(self, dropout: float, generator: torch.Generator | None) -> None:
        """Compute pack weights, the sums before every chunk, and unpack weights."""
        scores = torch.bmm(self.per_sequence(self.pack_key), self.pack_query.mT)
        self.pack_scores = scores.view(-1, self.chunk, scores.shape[2])
        packed = reference.activate(self.pack_scores, self.activation)
        if self.masked is not None:
            packed = packed.masked_fill(self.masked, 0.0)
        self.packed, self.pack_dropped = _dropped(packed, dropout, generator)
        self.key_sum, self.key_total = self.before(torch.bmm(self.key.mT, self.packed), self.initial_key)
        self.value_sum, self.value_total = self.before(torch.bmm(self.packed.mT, self.value), self.initial_value)
        self.similarity = _lower(torch.bmm(self.query, self.key.mT))
        scores = torch.baddbmm(torch.bmm(self.query, self.key_sum), self.similarity, self.packed)
        self.weights = reference.unpack_weights(scores * (self.rate * self.scale), self.masked)
        self.used, self.unpack_dropped = _dropped(self.weights, dropout, generator)
        self.blend = _lower(torch.bmm(self.used, self.packed.mT))

    def output(self) -> Tensor:
        return torch.baddbmm(torch.bmm(self.used, self.value_sum), self.blend, self.value) * self.rate

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means after the last token, `[B, H, K, L]` and `[B, H, L, V]`."""
        return self.state(self.key_total, self.last_rate), self.state(self.value_total, self.last_rate)

    def backward(
        self, grad_output: Tensor, grad_key_mean: Tensor | None, grad_value_mean: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, pack key, key and value `[R, C, K]`, pack query and both initial sums."""
        grad = self.chunks(grad_output) * self.rate
        after_key, after_value = (self.state_sum(x, self.last_rate) for x in (grad_key_mean, grad_value_mean))
        grad_blend = torch.bmm(grad, self.value.mT).tril_()
        grad_weights = torch.bmm(grad, self.value_sum.mT).baddbmm_(grad_blend, self.packed)
        if self.unpack_dropped is not None:
            grad_weights *= self.unpack_dropped
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, self.weights, -1, self.dtype)
        grad_scores *= self.rate * self.scale
        grad_similarity = torch.bmm(grad_scores, self.packed.mT).tril_()
        grad_query = torch.bmm(grad_scores, self.key_sum.mT).baddbmm_(grad_similarity, self.key)
        after_key, grad_initial_key = self.after(torch.bmm(self.query.mT, grad_scores), after_key)
        after_value, grad_initial_value = self.after(torch.bmm(self.used.mT, grad), after_value)
        grad_key = torch.bmm(self.packed, after_key.mT).baddbmm_(grad_similarity.mT, self.query)
        grad_value = torch.bmm(self.packed, after_value).baddbmm_(self.blend.mT, grad)
        grad_packed = torch.bmm(self.key, after_key).baddbmm_(self.value, after_value.mT)
        grad_packed.baddbmm_(grad_blend.mT, self.used).baddbmm_(self.similarity.mT, grad_scores)
        if self.pack_dropped is not None:
            grad_packed *= self.pack_dropped
        if self.masked is not None:
            grad_packed.masked_fill_(self.masked, 0.0)
        grad_packed *= _slope(self.pack_scores, self.activation)
        grad_packed = self.per_sequence(grad_packed)
        grad_pack_key = torch.bmm(grad_packed, self.pack_query).view(self.pack_key.shape)
        grad_pack_query = torch.bmm(grad_packed.mT, self.per_sequence(self.pack_key)) * self.scale
        return grad_query, grad_pack_key, grad_key, grad_value, grad_pack_query, grad_initial_key, grad_initial_value


def _lower(x: Tensor) -> Tensor:
    """Return the lower triangles, in place unless `vmap` may map x: PyTorch would process one matrix at a time."""
    return x.tril() if mode() in FORMULAS else x.tril_()


def _prefix_sums(x: Tensor) -> Tensor:
    if x.device.type != "cpu" or mode() in FORMULAS or x.requires_grad:
        return x.cumsum(dim=1)
    for before, here in pairwise(x.unbind(1)):  # four times as fast as cumsum, whose access is strided here
        here += before
    return x


def _dropped(weights: Tensor, dropout: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
    """Return the weights after dropout, and the factors that dropout multiplied them by."""
    if dropout == 0.0:
        return weights, None
    factors = dropout_factors(weights, dropout, generator)
    return weights * factors, factors


def _slope(scores: Tensor, activation: str) -> Tensor:
    """Return the derivative of `reference.activate`."""
    if activation == "elu":
        return scores.clamp(max=0.0).exp()
    return torch.sigmoid(scores * math.log(2.0))


def _blocks(
    query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, pack_query: Tensor, count: Tensor, mask: Tensor | None,
    pack_mask: Tensor | None, key_mean: Tensor | None, value_mean: Tensor | None, past: Tensor | None, activation: str,
    dropout: float, seed: Tensor | None,
) -> Iterator[tuple[slice, _Block]]:  # fmt: skip
    """Yield slices of the heads and their blocks.

    The order is fixed, because the random numbers of dropout depend on it.
    """
    (batch, length, all_heads, _), device, tokens = query.shape, query.device, (query, pack_key, key, value)
    if batch == 0:
        return
    size = max(1, BLOCK_TOKENS // (batch * length)) if device.type == "cpu" else all_heads
    generator = None if seed is None else torch.Generator(device).manual_seed(int(seed))
    for start in range(0, all_heads, size):
        block_heads = slice(start, min(start + size, all_heads))
        part = [x[:, :, block_heads] for x in (*tokens, pack_query)]
        state = (*(None if x is None else x[:, block_heads] for x in (key_mean, value_mean)), past)
        block = _Block(part[:4], part[4], count, (mask, pack_mask), state, activation, min(CHUNK, length))
        block.weigh(dropout, generator)
        yield block_heads, block


def _forward(
    query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, pack_query: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and the means after the last token."""
    output, key_mean, value_mean = empty(query, value, pack_query)
    for heads, block in _blocks(query, pack_key, key, value, pack_query, *rest):
        output[:, :, heads] = block.tokens(block.output())[:, : query.shape[1]]
        key_mean[:, heads], value_mean[:, heads] = block.means()
    return output, key_mean, value_mean


def formula(
    query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, pack_query: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and the means after the last token, computed with operators of PyTorch."""
    blocks = [block for _, block in _blocks(query, pack_key, key, value, pack_query, *rest)]
    output = torch.cat([block.tokens(block.output())[:, : query.shape[1]] for block in blocks], 2)
    key_means, value_means = zip(*(block.means() for block in blocks), strict=True)
    return output.to(value.dtype), torch.cat(key_means, 1), torch.cat(value_means, 1)


def empty(query: Tensor, value: Tensor, pack_query: Tensor, **_rest: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for the result and the means after the last token."""
    (batch, _, heads, size), length, dtype = query.shape, pack_query.shape[1], upcast_dtype(query)
    key_mean = query.new_empty((batch, heads, size, length), dtype=dtype)
    return value.new_empty(value.shape), key_mean, query.new_empty((batch, heads, length, value.shape[3]), dtype=dtype)


def _backward(
    grad_output: Tensor, grad_key_mean: Tensor | None, grad_value_mean: Tensor | None, *inputs: Any
) -> list[Tensor | None]:
    """Return the gradients of query, pack_key, key, value, pack_query and the means."""
    length, mask, means = inputs[0].shape[1], inputs[6], inputs[8:10]
    grads: list[Any] = [None if x is None else x.new_empty(x.shape) for x in (*inputs[:5], *means)]
    for heads, block in _blocks(*inputs):
        block_means = (None if x is None else x[:, heads] for x in (grad_key_mean, grad_value_mean))
        *grad_tokens, grad_pack_query, grad_key_sum, grad_value_sum = block.backward(
            grad_output[:, :, heads], *block_means
        )
        for grad, grad_block in zip(grads[:4], grad_tokens, strict=True):
            grad[:, :, heads] = block.tokens(grad_block)[:, :length]
        grads[4][:, :, heads] = block.tokens(grad_pack_query)
        if means[0] is not None:
            grads[5][:, heads] = block.state(grad_key_sum, block.past)
            grads[6][:, heads] = block.state(grad_value_sum, block.past)
    if mask is not None:
        for grad in grads[1:4]:
            grad.masked_fill_(~mask[:, :, None, None], 0.0)
    return grads


def flops(query: Tensor, value: Tensor, pack_query: Tensor, **_rest: object) -> tuple[int, int]:
    """Return the FLOPs of an operator and of its gradient for `[B, T, H, K]`, or one token `[B, H, K]`."""
    key_flops, value_flops = (2 * pack_query.shape[1] * x.numel() for x in (query, value))
    # Pack scores, sum of keys and unpack scores; sum of values and output. The gradient recomputes all but the output.
    forward = 3 * key_flops + 2 * value_flops
    return forward, 2 * forward + 3 * key_flops + value_flops


operator = register(
    "luna_causal_attention",
    INPUTS,
    "(Tensor, Tensor, Tensor)",
    _forward,
    empty,
    _backward,
    flops=flops,
    differentiable=DIFFERENTIABLE,
    gradients=GRADIENTS,
    formula=formula,
)
