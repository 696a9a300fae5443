"""Position-aware pack in PyTorch: sums over the tokens of each row, linear in the length."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from luna_mega.kernels._export import in_program, is_exporting, is_tracing
from luna_mega.kernels.upcast import upcast_dtype
from luna_mega.kernels.varlen import locate


def assign_rows(score: Tensor, mask: Tensor, rows: int) -> Tensor:
    """Return `reference.assign_rows`; the rows of masked positions keep the order."""
    rank = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    if not in_program() and mask.shape[1] <= rows:
        return rank
    score = score.float()
    peak = score.masked_fill(~mask, float("-inf")).amax(dim=-1, keepdim=True)
    # The lower limit keeps the factor finite.
    weight = (score - peak).clamp(min=-30.0, max=0.0).exp().masked_fill(~mask, 0.0)
    cost = _fill(weight, rows)
    # Sums of equal float32 numbers are exact in float64, so ties do not depend on padding or on the device.
    end = cost.cumsum(dim=-1, dtype=torch.float64)
    middle = (end - cost / 2) * rows / end[:, -1:].clamp(min=1e-30)
    assigned = middle.long().clamp(min=0, max=rows - 1)
    if not is_exporting():  # ONNX has no such operator
        # A parallel sum may decrease by a rounding error.
        assigned = assigned.cummax(dim=-1).values
    return torch.where(mask.sum(dim=-1, keepdim=True) <= rows, rank, assigned)


def _fill(weight: Tensor, budget: int) -> Tensor:
    """Return the costs `min(1, factor * weight)`, `[B, T]`, that sum to `budget` (water filling).

    The weights are sorted once. If the k heaviest tokens have cost 1, the factor is (budget - k) / (sum of the other
    weights). The solution is the smallest k for which the next token costs at most 1.
    """
    heaviest = weight.sort(dim=-1, descending=True).values
    others = heaviest.flip(-1).cumsum(dim=-1).flip(-1)
    left = budget - torch.arange(weight.shape[-1], device=weight.device)
    k = (left * heaviest <= others).int().argmax(dim=-1, keepdim=True)  # the first
    return (left[k] / others.gather(-1, k).clamp(min=1e-30) * weight).clamp(max=1.0)


def segment_pack(
    states: Tensor, score: Tensor, row: Tensor, mask: Tensor | None, rows: int,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, run: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return `reference.segment_pack`; with `cu_seqlens` the tokens are `[1, total]`, and `row` counts per sequence.

    `run` packs the rows of all sequences, None = this file's function.
    """
    if cu_seqlens is None:
        sequence, batch = torch.arange(row.shape[0], device=row.device)[:, None], row.shape[0]
    else:
        sequence, batch = locate(cu_seqlens, row.shape[1])[0], cu_seqlens.shape[0] - 1
    flat = states.flatten(0, 1), score.flatten().to(upcast_dtype(states)), None if mask is None else mask.flatten()
    index = (row + rows * sequence).flatten()  # the row of every token among the rows of all sequences
    if run is None:
        # `torch.jit.trace` does not support numbers in an autograd function.
        run = _pack if is_tracing() else _SegmentPack.apply
    packed, entropy, total = run(*flat, index, batch * rows)[:3]
    return packed.to(states.dtype).unflatten(0, (batch, rows)), entropy.view(batch, rows), total.view(batch, rows) != 0


def _sums(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return the sums `[rows, ...]` of the elements of x `[N, ...]` in each row; `index` `[N]` contains the rows."""
    zeros = x.new_zeros(rows, *x.shape[1:])
    if x.is_cuda:  # index_add uses atomics there, which are not deterministic
        return zeros.index_put((index,), x, accumulate=True)
    return zeros.index_add(0, index, x)


def _pack(states: Tensor, score: Tensor, mask: Tensor | None, index: Tensor, rows: int) -> tuple[Any, ...]:
    """Return the packed rows, entropy and total weight, and the tensors that the backward pass reads."""
    dropped = None if mask is None else ~mask
    if dropped is not None:
        score = score.masked_fill(dropped, float("-inf"))
    peak = score.new_zeros(rows).scatter_reduce(0, index, score.detach(), "amax", include_self=False)
    relative = score - peak[index]
    weight = relative.exp()
    if dropped is not None:  # -inf * 0 is NaN
        relative, weight = relative.masked_fill(dropped, 0.0), weight.masked_fill(dropped, 0.0)
    total = _sums(weight, index, rows)  # 0: a row without tokens, else at least 1
    divisor = total.masked_fill(total == 0, 1.0)
    weight = weight / divisor[index]
    entropy = divisor.log() - _sums(weight * relative, index, rows)
    weighted = weight[:, None] * states
    if dropped is not None:
        weighted = weighted.masked_fill(dropped[:, None], 0.0)
    return _sums(weighted, index, rows), entropy, total, dropped, weight, relative, divisor


class _SegmentPack(torch.autograd.Function):
    """Pack tokens `[N, D]`. The backward pass computes no sums over the tokens of a row."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, score: Tensor, mask: Tensor | None, index: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        packed, entropy, total, dropped, weight, relative, divisor = _pack(states, score, mask, index, rows)
        ctx.save_for_backward(states, index, dropped, weight, relative, packed, entropy, divisor)
        ctx.mark_non_differentiable(total)
        return packed, entropy, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_packed: Tensor, grad_entropy: Tensor, _: Any) -> tuple[Any, ...]:
        states, index, dropped, weight, relative, packed, entropy, divisor = ctx.saved_tensors
        grad_rows = grad_packed[index]
        own = (grad_rows * states).sum(dim=-1) - grad_entropy[index] * relative
        # The weighted mean of `own` over the tokens of a row.
        mean = (grad_packed * packed).sum(dim=-1) - grad_entropy * (divisor.log() - entropy)
        grad_score = weight * (own - mean[index])
        if dropped is not None:  # masked states may be NaN
            grad_score = grad_score.masked_fill(dropped, 0.0)
        return (weight[:, None] * grad_rows).to(states.dtype), grad_score, None, None, None
