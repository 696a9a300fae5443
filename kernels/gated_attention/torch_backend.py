"""Gated attention in PyTorch, one block of scores at a time; only small scores are stored for the backward pass."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._custom_operator import register
from .._export import chunk_positions
from .._mode import COMPILED, FORMULAS, is_known, mode
from ..dropout import dropout_factors, host_seed
from ..upcast import upcast_dtype
from . import reference
from .torch_step import product_dtype

BLOCK_QUERIES = 256
# Number of scores in a block of several sequences or chunks: the first fits the cache of a CPU, the second saturates
# other devices.
BLOCK_SCORES_CPU, BLOCK_SCORES = 2**20, 2**26
# Scores are stored for the backward pass unless they need more bytes than this factor times value and output.
KEPT = 1.0
INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? mask, Tensor? start, str function, bool causal, "
    "SymInt offset, float dropout, Tensor? seed, bool keep"
)


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, function: str, causal: bool,
    chunk_size: int | None, offset: int, row_offset: Tensor | None, start: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Return `reference.attend` without the weights.

    With chunks, there must be one query per key, both starting at position 0. `mask` must also exclude keys before
    position 0.
    """
    if chunk_size is None:
        return _attend_full(query, key, value, bias, mask, function, causal, offset, row_offset, start, dropout)
    options = (function, causal, 0, None, None, dropout)
    batch, length, _ = query.shape
    if mode() >= COMPILED:
        # So that one exported program supports any length, including incomplete chunks.
        position, real = chunk_positions(length, chunk_size, query.device)
        mask = real.expand(batch, -1, -1) if mask is None else mask[:, position] & real
        query, key, value, mask = (x.flatten(0, 1) for x in (*(x[:, position] for x in (query, key, value)), mask))
        output = _attend_full(query, key, value, bias, mask, *options)
        return output.unflatten(0, (batch, -1)).flatten(1, 2)[:, torch.arange(length, device=query.device)]
    complete = length - length % chunk_size
    outputs = []
    for first, stop, size in ((0, complete, chunk_size), (complete, length, length - complete)):
        if first < stop:
            q, k, v = [x[:, first:stop].reshape(-1, size, x.shape[2]) for x in (query, key, value)]
            m = None if mask is None else mask[:, first:stop].reshape(-1, size)
            output = _attend_full(q, k, v, bias, m, *options)
            outputs.append(output.view(batch, stop - first, value.shape[2]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend_full(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, function: str, causal: bool,
    offset: int, row_offset: Tensor | None, start: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    if mode() in FORMULAS:
        scoring = (bias, mask, function, causal, None, offset, row_offset, start)
        return reference.attend(query, key, value, *scoring, dropout=dropout)[0]
    if bias is not None:
        middle, positions = bias.shape[0] // 2, _positions(query, key, offset)
        if row_offset is None:
            bias = bias[middle - positions + 1 : middle + positions]
        else:
            lag = torch.arange(1 - positions, positions, device=bias.device) - row_offset[:, None]
            bias = bias[(middle + lag).clamp(0, bias.shape[0] - 1)]
    seed = host_seed(query, dropout)
    start = start if causal and function != "softmax" else None
    inputs = (query, key, value, bias, mask, start, function, causal, offset, dropout, seed)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:4])
    keep = trained and _scores_are_few(query, key, value)
    return operator(*inputs, keep)[0]


def _scores_are_few(query: Tensor, key: Tensor, value: Tensor) -> bool:
    queries, keys = query.shape[1], key.shape[1]
    scores = queries * keys * upcast_dtype(query, value).itemsize
    few = scores <= KEPT * (queries + keys) * value.shape[2] * value.dtype.itemsize
    return is_known(few)


def _positions(query: Tensor, key: Tensor, offset: int) -> int:
    return max(offset + query.shape[1], key.shape[1], 1)


class _Blocks:
    """The scores and weights of N sequences or chunks, computed in blocks of some sequences and some queries."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, start: Tensor | None,
        function: str, causal: bool, offset: int, dropout: float, seed: Tensor | None, keep: bool,
    ) -> None:  # fmt: skip
        self.function, self.causal, self.offset, self.dropout, self.keep = function, causal, offset, dropout, keep
        self.dtype = upcast_dtype(query, value)
        self.value_dtype = product_dtype(value, self.dtype)
        self.divisor: float | Tensor = math.sqrt(query.shape[2])  # of the scores; a tensor is `[B or 1, T or 1, 1]`
        if function != "softmax" and causal:
            visible = torch.arange(offset + 1, offset + query.shape[1] + 1, device=query.device)
            self.divisor = (visible if start is None else (visible + start[:, None]).clamp(min=1))[..., None]
        elif function != "softmax":
            self.divisor = max(key.shape[1], 1) if mask is None else mask.sum(dim=1).clamp(min=1)[:, None, None]
        self.query, self.key = query.to(self.dtype) / self.divisor, key.to(self.dtype)
        self.value = value.to(self.value_dtype)
        # Entry positions - 1 + lag; lags above 0 are keys after the query, so this is also the causal mask.
        # One row for all sequences, or one per sequence.
        self.positions, self.row_bias = _positions(query, key, offset), bias is not None and bias.dim() == 2
        self.bias = query.new_zeros(len(query) if self.row_bias else 1, 2 * self.positions - 1, dtype=self.dtype)
        if bias is not None:
            self.bias += bias
        if causal:
            self.bias[:, self.positions :] = float("-inf")
        self.masked = self.keyless = None
        if mask is not None:
            self.masked = ~mask[:, None, :]
        if mask is not None and function == "softmax":
            visible = mask.cumsum(1)[:, offset : offset + query.shape[1]] if causal else mask.sum(1, keepdim=True)
            self.keyless = (visible == 0)[:, :, None].expand(-1, query.shape[1], 1)
        self.generator = None if seed is None else torch.Generator(query.device).manual_seed(int(seed))

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield (sequences, queries, keys) of every block.

        The order is fixed, because the random numbers of dropout depend on it.
        """
        count, length, keys = self.query.shape[0], self.query.shape[1], self.key.shape[1]
        limit = BLOCK_SCORES_CPU if self.query.device.type == "cpu" else BLOCK_SCORES
        sequences = max(1, limit // max(1, min(BLOCK_QUERIES, length) * keys))
        for first in range(0, count, sequences):
            for first_query in range(0, length, BLOCK_QUERIES):
                stop = min(first_query + BLOCK_QUERIES, length)
                visible = self.offset + stop if self.causal else keys
                yield slice(first, first + sequences), slice(first_query, stop), slice(0, visible)

    def lags(self, n: slice, queries: slice, keys: slice) -> tuple[slice, slice]:
        """Return the part of the bias between a block's queries and keys."""
        first = self.positions - self.offset - queries.stop
        return n if self.row_bias else slice(0, 1), slice(first, first + queries.stop - queries.start + keys.stop - 1)

    def scores(self, n: slice, queries: slice, keys: slice, out: Tensor | None = None) -> Tensor:
        bias = self.bias[self.lags(n, queries, keys)].unfold(1, keys.stop, 1).flip(1)
        scores = torch.baddbmm(bias, self.query[n, queries], self.key[n, keys].transpose(1, 2), out=out)
        # The lowest number instead of -inf: the softmax of a query without keys stays finite until it is set to 0.
        if self.masked is not None:
            scores.masked_fill_(self.masked[n, :, keys], torch.finfo(self.dtype).min)
        return scores

    def weights(self, scores: Tensor, n: slice, queries: slice, out: Tensor | None = None) -> Tensor:
        """Return the weights, computed as in the reference; `out` is used for softmax only."""
        if self.function == "relu2":
            return torch.relu(scores).square_()
        if self.function == "laplace":
            width = reference.LAPLACE_DEVIATION * math.sqrt(2.0)
            return scores.sub(reference.LAPLACE_MEAN).div_(width).erf_().add_(1.0).mul_(0.5)
        weights = torch.softmax(scores, dim=-1, out=out)
        return weights if self.keyless is None else weights.masked_fill_(self.keyless[n, queries], 0.0)

    def through_function(self, grad: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of the scores from the gradient of the weights."""
        if self.function == "softmax":
            return torch._softmax_backward_data(grad, weights, -1, self.dtype)
        if self.function == "relu2":
            return torch.relu(scores).mul_(2.0).mul_(grad)
        deviation = reference.LAPLACE_DEVIATION
        density = scores.sub(reference.LAPLACE_MEAN).div_(deviation).square_().mul_(-0.5).exp_()
        return density.mul_(grad).div_(deviation * math.sqrt(2.0 * math.pi))

    def dropped(self, weights: Tensor) -> Tensor:
        """Draw the dropout factors of the weights."""
        return dropout_factors(weights, self.dropout, self.generator)


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return the output and, if `keep`, the scores for the backward pass (for softmax, the weights)."""
    blocks = _Blocks(query, key, value, *rest)
    output, kept = _empty(query, key, value, blocks.keep)
    for n, queries, keys in blocks:
        place = kept[n, queries, keys] if blocks.keep else None
        if blocks.function == "softmax":
            weights = blocks.weights(blocks.scores(n, queries, keys), n, queries, place)
        else:
            weights = blocks.weights(blocks.scores(n, queries, keys, place), n, queries)
        if blocks.dropout > 0.0:
            weights = weights * blocks.dropped(weights)
        _set_product(output[n, queries], weights.to(blocks.value_dtype), blocks.value[n, keys])
    return output, kept


def _empty(query: Tensor, key: Tensor, value: Tensor, keep: bool, **_: object) -> tuple[Tensor, Tensor]:
    kept = query.new_empty((*query.shape[:2], key.shape[1]) if keep else 0, dtype=upcast_dtype(query, value))
    return value.new_empty(*query.shape[:2], value.shape[2]), kept


def _backward(grad_output: Tensor, kept: Tensor, *inputs: Any) -> list[Tensor | None]:
    blocks, (query, key, value, bias) = _Blocks(*inputs), inputs[:4]
    # The first block of a sequence overwrites the gradients of keys and values if it attends to all of them.
    visible = blocks.offset + min(query.shape[1], BLOCK_QUERIES) if blocks.causal else key.shape[1]
    set_first = 0 < query.shape[1] and visible == key.shape[1]
    make = torch.empty if set_first else torch.zeros
    grad_query, grad_key, grad_value = (make(x.shape, dtype=blocks.dtype, device=x.device) for x in (query, key, value))
    grad_bias = torch.zeros_like(blocks.bias)
    grad_output = grad_output.to(blocks.value_dtype)
    for n, queries, keys in blocks:
        write = _set_product if set_first and queries.start == 0 else _add_product
        scores = weights = kept[n, queries, keys] if blocks.keep else blocks.scores(n, queries, keys)
        if not blocks.keep or blocks.function != "softmax":
            weights = blocks.weights(scores, n, queries)
        grad = torch.bmm(grad_output[n, queries], blocks.value[n, keys].transpose(1, 2)).to(blocks.dtype)
        used = weights
        if blocks.dropout > 0.0:
            dropped = blocks.dropped(weights)
            grad *= dropped
            used = weights * dropped
        write(grad_value[n, keys], used.to(blocks.value_dtype).transpose(1, 2), grad_output[n, queries])
        grad = blocks.through_function(grad, scores, weights)
        _set_product(grad_query[n, queries], grad, blocks.key[n, keys])
        write(grad_key[n, keys], grad.transpose(1, 2), blocks.query[n, queries])
        if bias is not None:
            grad = grad if blocks.row_bias else grad.sum(dim=0, keepdim=True)
            grad_bias[blocks.lags(n, queries, keys)] += _diagonal_sums(grad)
    grad_query /= blocks.divisor
    gradients = zip((grad_query, grad_key, grad_value), (query, key, value), strict=True)
    grads = [grad.to(x.dtype) for grad, x in gradients]
    return [*grads, None if bias is None else grad_bias.view(bias.shape).to(bias.dtype)]


def _formula(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, start: Tensor | None,
    function: str, causal: bool, offset: int, dropout: float, seed: Tensor | None, keep: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the output, computed with operators of PyTorch."""
    weights = reference.weights(query, key, bias, mask, function, causal, offset=offset, start=start)
    if dropout > 0.0:
        with torch.no_grad():
            blocks = _Blocks(query, key, value, bias, mask, start, function, causal, offset, dropout, seed, keep)
            factors = torch.zeros_like(weights)
            for n, queries, keys in blocks:
                factors[n, queries, keys] = blocks.dropped(weights[n, queries, keys])
        weights = weights * factors
    return weights.to(value.dtype) @ value, None


def _set_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.dtype == left.dtype:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left, right))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)


def _diagonal_sums(matrices: Tensor) -> Tensor:
    """Return the sums `[N, R + S - 1]` over the diagonals of `[N, R, S]`, starting at the lower left corner."""
    _, rows, columns = matrices.shape
    # Rows are one element longer than in the next view, so each shifts one column relative to the row above.
    skewed = torch.nn.functional.pad(matrices.flip(1), (0, rows)).flatten(1)
    return skewed[:, : rows * (rows + columns - 1)].view(-1, rows, rows + columns - 1).sum(dim=1)


def _flops(query: Tensor, key: Tensor, value: Tensor, keep: bool, **_: object) -> tuple[int, int]:
    return count_flops(query, value, query.shape[1] * key.shape[1] * len(query), recompute=not keep)


def count_flops(query: Tensor, value: Tensor, pairs: int, recompute: bool) -> tuple[int, int]:
    """Return the FLOPs of an operator and of its gradient for all pairs of a query and a key."""
    scores, output = 2 * pairs * query.shape[2], 2 * pairs * value.shape[2]
    return scores + output, 2 * (scores + output) + scores * recompute


operator = register(
    "gated_attend",
    INPUTS,
    "(Tensor, Tensor)",
    _forward,
    _empty,
    _backward,
    flops=_flops,
    differentiable=("query", "key", "value", "bias"),
    saved="Tensor kept",
    save=lambda inputs, outputs: outputs[1:],
    formula=_formula,
)
