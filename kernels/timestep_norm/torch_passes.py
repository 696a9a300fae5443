"""The passes of timestep norm in PyTorch: over all features of x `[B, T, D]`, and over time of numbers per group.

Passes over features process blocks of positions that fit the CPU cache. Passes over time compute float64 statistics of
all positions so far from the group mean and variance of every position. n_t is the number of unmasked positions. m_t
and v_t are the mean and variance of a group at one position, M_t and S_t those of all positions up to t:

    n_t M_t = n_0 M_0 + sum_k m_k
    n_t S_t = n_0 S_0 + sum_k (v_k + (1 - 1 / n_k) (m_k - M_{k-1})^2)

No term of the second sum is negative, so there is no cancellation, even if the mean is large.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Elements of x in one block; several tensors of this size must fit the processor's cache together.
BLOCK = 1 << 19


def moments(x: Tensor, mask: Tensor | None, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of the groups of each position, m_t and v_t `[B, T, G]`."""
    tokens, kept = _flatten(x, mask)
    own, spread = (torch.empty(*x.shape[:2], groups, dtype=dtype, device=x.device) for _ in range(2))
    token_own, token_spread = own.view(-1, groups), spread.view(-1, groups)
    for block, (around,) in _blocks(tokens, groups, dtype, 1):
        values = _masked_block(tokens, kept, block, around)
        token_own[block] = _means(values)
        torch.sub(values, token_own[block, :, None], out=around)
        token_spread[block] = _means(around.mul_(around))
    return own, spread


def statistics(
    own: Tensor, spread: Tensor, mask: Tensor | None, count: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return M_t (float64) and the rstd of S_t, `[B, T, G]`, and the last mean and variance, from m_t and v_t."""
    number = counts(count, mask, own.shape[1])
    means, totals = over_time(count, mean, variance, number, own.double(), spread.double(), mask)
    last = totals[:, -1] / number[:, -1]
    rstd = totals.div_(number).to(own.dtype).add_(eps).rsqrt_()
    return means, rstd, means[:, -1].clone(), last


def apply(
    x: Tensor, mask: Tensor | None, means: Tensor, rstds: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return (x - means) rstds weight + bias, 0 if masked."""
    tokens, kept, means, rstds = _flatten(x, mask, means.to(rstds.dtype), rstds)
    y, groups = torch.empty(x.shape, dtype=x.dtype, device=x.device), means.shape[1]
    outputs, same = y.view(tokens.shape), tokens.dtype == means.dtype
    # Intermediate values of a block are stored in the result if it has their dtype.
    for block, scratch in _blocks(tokens, groups, means.dtype, 0 if same else 1):
        around = outputs[block].unflatten(1, (groups, -1)) if same else scratch[0]
        torch.sub(_masked_block(tokens, kept, block, around), means[block], out=around)
        affine(around.mul_(rstds[block]).flatten(1), weight, bias, outputs[block])
        if kept is not None:
            outputs[block].masked_fill_(~kept[block, None], 0.0)
    return y


def sums(
    gradients: Tensor, x: Tensor, mask: Tensor | None, means: Tensor, rstds: Tensor, weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the group means of g = gradients rstds weight and of g (x - means), and the gradients of weight and bias.

    The latter are not used if weight or bias is None.
    """
    shape, dtype = means.shape, rstds.dtype
    tokens, kept, means, rstds = _flatten(x, mask, means.to(dtype), rstds)
    gradients, groups = gradients.reshape(tokens.shape), means.shape[1]
    scale = None if weight is None else weight.to(dtype).view(groups, -1)
    grad_weight, grad_bias = (rstds.new_zeros(0 if t is None else t.shape) for t in (weight, bias))
    summed, products = (means.new_empty(len(tokens), groups) for _ in range(2))
    for block, (received, product) in _blocks(tokens, groups, dtype, 2):
        gradient = _masked_block(gradients, kept, block, received)
        if bias is not None:
            grad_bias += _token_sums(gradient)
        torch.mul(gradient, rstds[block], out=received)
        torch.sub(_masked_block(tokens, kept, block, product), means[block], out=product)
        product.mul_(received)
        if scale is not None:
            grad_weight += _token_sums(product)
            product.mul_(scale)
            received.mul_(scale)
        summed[block], products[block] = _means(received), _means(product)
    return summed.view(shape), products.view(shape), grad_weight, grad_bias


def statistics_backward(
    sums: Tensor, products: Tensor, own: Tensor, means: Tensor, rstd: Tensor, mask: Tensor | None, count: Tensor,
    mean: Tensor, grad_mean: Tensor | None, grad_variance: Tensor | None, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the stretches and shifts of `apply_backward`, and the gradients of the initial mean and variance.

    `sums` and `products` are the results of `sums`, `own` and `means` are m_t and M_t, and `grad_mean` and
    `grad_variance` are the gradients of the last mean and variance.
    """
    number = counts(count, mask, own.shape[1])
    share = 1.0 / number
    # `sums` and `products` are means over the features of a group, so the gradients of m and v are per feature. The
    # last gradients are those of n M and n S after the last position.
    last_sum, last_total = (
        torch.zeros_like(mean) if grad is None else grad / (width * number[:, -1])
        for grad in (grad_mean, grad_variance)
    )
    grad_total = _sums_from_end(-0.5 * rstd.double().square() * products.double() * share, last_total)
    grad_away = 2.0 * grad_total * (1.0 - share) * _distances(own.double(), mean[:, None], means, mask)
    direct = -sums.double() - torch.cat((grad_away[:, 1:], torch.zeros_like(grad_away[:, :1])), 1)
    grad_sum = _sums_from_end(direct * share, last_sum)
    # The gradient of x is the gradient of x - M, plus grad_own + 2 grad_spread (x - m).
    grad_own, grad_spread = _kept(grad_sum + grad_away, mask), _kept(grad_total, mask)
    stretch, started = grad_spread.mul(2.0), count[:, None] * width
    initial = started * grad_sum[:, 0] - width * grad_away[:, 0], started * grad_total[:, 0]
    return stretch.to(own.dtype), (grad_own - stretch * own).to(own.dtype), *initial


def apply_backward(
    gradients: Tensor, x: Tensor, mask: Tensor | None, stretches: Tensor, shifts: Tensor, rstds: Tensor,
    weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return gradients rstds weight + x stretches + shifts."""
    tokens, kept, stretches, shifts, rstds = _flatten(x, mask, stretches, shifts, rstds)
    gradients, grad_x = gradients.reshape(tokens.shape), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_tokens = grad_x.view(tokens.shape)
    for block, (received, inner) in _blocks(tokens, shifts.shape[1], shifts.dtype, 2):
        torch.mul(_masked_block(tokens, kept, block, inner), stretches[block], out=inner)
        inner.add_(shifts[block])
        torch.mul(_masked_block(gradients, kept, block, received), rstds[block], out=received)
        affine(received.flatten(1), weight, inner.flatten(1), grad_tokens[block])
    return grad_x


def counts(count: Tensor, mask: Tensor | None, length: int) -> Tensor:
    """Return the number of kept positions up to each one, `[B, T, 1]` float64, at least 1, with initial `count`."""
    if mask is None:
        kept = torch.arange(1, length + 1, device=count.device).expand(len(count), -1)
    else:
        kept = mask.cumsum(1)
    return (count[:, None] + kept).clamp(min=1).double()[..., None]


def over_time(
    count: Tensor, mean: Tensor, variance: Tensor, number: Tensor, means: Tensor, variances: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return M_t and n_t S_t, `[B, T, G]`, for m_t and v_t, `[B, T, G]`.

    `count`, `mean`, `variance` are n_0 `[B]`, M_0 and S_0 `[B, G]`; `number` is n_t `[B, T, 1]`.
    """
    so_far = (_kept(means, mask).cumsum(1) + (count[:, None] * mean)[:, None]) / number
    squares = _distances(means, mean[:, None], so_far, mask).square()
    gained = torch.addcmul(_kept(variances, mask), squares, 1.0 - 1.0 / number)
    return so_far, gained.cumsum(1) + (count[:, None] * variance)[:, None]


def _distances(means: Tensor, first: Tensor, mean: Tensor, mask: Tensor | None) -> Tensor:
    """Return m_t - M_{t-1}, 0 if masked; `first` `[B, 1, G]` is M_0, `mean` is M_1 to M_T."""
    return _kept(means - torch.cat((first, mean), 1)[:, : mean.shape[1]], mask)


def _kept(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def _sums_from_end(x: Tensor, last: Tensor) -> Tensor:
    """Return, for every position, the sum of x `[B, T, G]` from there to the end, plus `last` `[B, G]`."""
    before = x.cumsum(1).sub_(x)
    return (before[:, -1:] + x[:, -1:] + last[:, None]) - before


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
    """Return y times weight plus bias; write it to `into` if that is given."""
    out = into if into is not None and into.dtype == y.dtype else None
    if weight is not None:
        y = torch.mul(y, weight, out=out) if bias is None else torch.addcmul(bias, y, weight, out=out)
    elif bias is not None:
        y = torch.add(y, bias, out=out)
    return y if into is None or y is out else into.copy_(y)


def _blocks(tokens: Tensor, groups: int, dtype: torch.dtype, tensors: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield slices of tokens `[B T, D]`, each with `tensors` scratch tensors `[tokens, G, D / G]`.

    On the CPU, a slice and its tensors fit the cache. The tensors of the previous slice are reused, because allocation
    would take longer than the computation.
    """
    total, features = tokens.shape
    size = min(total, max(1, BLOCK // max(features, 1)) if tokens.device.type == "cpu" else total)
    scratch = [tokens.new_empty(size, groups, features // groups, dtype=dtype) for _ in range(tensors)]
    for start in range(0, total, max(size, 1)):
        block = slice(start, min(start + size, total))
        yield block, [tensor[: block.stop - start] for tensor in scratch]


def _flatten(x: Tensor, mask: Tensor | None, *numbers: Tensor) -> Any:
    """Return x as `[B T, D]`, the mask as `[B T]`, and numbers of groups `[B, T, G]` as `[B T, G, 1]`."""
    return (
        x.reshape(-1, x.shape[2]),
        None if mask is None else mask.reshape(-1),
        *(number.reshape(-1, number.shape[2], 1) for number in numbers),
    )


def _masked_block(tokens: Tensor, kept: Tensor | None, block: slice, scratch: Tensor) -> Tensor:
    """Return a block of tokens in groups, in the dtype of `scratch`, with 0 at masked tokens.

    The result may be written to `scratch`.
    """
    tokens = tokens[block].view(scratch.shape)
    if kept is None and tokens.dtype == scratch.dtype:
        return tokens
    scratch.copy_(tokens)
    return scratch if kept is None else scratch.masked_fill_(~kept[block, None, None], 0.0)


def _means(x: Tensor) -> Tensor:
    """Return the means over the last dimension, as a matrix product, which is faster than summing short rows."""
    return x @ x.new_full(x.shape[-1:], 1.0 / x.shape[-1])


def _token_sums(tokens: Tensor) -> Tensor:
    """Return the sums `[D]` over tokens `[B T, G, D / G]`."""
    return tokens.new_ones(len(tokens)) @ tokens.flatten(1)
