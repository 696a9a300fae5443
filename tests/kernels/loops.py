"""The definition of every operator, one position after the other, in the dtype of its inputs (the tests use float64).

Arguments are those of the operators, with the tensors of a state one by one. The implementations share nothing with it.
"""

import math

import torch
from torch import Tensor

ACTIVATIONS = {
    "softplus": lambda x: torch.log2(1 + 2**x),
    "elu": lambda x: torch.where(x > 0, x + 1, x.exp()),
}
FUNCTIONS = {"softmax": torch.exp, "relu2": lambda x: x.clamp(min=0.0).square()}
FUNCTIONS["laplace"] = lambda x: 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2))))


def recurrence(
    x: Tensor, q: Tensor, weight_in: Tensor, weight_out: Tensor, mask: Tensor | None, state: Tensor | None,
    shift: bool = False, truncation: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y `[B, T, D]` and the states after the last position: h_t = q h_{t-1} + a x_t, y_t = Re sum_n w_n h_t.

    Coefficients of more rows than channels have a second direction, from the last position on.
    """
    kept, channels = x if mask is None else x * mask[..., None], x.shape[2]
    ways = [[y[rows] for y in (q, weight_in, weight_out)] for rows in (slice(channels), slice(channels, None))]
    output, state = _one_way(kept, *ways[0], state, truncation, False)
    if len(q) > channels:
        output = output + _one_way(kept.flip(1), *ways[1], None, truncation, shift)[0].flip(1)
    return output, state


def _one_way(x, q, weight_in, weight_out, state, truncation, before):
    """Return y and the last states; `before` reads the states before each position instead of after it."""
    state = x.new_zeros((x.shape[0], *q.shape), dtype=q.dtype) if state is None else state
    states = [state]
    for t in range(x.shape[1]):
        state = q * state + weight_in * x[:, t, :, None]
        if truncation is not None and t >= truncation:
            state = state - q**truncation * weight_in * x[:, t - truncation, :, None]
        states.append(state)
    read = states[:-1] if before else states[1:]
    outputs = [(weight_out * state).real.sum(-1) for state in read]
    return torch.stack(outputs, 1) if outputs else x, state


def damped_ema(
    x, input_logit, damping_logit, expansion, projection, skip=None, mask=None, state=None, **options
) -> tuple[Tensor, Tensor]:
    p = torch.sigmoid(input_logit)
    of = 1 - p * torch.sigmoid(damping_logit), p * expansion, projection / math.sqrt(p.shape[1])
    y, state = recurrence(x, *of, mask, state, **options)
    return y if skip is None else torch.nn.functional.silu(y + skip * x), state


def complex_ema(
    x, input_logit, damping_logit, phase_logit, projection, skip=None, mask=None, state=None
) -> tuple[Tensor, Tensor]:
    p, states = torch.sigmoid(input_logit), input_logit.shape[1]
    angle = 2 * math.pi / states * torch.arange(1, states + 1, dtype=p.dtype) * torch.sigmoid(phase_logit)[:, None]
    q = (1 - p * torch.sigmoid(damping_logit)) * torch.exp(1j * angle)
    return _with_pairs(x, q, p, torch.complex(*projection.unbind(-1)) / math.sqrt(states), skip, mask, state)


def diagonal_ssm(x, log_decay, phase=None, weight=None, skip=None, mask=None, state=None) -> tuple[Tensor, Tensor]:
    if phase is None:
        y, state = recurrence(x, torch.exp(log_decay), torch.ones_like(log_decay), weight, mask, state)
        return _add_skip(y, x, skip, mask), state
    q = torch.exp(torch.complex(log_decay, phase))
    return _with_pairs(x, q, torch.ones_like(log_decay), torch.complex(*weight.unbind(-1)), skip, mask, state)


def _with_pairs(x, q, weight_in, weight_out, skip, mask, state):
    """Return the results of complex coefficients, with states as pairs of real numbers."""
    state = None if state is None else torch.complex(*state.unbind(-1))
    y, state = recurrence(x, q, weight_in, weight_out, mask, state)
    return _add_skip(y, x, skip, mask), torch.view_as_real(state)


def _add_skip(y, x, skip, mask):
    return y if skip is None else y + skip * (x if mask is None else x * mask[..., None])


def timestep_norm(
    x, groups, weight=None, bias=None, mask=None, count=None, mean=None, variance=None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize each position by all unmasked features of a group so far; return also the statistics."""
    batch, length, features = x.shape
    kept = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask
    rows, zeros = x.unflatten(2, (groups, -1)), x.new_zeros(batch, groups)
    before = torch.zeros(batch) if count is None else count
    first = before.to(x.dtype)[:, None]
    first_mean, first_variance = (zeros if y is None else torch.where(first > 0, y, 0.0) for y in (mean, variance))
    outputs, mean, variance = [], first_mean, first_variance
    for t in range(length):
        seen, used = rows[:, : t + 1], kept[:, : t + 1, None, None].to(x.dtype)
        number = (first + used.sum((1, 3))).clamp(min=1.0)
        mean = ((seen * used).mean(3).sum(1) + first * first_mean) / number
        spread = ((seen - mean[:, None, :, None]).square() * used).mean(3).sum(1)
        variance = (spread + first * (first_variance + (first_mean - mean).square())) / number
        y = (rows[:, t] - mean[..., None]) / torch.sqrt(variance[..., None] + 1e-5)
        y = y.flatten(1) * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)
        outputs.append(y * kept[:, t, None])
    return torch.stack(outputs, 1), before + kept.sum(1), mean, variance


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax attention `[B, T, H, V]`, 0 for rows without unmasked keys."""
    weights = torch.exp(torch.einsum("bthk,bmhk->bhtm", query, key) / math.sqrt(query.shape[3]))
    weights = weights if mask is None else weights * mask[:, None, None]
    return torch.einsum("bhtm,bmhv->bthv", _normalized(weights), value)


def _normalized(weights):
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def luna_causal_attention(
    query, pack_query, pack_key, key, value, activation="softplus", mask=None, pack_mask=None, count=None,
    key_mean=None, value_mean=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Attend to P, into which all unmasked tokens so far are packed; return also both means and the count."""
    batch, length, heads, size = query.shape
    rows, width = pack_query.shape[1], value.shape[3]
    kept = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask
    real = torch.ones(batch, rows, dtype=torch.bool) if pack_mask is None else pack_mask
    number = torch.zeros(batch) if count is None else count
    number = number.to(query.dtype)[:, None, None, None]
    means = (query.new_zeros(batch, heads, size, rows), query.new_zeros(batch, heads, rows, width))
    means = means if key_mean is None else (key_mean, value_mean)
    key_sum, value_sum, outputs = number * means[0], number * means[1], []
    for t in range(length):
        scores = torch.einsum("bhk,blhk->bhl", pack_key[:, t], pack_query) / math.sqrt(size)
        packed = ACTIVATIONS[activation](scores)
        packed = packed * real[:, None] * kept[:, t, None, None]
        key_sum = key_sum + torch.einsum("bhk,bhl->bhkl", key[:, t], packed)
        value_sum = value_sum + torch.einsum("bhl,bhv->bhlv", packed, value[:, t])
        number = number + kept[:, t, None, None, None]
        divisor = number.clamp(min=1.0)
        scores = torch.einsum("bhk,bhkl->bhl", query[:, t], key_sum / divisor) / math.sqrt(size)
        weights = _normalized(scores.exp() * real[:, None] * (number[..., 0] > 0))
        outputs.append(torch.einsum("bhl,bhlv->bhv", weights, value_sum / divisor))
    divisor = number.clamp(min=1.0)
    return torch.stack(outputs, 1), key_sum / divisor, value_sum / divisor, number.flatten()


def gated_attention(
    query, key, value, bias=None, mask=None, function="softmax", causal=False, chunk_size=None, offset=0,
    row_offset=None,
) -> tuple[Tensor]:  # fmt: skip
    """Attend to the unmasked keys of the same chunk, of which causal attention sees those up to the query."""
    batch, length, size = query.shape
    query_at, key_at = offset + torch.arange(length)[None, :, None], torch.arange(key.shape[1])[None, None]
    query_at = query_at if row_offset is None else query_at + row_offset[:, None, None]
    kept = torch.ones(batch, key.shape[1], dtype=torch.bool) if mask is None else mask
    chunk = chunk_size or max(length, key.shape[1]) + 1
    start = query_at // chunk * chunk if chunk_size else torch.zeros_like(query_at)
    seen = kept[:, None] & (key_at >= start) & ((key_at < start + chunk) if chunk_size else True)
    number = (query_at - start + 1) if causal else seen.sum(2, keepdim=True)
    seen = seen & (key_at <= query_at) if causal else seen
    scores = query @ key.mT / (math.sqrt(size) if function == "softmax" else number.clamp(min=1))
    if bias is not None:
        scores = scores + bias[(len(bias) // 2 + key_at - query_at).clamp(0, len(bias) - 1)]
    weights = FUNCTIONS[function](scores) * seen
    return ((_normalized(weights) if function == "softmax" else weights) @ value,)
