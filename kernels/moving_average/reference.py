"""Both moving averages as defined in their papers: Mega (section 3.1) and Megalodon (section 3.1, as in its code).

`diagonal_ssm` is the recurrence of both without their parameters.

This file is the specification: all faster implementations are tested against it. Shapes: input `[B, T, D]`; real
parameters
`[R, N]` with R = D (causal) or R = 2 D (bidirectional, rows D on average from the end), states `[B, D, N]`; complex
projections and states are real pairs, `[D, N, 2]` and `[B, D, N, 2]`. Masks are boolean, True = keep.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._export import log1p
from ..upcast import as_complex

LEAST = 1e-30  # lower bound of q, where the gradient of log q is 0


def log_decay(input_logit: Tensor, damping_logit: Tensor) -> Tensor:
    """Return log q = log(1 - sigmoid(input_logit) sigmoid(damping_logit)), at least log(1e-30), with finite gradients.

    For the product p, log(1 - p) loses slow decays, for which p is below the rounding error of 1; log1p(-p) loses fast
    decays, for which p rounds to 1.
    """
    product = torch.sigmoid(input_logit) * torch.sigmoid(damping_logit)
    log_product = nn.functional.logsigmoid(input_logit) + nn.functional.logsigmoid(damping_logit)
    is_fast = product > 0.5
    # Both forms are evaluated everywhere, so each gets an argument at which its gradient is finite. The gradient of
    # `clamp` at a limit is 0 since torch 2.14, so `clamp` cannot select a product of exactly 0.5.
    slow = log1p(-torch.where(is_fast, 0.5, product))
    fast = torch.log(-torch.expm1(torch.where(is_fast, log_product, -math.log(2)).clamp(max=-LEAST)))
    return torch.where(is_fast, fast, slow)


def damped_coefficients(
    input_logit: Tensor, damping_logit: Tensor, expansion: Tensor, projection: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log q, the weight p beta of the input in the state, and the weight eta / sqrt(N) of the state."""
    weight_in = torch.sigmoid(input_logit) * expansion
    return log_decay(input_logit, damping_logit), weight_in, projection / math.sqrt(projection.shape[-1])


def complex_coefficients(
    input_logit: Tensor, damping_logit: Tensor, phase_logit: Tensor, projection: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, q and gamma / sqrt(N), `[D, N]` each, the last two complex."""
    states = input_logit.shape[1]
    p = torch.sigmoid(input_logit)
    number = torch.arange(1, states + 1, device=p.device)
    phase = torch.sigmoid(phase_logit)[:, None] * (2 * math.pi / states) * number
    q = torch.polar(1.0 - p * torch.sigmoid(damping_logit), phase)
    return p, q, as_complex(projection) / math.sqrt(states)


def finish(average: Tensor, x: Tensor, skip: Tensor | None) -> Tensor:
    """Return silu(average + skip x) in the dtype of x, or the average if there is no skip."""
    if skip is not None:
        average = nn.functional.silu(average + skip * x)
    return average.to(x.dtype)


def damped_step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, Tensor, Tensor], skip: Tensor | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y_t = <eta / sqrt(N), h_t> and h_t = q h_{t-1} + p beta x_t of one position, x `[B, D]`, mask `[B]`.

    At a dropped position h_t = h_{t-1}. The first coefficient is q - 1.
    """
    change, weight_in, weight_out = coefficients
    kept = x if mask is None else x.masked_fill(~mask[:, None], 0.0)
    state = hold((change + 1.0) * state + weight_in * kept[..., None].to(change.dtype), state, mask)
    return finish((weight_out * state).sum(-1), kept, skip), state


def complex_step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, Tensor, Tensor], skip: Tensor | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y_t = Re <gamma / sqrt(N), h_t> + omega x_t and h_t = q h_{t-1} + p x_t of one position, x `[B, D]`.

    At a position that the mask `[B]` drops, x_t = 0 and h_t = h_{t-1}.
    """
    p, q, weight_out = coefficients
    kept = (x if mask is None else x.masked_fill(~mask[:, None], 0.0)).to(p.dtype)
    before = as_complex(state)
    hidden = hold(q * before + p * kept[..., None], before, mask)
    average = (weight_out * hidden).real.sum(-1)
    if skip is not None:
        average = average + skip * kept
    return average.to(x.dtype), torch.view_as_real(hidden)


def hold(after: Tensor, before: Tensor, mask: Tensor | None) -> Tensor:
    """Return the states `[B, ...]` after a position that `mask` `[B]` keeps, else those before it; None = all kept."""
    return after if mask is None else torch.where(mask.view(-1, *(1,) * (after.dim() - 1)), after, before)


def damped_ema(
    x: Tensor, coefficients: tuple[Tensor, Tensor, Tensor], skip: Tensor | None = None, mask: Tensor | None = None,
    shift: bool = False, truncation: int | None = None, initial_state: Tensor | None = None, return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y_t = sum_j k_j x_{t-j}, k_j = sum_n eta_n / sqrt(N) q_n^j p_n beta_n, and on request the final state."""
    log_q, weight_in, weight_out = coefficients
    length, channels = x.shape[1:]
    kept = (x if mask is None else x.masked_fill(~mask[..., None], 0.0)).to(log_q.dtype)
    positions = torch.arange(length, device=x.device, dtype=log_q.dtype)
    powers = torch.exp(log_q[..., None] * positions)
    kernel = torch.einsum("rn,rnt->rt", weight_in * weight_out, powers)
    average, state = _convolve(kept, kernel[:channels], truncation), None
    if len(kernel) > channels:
        backward = _convolve(kept.flip(1), kernel[channels:], truncation).flip(1)
        # The shifted average starts at the next token.
        average = average + (nn.functional.pad(backward[:, 1:], (0, 0, 0, 1)) if shift else backward)
    if return_state:
        state = torch.einsum("dnt,btd->bdn", powers.flip(-1), kept) * weight_in
    if initial_state is not None:
        decayed = powers * (initial_state * log_q.exp())[..., None]
        average = average + torch.einsum("dn,bdnt->btd", weight_out, decayed)
        state = None if state is None else state + decayed[..., -1]
    return finish(average, x, skip), state


def complex_ema(
    x: Tensor, coefficients: tuple[Tensor, Tensor, Tensor], skip: Tensor | None = None, mask: Tensor | None = None,
    initial_state: Tensor | None = None, return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the results of steps at all positions, and on request the final state.

    States decay at dropped positions, too.
    """
    p, state = coefficients[0], initial_state
    if state is None:
        state = p.new_zeros(x.shape[0], *p.shape, 2)
    output, state = _steps(complex_step, x, state, coefficients, skip, mask)
    return output, state if return_state else None


def diagonal_coefficients(log_decay: Tensor, *phase_and_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return q = exp(log_decay + i phase) and the weight of the state, `[R, N]`; without a phase, both are real."""
    *phase, weight = phase_and_weight
    if not phase:
        return torch.exp(log_decay), weight
    return torch.polar(torch.exp(log_decay), phase[0]), as_complex(weight)


def diagonal_step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, Tensor], skip: Tensor | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y_t = Re <weight, h_t> + skip x_t and h_t = q h_{t-1} + x_t of one position, x `[B, D]`.

    At a position that the mask `[B]` drops, x_t = 0 and h_t = h_{t-1}.
    """
    q, weight = coefficients
    kept = (x if mask is None else x.masked_fill(~mask[:, None], 0.0)).to(q.real.dtype)
    before = as_complex(state) if q.is_complex() else state
    hidden = hold(q * before + kept[..., None], before, mask)
    output = (weight * hidden).real.sum(-1)
    if skip is not None:
        output = output + skip * kept
    return output.to(x.dtype), torch.view_as_real(hidden) if q.is_complex() else hidden


def diagonal_ssm(
    x: Tensor, coefficients: tuple[Tensor, Tensor], skip: Tensor | None = None, mask: Tensor | None = None,
    initial_state: Tensor | None = None, return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the results of steps at all positions, and on request the final state.

    States decay at dropped positions, too. With R = 2 D, the result is the sum of both directions.
    """
    (q, weight), channels, state = coefficients, x.shape[2], initial_state
    if len(q) > channels:
        wide = x.to(q.real.dtype)
        output, _ = diagonal_ssm(wide, (q[:channels], weight[:channels]), skip, mask)
        mask = None if mask is None else mask.flip(1)
        from_end, _ = diagonal_ssm(wide.flip(1), (q[channels:], weight[channels:]), None, mask)
        return (output + from_end.flip(1)).to(x.dtype), None
    if state is None:
        state = q.real.new_zeros(x.shape[0], *q.shape, *((2,) if q.is_complex() else ()))
    output, state = _steps(diagonal_step, x, state, coefficients, skip, mask)
    return output, state if return_state else None


def _steps(
    step: Callable[..., tuple[Tensor, Tensor]], x: Tensor, state: Tensor, coefficients: tuple[Tensor, ...],
    skip: Tensor | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the results of a step at all positions, 0 where the mask drops them, and the final state."""
    outputs = []
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0.0)
    for t in range(x.shape[1]):
        output, state = step(x[:, t], state, coefficients, skip, None)
        outputs.append(output)
    return torch.stack(outputs, 1), state


def _convolve(x: Tensor, kernel: Tensor, truncation: int | None) -> Tensor:
    """Convolve x `[B, T, D]` with the kernel `[D, T]`, one lag at a time."""
    length = x.shape[1] if truncation is None else min(truncation, x.shape[1])
    lags = [nn.functional.pad(kernel[:, j] * x[:, : x.shape[1] - j], (0, 0, j, 0)) for j in range(length)]
    return sum(lags[1:], lags[0])
