"""The recurrence of all averages, one position at a time (Mega and Megalodon, section 3.1).

This file is the specification: all faster implementations are tested against it. Shapes: input `[B, T, D]`;
coefficients `[R, N]` with R = D (causal) or R = 2 D (two directions, rows from D on run backward); states `[B, D, N]`.
Complex states and weights of states are real pairs, `[..., 2]`. Masks are boolean, True = keep.
"""

import math

import torch
from torch import Tensor, nn

from ..sequences import ALL_TOKENS, Sequences
from ..upcast import as_complex
from .coefficients import Coefficients, conjugate


def average(
    x: Tensor, coefficients: Coefficients, skip: Tensor | None = None, sequences: Sequences = ALL_TOKENS,
    shift: bool = False, truncation: int | None = None, initial_state: Tensor | None = None, return_state: bool = False,
    *, silu: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y_t = Re sum_n w_n h_{t,n} + skip x_t with h_t = q h_{t-1} + p x_t, and on request the final state.

    At a dropped position x_t = 0. With a truncation K, only the last K inputs contribute to h_t. With `silu`, the skip
    uses x without the mask, and the result is silu(y).
    """
    channels, mask = x.shape[2], sequences.mask
    signal = (x if mask is None else x.masked_fill(~mask[..., None], 0.0)).to(coefficients.log_decay.dtype)
    y, state = _direction(signal, coefficients.channel_rows(slice(channels)), truncation, initial_state)
    if len(coefficients.log_decay) > channels:
        from_end, _ = _direction(signal.flip(1), coefficients.channel_rows(slice(channels, None)), truncation, None)
        from_end = from_end.flip(1)
        # The shifted average starts at the next position.
        y = y + (nn.functional.pad(from_end[:, 1:], (0, 0, 0, 1)) if shift else from_end)
    return add_skip(y, x if silu else signal, skip, silu).to(x.dtype), state if return_state else None


def _direction(
    x: Tensor, coefficients: Coefficients, truncation: int | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the result of one direction, without a skip, and the final state."""
    log_decay, turns, weight_in, weight_out = coefficients
    decay, change = torch.exp(log_decay), torch.expm1(log_decay)
    if turns is not None:
        decay, weight_out = torch.polar(decay, (turns * (2 * math.pi)).to(decay.dtype)), as_complex(weight_out)
    hidden = decay.new_zeros(len(x), *decay.shape) if state is None else _number(state, decay)
    outputs = []
    for t in range(x.shape[1]):
        # The rounding error of a q close to 1 would accumulate over the positions, so real states add (q - 1) h.
        decayed = decay * hidden if decay.is_complex() else hidden + change * hidden
        hidden = decayed + weight_in * x[:, t, :, None]
        if truncation is not None and t >= truncation:
            hidden = hidden - decay**truncation * weight_in * x[:, t - truncation, :, None]
        outputs.append((weight_out * hidden).real.sum(-1))
    return torch.stack(outputs, 1), _real(hidden)


def step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, Tensor, Tensor], skip: Tensor | None, mask: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result and the state of one position, x `[B, D]`, mask `[B]`. A dropped position keeps the state.

    The coefficients are those of `step_coefficients`.
    """
    change, weight_in, weight_out = coefficients
    if change.dim() == 3:
        change, weight_in, weight_out = as_complex(change), weight_in[..., 0], as_complex(conjugate(weight_out))
    signal = (x if mask is None else x.masked_fill(~mask[:, None], 0.0)).to(state.dtype)
    before = _number(state, change)
    hidden = keep_states(before + change * before + weight_in * signal[..., None], before, mask)
    return add_skip((weight_out * hidden).real.sum(-1), signal, skip, silu).to(x.dtype), _real(hidden)


def _number(state: Tensor, decay: Tensor) -> Tensor:
    return as_complex(state) if decay.is_complex() else state


def _real(hidden: Tensor) -> Tensor:
    return torch.view_as_real(hidden) if hidden.is_complex() else hidden


def add_skip(y: Tensor, x: Tensor, skip: Tensor | None, silu: bool = True) -> Tensor:
    """Return y + skip x, or silu(y + skip x) with `silu`. If `skip` is None, return y."""
    if skip is None:
        return y
    return nn.functional.silu(y + skip * x) if silu else y + skip * x


def keep_states(after: Tensor, before: Tensor, mask: Tensor | None) -> Tensor:
    """Return the states `[B, ...]`: `after` if `mask` `[B]` keeps the position, else `before`; None = keep all."""
    return after if mask is None else torch.where(mask.view(-1, *(1,) * (after.dim() - 1)), after, before)
