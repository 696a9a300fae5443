"""The norm over time in PyTorch: blocks of positions that stay in the cache, and sums over time in float64."""

import torch

from luna_mega.kernels.timestep_norm.reference import TimestepNormState
from luna_mega.kernels.timestep_norm.statistics import counts, distances, over_time

# Elements of x in one block, which several tensors of this size share the processor's cache with.
BLOCK = 1 << 17
# Added to the variance of a group at one position, so that a group of equal features has a finite quotient.
LEAST = 1e-30
INPUTS = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? mask, Tensor count, Tensor mean, Tensor variance, int groups, "
    "float eps"
)


def timestep_norm(x, groups, weight=None, bias=None, eps=1e-5, mask=None, initial_state=None):
    """Return `reference.timestep_norm`."""
    count, mean, variance = initial_state
    run = _in_program if torch.compiler.is_exporting() else torch.ops.luna_mega.timestep_norm
    y, _, _, mean, variance = run(x, weight, bias, mask, count, mean, variance, groups, eps)
    return y, TimestepNormState(count + (x.shape[1] if mask is None else mask.sum(1)), mean, variance)


def step(x, state, groups, weight, bias, eps, mask):
    """Return `reference.step`."""
    mask = None if mask is None else mask[:, None]
    y, _, _, mean, variance = _in_program(x[:, None], weight, bias, mask, *state, groups, eps)
    count = state.count + (1 if mask is None else mask[:, 0])
    return y[:, 0], TimestepNormState(count, mean, variance)


def _in_program(x, weight, bias, mask, count, mean, variance, groups, eps):
    """Compute the operator by plain ones: for single positions and exported programs."""
    rows = _wide(x, mask, weight).unflatten(2, (groups, -1))
    spread, middle = torch.var_mean(rows, -1, correction=0)
    middle, spread = middle.double(), spread.double()
    _, means, _, variances = over_time(count, mean, variance, middle, spread, mask)
    rstd = torch.rsqrt(variances + eps).to(rows.dtype)
    # The difference of two means is rounded, not the means.
    y = (rows - middle.to(rows.dtype)[..., None] + (middle - means).to(rows.dtype)[..., None]) * rstd[..., None]
    return _affine(y.flatten(2), weight, bias, mask).to(x.dtype), None, None, means[:, -1], variances[:, -1]


def _wide(x, mask, weight):
    """Return x in float32, or float64 where one of both is, and 0 where masked."""
    double = x.dtype == torch.float64 or (weight is not None and weight.dtype == torch.float64)
    x = x.to(torch.float64 if double else torch.float32)
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def _affine(y, weight, bias, mask):
    if weight is not None:
        y = y * weight if bias is None else torch.addcmul(bias, y, weight)
    elif bias is not None:
        y = y + bias
    return y if mask is None else y.masked_fill(~mask[..., None], 0.0)


def _groups(rows, groups):
    """Return positions `[B, T, D]` normed by mean and variance of their groups alone, these means, and 1 / deviation.

    The first is `[B, T, G, D / G]`, the others `[B, T, G]`.
    """
    rows = rows.unflatten(2, (groups, -1))
    normed, mean, rstd = torch.native_layer_norm(rows, rows.shape[3:], None, None, LEAST)
    return normed, mean.squeeze(-1), rstd.squeeze(-1)


def _slices(total, size):
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _blocks(x):
    """Return slices of the batch, and slices of time for each of them."""
    batch, length, channels = x.shape
    positions = max(1, BLOCK // max(channels, 1)) if x.device.type == "cpu" else max(1, batch * length)
    return _slices(batch, max(1, positions // length)), _slices(length, positions)


def _part(x, *place):
    return None if x is None else x[place]


@torch.library.custom_op(
    "luna_mega::timestep_norm", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _timestep_norm(x, weight, bias, mask, count, mean, variance, groups, eps):
    """Return the result, means and 1 / deviation of all positions so far `[B, T, G]`, and the last statistics."""
    y = x.new_empty(x.shape)
    means = mean.new_empty(*x.shape[:2], groups)
    rstds = means.new_empty(means.shape, dtype=_wide(x[:0], None, weight).dtype)
    last_mean, last_variance = mean.clone(), variance.clone()
    batches, times = _blocks(x)
    for rows in batches:
        number = count[rows]
        for time in times:
            kept = _part(mask, rows, time)
            normed, middle, sharp = _groups(_wide(x[rows, time], kept, weight), groups)
            middle, sharp = middle.double(), sharp.double()
            spread = sharp.pow(-2).sub_(LEAST).clamp_(min=0.0)
            so_far = over_time(number, last_mean[rows], last_variance[rows], middle, spread, kept)
            rstd = torch.rsqrt(so_far.variance + eps)
            factor, shift = (v.to(rstds.dtype)[..., None] for v in (rstd / sharp, (middle - so_far.mean) * rstd))
            normed = torch.addcmul(shift, normed, factor).flatten(2)
            y[rows, time] = _affine(normed, weight, bias, kept)
            means[rows, time], rstds[rows, time] = so_far.mean, rstd
            last_mean[rows], last_variance[rows] = so_far.mean[:, -1], so_far.variance[:, -1]
            number = number + (middle.shape[1] if kept is None else kept.sum(1))
    return y, means, rstds, last_mean, last_variance


@_timestep_norm.register_fake
def _(x, weight, bias, mask, count, mean, variance, groups, eps):
    means = mean.new_empty(*x.shape[:2], groups)
    rstds = means.new_empty(means.shape, dtype=_wide(x[:0], None, weight).dtype)
    return x.new_empty(x.shape), means, rstds, mean.new_empty(mean.shape), variance.new_empty(variance.shape)


@torch.library.custom_op(
    "luna_mega::timestep_norm_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor? grad_mean, Tensor? grad_variance, Tensor means, Tensor rstds, {INPUTS}) "
    "-> Tensor[]",
)
def _timestep_norm_backward(
    gradient, grad_mean, grad_variance, means, rstds, x, weight, bias, mask, count, mean, variance, groups, eps
):  # fmt: skip
    """Return the gradients of x, weight, bias, and the first mean and variance; empty where the input is None."""
    grad_x, (grad_first, grad_spread) = x.new_empty(x.shape), (torch.zeros_like(mean) for _ in range(2))
    grad_weight, grad_bias = (rstds.new_zeros(0 if t is None else t.shape) for t in (weight, bias))
    number = counts(count, mask, x.shape[1])
    before = torch.cat((mean[:, None], means[:, :-1]), 1)
    batches, times = _blocks(x)
    for rows in batches:
        # The gradients, from later positions, of n M and n S, and of the mean before the next position.
        last = number[rows, -1]
        from_mean, from_variance = (
            torch.zeros_like(last * mean[rows]) if grad is None else grad[rows] / last
            for grad in (grad_mean, grad_variance)
        )
        from_next = torch.zeros_like(from_mean)
        for time in reversed(times):
            kept, width = _part(mask, rows, time), x.shape[2] // groups
            normed, middle, sharp = _groups(_wide(x[rows, time], kept, weight), groups)
            middle, sharp, rstd, now = middle.double(), sharp.double(), rstds[rows, time].double(), means[rows, time]
            received = gradient[rows, time].to(normed.dtype)
            if kept is not None:
                received = received.masked_fill(~kept[..., None], 0.0)
            through = (received if weight is None else received * weight).view_as(normed)
            sums, products = _row_sums(through).double(), _row_sums(through * normed).double()
            spread = -0.5 * rstd.pow(3) * (products / sharp + (middle - now) * sums) / number[rows, time]
            of_variance = _sums_from_end(spread, from_variance)
            share = 1.0 / number[rows, time]
            away = distances(middle, before[rows, time][:, :1], now, kept)
            of_away = of_variance * 2.0 * (1.0 - share) * away
            of_mean = -rstd * sums - torch.cat((of_away[:, 1:], from_next[:, None]), 1)
            of_mean = _sums_from_end(of_mean * share, from_mean)
            from_mean, from_variance, from_next = of_mean[:, 0], of_variance[:, 0], of_away[:, 0]
            own, stretch = of_mean + of_away, 2.0 * of_variance / sharp
            if kept is not None:
                own, stretch = (v.masked_fill(~kept[..., None], 0.0) for v in (own, stretch))
            own, stretch, scale = (v.to(normed.dtype)[..., None] for v in (own / width, stretch / width, rstd))
            grad_x[rows, time] = torch.addcmul(own, normed, stretch).addcmul_(through, scale).flatten(2)
            if weight is not None:
                factor, shift = (v.to(normed.dtype)[..., None] for v in (rstd / sharp, (middle - now) * rstd))
                normed = torch.addcmul(shift, normed, factor).mul_(received.view_as(normed))
                grad_weight += normed.flatten(0, 1).sum(0).flatten()
            if bias is not None:
                grad_bias += received.flatten(0, 1).sum(0)
        started = count[rows, None]
        grad_first[rows], grad_spread[rows] = started * from_mean - from_next, started * from_variance
    grads = [grad.to(t.dtype) if t is not None else grad for grad, t in ((grad_weight, weight), (grad_bias, bias))]
    return [grad_x, *grads, grad_first, grad_spread]


def _row_sums(rows):
    """Return the sums of the last dimension, as a product: faster than a sum of short rows."""
    return rows @ rows.new_ones(rows.shape[-1])


def _sums_from_end(x, last):
    """Return the sums from every position to the end, of x `[B, T, G]` and, behind the end, `last` `[B, G]`."""
    return x.flip(1).cumsum(1).flip(1) + last[:, None]


@_timestep_norm_backward.register_fake
def _(gradient, grad_mean, grad_variance, means, rstds, x, weight, bias, mask, count, mean, variance, groups, eps):
    inputs = (x, weight, bias, mean, variance)
    return [means.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs]


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.groups, ctx.eps = inputs
    ctx.save_for_backward(*output[1:3], *tensors)
    ctx.mark_non_differentiable(*output[1:3])
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient, _means, _rstds, grad_mean, grad_variance):
    means, rstds, x, weight, bias, *rest = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(x)
    grads = torch.ops.luna_mega.timestep_norm_backward(
        gradient, grad_mean, grad_variance, means, rstds, x, weight, bias, *rest, ctx.groups, ctx.eps
    )
    grad_x, grad_weight, grad_bias, grad_first, grad_spread = grads
    grad_weight, grad_bias = (None if t is None else g for t, g in ((weight, grad_weight), (bias, grad_bias)))
    return grad_x, grad_weight, grad_bias, None, None, grad_first, grad_spread, None, None


_timestep_norm.register_autograd(_backward, setup_context=_save_for_backward)
