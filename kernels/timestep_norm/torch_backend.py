"""Timestep norm in PyTorch: blocks of positions that fit the CPU cache, and float64 sums over time."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from luna_mega.kernels._custom_operator import register
from luna_mega.kernels._export import is_exporting
from luna_mega.kernels.timestep_norm.reference import TimestepNormState
from luna_mega.kernels.timestep_norm.statistics import counts, distances, over_time
from luna_mega.kernels.upcast import upcast_dtype

# Elements of x in one block; several tensors of this size must fit the processor's cache together.
BLOCK = 1 << 19
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
        run = _in_program if is_exporting() else operator
    y, _, _, _, mean, variance = run(x, weight, bias, mask, count, mean, variance, groups, eps)
    return y, TimestepNormState(count + (x.shape[1] if mask is None else mask.sum(1)), mean, variance)


def step(
    x: Tensor, state: TimestepNormState, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float,
    mask: Tensor | None,
) -> tuple[Tensor, TimestepNormState]:  # fmt: skip
    """Return `reference.step` in few operations, because call overhead dominates for one position."""
    dtype, count = upcast_dtype(x, weight), state.count + (1 if mask is None else mask)
    share = count.double().reciprocal()[:, None]
    rows = x.to(dtype)
    if mask is not None:
        rows, share = rows.masked_fill(~mask[:, None], 0.0), share.masked_fill(~mask[:, None], 0.0)
    rows = rows.unflatten(1, (groups, -1))
    spread, own = (values.double() for values in torch.var_mean(rows, -1, correction=0))
    away = own - state.mean
    mean = torch.addcmul(state.mean, away, share)
    variance = torch.lerp(state.variance, torch.addcmul(spread, away, own - mean), share)
    y = (rows - mean[..., None]) * torch.rsqrt(variance + eps)[..., None]
    y = _affine(y.flatten(1).to(dtype), weight, bias).to(x.dtype)
    y = y if mask is None else y.masked_fill(~mask[:, None], 0.0)
    return y, TimestepNormState(count, mean, variance)


def _in_program(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, count: Tensor, mean: Tensor,
    variance: Tensor, groups: int, eps: float,
) -> tuple[Tensor, None, None, None, Tensor, Tensor]:  # fmt: skip
    """Compute the result with PyTorch operators only, for exported programs."""
    number = counts(count, mask, x.shape[1])
    rows = x.to(upcast_dtype(x, weight))
    rows = rows if mask is None else rows.masked_fill(~mask[..., None], 0.0)
    rows = rows.unflatten(2, (groups, -1))
    middle = rows.mean(-1)
    around = rows - middle[..., None]
    of_each = middle.double(), around.square().mean(-1).double()
    means, totals = over_time(count, mean, variance, number, *of_each, mask)
    variances = totals / number
    rstd = torch.rsqrt(variances + eps).to(rows.dtype)
    y = (around + (middle - means).to(rows.dtype)[..., None]) * rstd[..., None]
    y = _affine(y.flatten(2), weight, bias).to(x.dtype)
    if mask is not None:
        y = y.masked_fill(~mask[..., None], 0.0)
    return y, None, None, None, means[:, -1], variances[:, -1]


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
    """Return y times weight plus bias; write it to `into` if that is given."""
    out = into if into is not None and into.dtype == y.dtype else None
    if weight is not None:
        y = torch.mul(y, weight, out=out) if bias is None else torch.addcmul(bias, y, weight, out=out)
    elif bias is not None:
        y = torch.add(y, bias, out=out)
    return y if into is None or y is out else into.copy_(y)


def _blocks(rows: Tensor, groups: int, dtype: torch.dtype, tensors: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield slices of rows `[R, D]`, each with `tensors` scratch tensors `[R, G, D / G]`.

    On the CPU, a slice and its tensors fit the cache. The tensors of the previous slice are reused, because allocation
    would take longer than the computation.
    """
    total, features = rows.shape
    size = min(total, max(1, BLOCK // max(features, 1)) if rows.device.type == "cpu" else total)
    scratch = [rows.new_empty(size, groups, features // groups, dtype=dtype) for _ in range(tensors)]
    for start in range(0, total, max(size, 1)):
        block = slice(start, min(start + size, total))
        yield block, [tensor[: block.stop - start] for tensor in scratch]


def _rows(x: Tensor, mask: Tensor | None, *of_groups: Tensor) -> Any:
    """Return x `[B, T, D]` as rows `[R, D]`, the mask as `[R]`, and per-group numbers `[B, T, G]` as `[R, G, 1]`."""
    numbers = (number.reshape(-1, number.shape[2], 1) for number in of_groups)
    return x.reshape(-1, x.shape[2]), None if mask is None else mask.reshape(-1), *numbers


def _of_block(rows: Tensor, kept: Tensor | None, block: slice, scratch: Tensor) -> Tensor:
    """Return a block of rows in groups, in the dtype of `scratch`, with 0 at masked rows.

    The result may be written to `scratch`.
    """
    rows = rows[block].view(scratch.shape)
    if kept is None and rows.dtype == scratch.dtype:
        return rows
    scratch.copy_(rows)
    return scratch if kept is None else scratch.masked_fill_(~kept[block, None, None], 0.0)


def _means(rows: Tensor) -> Tensor:
    """Return the means over the last dimension, as a matrix product, which is faster than summing short rows."""
    return rows @ rows.new_full(rows.shape[-1:], 1.0 / rows.shape[-1])


def _column_sums(rows: Tensor) -> Tensor:
    """Return the sums `[D]` over the rows of `[R, G, D / G]`."""
    return rows.new_ones(len(rows)) @ rows.flatten(1)


class Passes(NamedTuple):
    """The passes of a backend: over all features of x `[B, T, D]`, or over time of numbers per group `[B, T, G]`.

    moments: maps (x, mask, groups, dtype) to the mean and variance of the groups of each position.
    statistics: maps these, (mask, count, mean, variance, eps) to the means M_t (float64), the rstds of all positions so
    far, and the last mean and variance.
    apply: maps (x, mask, means, rstds, weight, bias) to (x - means) rstds weight + bias, 0 if masked.
    sums: maps (gradients, x, mask, means, rstds, weight, bias) to the group means of gradients rstds weight, and of
    that times x - means, and the gradients of weight and bias (not used if they are None).
    statistics_backward: maps these two means, (own means, means, rstds, mask, count, mean, grad_mean, grad_variance,
    width) to the stretches and shifts of `apply_backward`, and the gradients of the initial mean and variance.
    apply_backward: maps (gradients, x, mask, stretches, shifts, rstds, weight) to gradients rstds weight + x stretches
    + shifts.
    """

    moments: Callable[..., Any]
    statistics: Callable[..., Any]
    apply: Callable[..., Any]
    sums: Callable[..., Any]
    statistics_backward: Callable[..., Any]
    apply_backward: Callable[..., Any]


def _moments(x: Tensor, mask: Tensor | None, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, kept = _rows(x, mask)
    own, spread = (torch.empty(*x.shape[:2], groups, dtype=dtype, device=x.device) for _ in range(2))
    of_rows = own.view(-1, groups), spread.view(-1, groups)
    for block, (around,) in _blocks(rows, groups, dtype, 1):
        values = _of_block(rows, kept, block, around)
        of_rows[0][block] = _means(values)
        torch.sub(values, of_rows[0][block, :, None], out=around)
        of_rows[1][block] = _means(around.mul_(around))
    return own, spread


def _statistics(
    own: Tensor, spread: Tensor, mask: Tensor | None, count: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    number = counts(count, mask, own.shape[1])
    means, totals = over_time(count, mean, variance, number, own.double(), spread.double(), mask)
    last = totals[:, -1] / number[:, -1]
    rstd = totals.div_(number).to(own.dtype).add_(eps).rsqrt_()
    return means, rstd, means[:, -1].clone(), last


def _apply(
    x: Tensor, mask: Tensor | None, means: Tensor, rstds: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    rows, kept, means, rstds = _rows(x, mask, means.to(rstds.dtype), rstds)
    y, groups = torch.empty(x.shape, dtype=x.dtype, device=x.device), means.shape[1]
    of_rows, same = y.view(rows.shape), rows.dtype == means.dtype
    # Intermediate values of a block are stored in the result if it has their dtype.
    for block, scratch in _blocks(rows, groups, means.dtype, 0 if same else 1):
        around = of_rows[block].unflatten(1, (groups, -1)) if same else scratch[0]
        torch.sub(_of_block(rows, kept, block, around), means[block], out=around)
        _affine(around.mul_(rstds[block]).flatten(1), weight, bias, of_rows[block])
        if kept is not None:
            of_rows[block].masked_fill_(~kept[block, None], 0.0)
    return y


def _sums(
    gradients: Tensor, x: Tensor, mask: Tensor | None, means: Tensor, rstds: Tensor, weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    shape, dtype = means.shape, rstds.dtype
    rows, kept, means, rstds = _rows(x, mask, means.to(dtype), rstds)
    gradients, groups = gradients.reshape(rows.shape), means.shape[1]
    scale = None if weight is None else weight.to(dtype).view(groups, -1)
    grad_weight, grad_bias = (rstds.new_zeros(0 if t is None else t.shape) for t in (weight, bias))
    sums, products = (means.new_empty(len(rows), groups) for _ in range(2))
    for block, (received, product) in _blocks(rows, groups, dtype, 2):
        gradient = _of_block(gradients, kept, block, received)
        if bias is not None:
            grad_bias += _column_sums(gradient)
        torch.mul(gradient, rstds[block], out=received)
        torch.sub(_of_block(rows, kept, block, product), means[block], out=product)
        product.mul_(received)
        if scale is not None:
            grad_weight += _column_sums(product)
            product.mul_(scale)
            received.mul_(scale)
        sums[block], products[block] = _means(received), _means(product)
    return sums.view(shape), products.view(shape), grad_weight, grad_bias


def _statistics_backward(
    sums: Tensor, products: Tensor, own: Tensor, means: Tensor, rstd: Tensor, mask: Tensor | None, count: Tensor,
    mean: Tensor, grad_mean: Tensor | None, grad_variance: Tensor | None, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    number = counts(count, mask, own.shape[1])
    # `sums` and `products` are means over the features of a group, so the gradients of m and v are per feature.
    last = [
        torch.zeros_like(mean) if grad is None else grad / (width * number[:, -1])
        for grad in (grad_mean, grad_variance)
    ]
    away = distances(own.double(), mean[:, None], means, mask)
    of_own, of_spread, before = _back_in_time(sums.double(), products.double(), rstd, away, number, last, mask)
    # The gradient of x is the gradient of x - M, plus of_own + 2 of_spread (x - m).
    stretch, started = of_spread.mul(2.0), count[:, None] * width
    of_mean, of_variance = started * before[0] - width * before[2], started * before[1]
    return stretch.to(own.dtype), (of_own - stretch * own).to(own.dtype), of_mean, of_variance


def _apply_backward(
    gradients: Tensor, x: Tensor, mask: Tensor | None, stretches: Tensor, shifts: Tensor, rstds: Tensor,
    weight: Tensor | None,
) -> Tensor:  # fmt: skip
    rows, kept, stretches, shifts, rstds = _rows(x, mask, stretches, shifts, rstds)
    gradients, grad_x = gradients.reshape(rows.shape), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    of_rows = grad_x.view(rows.shape)
    for block, (received, inner) in _blocks(rows, shifts.shape[1], shifts.dtype, 2):
        torch.mul(_of_block(rows, kept, block, inner), stretches[block], out=inner)
        inner.add_(shifts[block])
        torch.mul(_of_block(gradients, kept, block, received), rstds[block], out=received)
        _affine(received.flatten(1), weight, inner.flatten(1), of_rows[block])
    return grad_x


def _forward(
    passes: Passes, x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None, count: Tensor,
    mean: Tensor, variance: Tensor, groups: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result, three statistics per position for the backward pass, and the last mean and variance.

    The statistics `[B, T, G]` are the means of single positions, and the means and rstd of all positions so far.
    """
    own, spread = passes.moments(x, mask, groups, upcast_dtype(x, weight))
    means, rstd, *last = passes.statistics(own, spread, mask, count, mean, variance, eps)
    return passes.apply(x, mask, means, rstd, weight, bias), own, means, rstd, *last


def _forward_fake(
    x: Tensor, weight: Tensor | None, mean: Tensor, groups: int, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    means = mean.new_empty(*x.shape[:2], groups)
    own, rstd = (torch.empty_like(means, dtype=upcast_dtype(x, weight)) for _ in range(2))
    return x.new_empty(x.shape), own, means, rstd, torch.empty_like(mean), torch.empty_like(mean)


def _backward(
    passes: Passes, gradient: Tensor, grad_mean: Tensor | None, grad_variance: Tensor | None, own: Tensor,
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


def _back_in_time(
    sums: Tensor, products: Tensor, rstd: Tensor, away: Tensor, number: Tensor, last: list[Tensor], mask: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return the gradients of the means and variances of single positions, `[B, T, G]`, and of the initial statistics.

    `sums` and `products` are the sums of the gradient of x - M, and of its product with x - M. `away` is m_t - M_{t-1}.
    `last` contains the gradients of n M and n S after the last position. The initial gradients are those of n M, n S
    and M before the first position.
    """
    share = 1.0 / number
    of_total = _sums_from_end(-0.5 * rstd.double().square() * products * share, last[1])
    of_away = 2.0 * of_total * (1.0 - share) * away
    direct = -sums - torch.cat((of_away[:, 1:], torch.zeros_like(of_away[:, :1])), 1)
    of_sum = _sums_from_end(direct * share, last[0])
    before = of_sum[:, 0], of_total[:, 0], of_away[:, 0]
    own = of_sum + of_away
    if mask is not None:
        own, of_total = (x.masked_fill(~mask[..., None], 0.0) for x in (own, of_total))
    return own, of_total, before


def _sums_from_end(x: Tensor, last: Tensor) -> Tensor:
    """Return, for every position, the sum of x `[B, T, G]` from there to the end, plus `last` `[B, G]`."""
    before = x.cumsum(1).sub_(x)
    return (before[:, -1:] + x[:, -1:] + last[:, None]) - before


def register_passes(name: str, passes: Passes) -> Callable[..., Any]:
    """Register the operator `name` and its backward, computed with these passes; return the function of `register`."""
    return register(
        name,
        INPUTS,
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        partial(_forward, passes),
        _forward_fake,
        partial(_backward, passes),
        flops=lambda **_: (0, 0),
        differentiable=("x", "weight", "bias", "mean", "variance"),
        gradients=(0, 4, 5),
        saved="Tensor own, Tensor means, Tensor rstd",
        save=lambda inputs, outputs: outputs[1:4],
    )


operator = register_passes(
    "luna_mega::timestep_norm", Passes(_moments, _statistics, _apply, _sums, _statistics_backward, _apply_backward)
)
