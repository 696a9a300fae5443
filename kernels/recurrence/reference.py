"""The recurrence of all averages, one position at a time (Mega and Megalodon, section 3.1).

This file is the specification: all faster implementations are tested against it. Shapes: input `[B, T, D]`;
coefficients `[R, N]` with R = D (causal) or R = 2 D (two directions, rows D on run from the end); states `[B, D, N]`.
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
    """Return y_t = Re sum_n w_n h_t, h_t = q h_{t-1} + p x_t, plus skip x_t, and on request the final state.

    At a dropped position x_t = 0. With a truncation K, h_t is the sum of the last K inputs only. With `silu`, the skip
    uses x without the mask, and the result is silu(y + skip x).
    """
    of, channels, mask = coefficients, x.shape[2], sequences.mask
    kept = (x if mask is None else x.masked_fill(~mask[..., None], 0.0)).to(of.log_decay.dtype)
    y, state = _direction(kept, of.rows(slice(channels)), truncation, initial_state)
    if len(of.log_decay) > channels:
        from_end, _ = _direction(kept.flip(1), of.rows(slice(channels, None)), truncation, None)
        from_end = from_end.flip(1)
        # The shifted average starts at the next position.
        y = y + (nn.functional.pad(from_end[:, 1:], (0, 0, 0, 1)) if shift else from_end)
    return finish(y, x if silu else kept, skip, silu).to(x.dtype), state if return_state else None


def _direction(x: Tensor, of: Coefficients, truncation: int | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    decay, weight = torch.exp(of.log_decay), of.weight_out
    if of.turn is not None:
        decay, weight = torch.polar(decay, (of.turn * (2 * math.pi)).to(decay.dtype)), as_complex(weight)
        state = state if state is None else as_complex(state)
    hidden = torch.zeros(len(x), *decay.shape, dtype=decay.dtype, device=x.device) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        hidden = decay * hidden + of.weight_in * x[:, t, :, None]
        if truncation is not None and t >= truncation:
            hidden = hidden - decay**truncation * of.weight_in * x[:, t - truncation, :, None]
        outputs.append((weight * hidden).real.sum(-1))
    return torch.stack(outputs, 1), torch.view_as_real(hidden) if hidden.is_complex() else hidden


def step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, Tensor, Tensor], skip: Tensor | None, mask: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result and the state of one position, x `[B, D]`, mask `[B]`. A dropped position keeps the state.

    The coefficients are q - 1, p and w, complex ones as real pairs; w is conjugate.
    """
    change, weight_in, weight_out = coefficients
    kept = (x if mask is None else x.masked_fill(~mask[:, None], 0.0)).to(change.dtype)
    if change.dim() == 2:
        after = hold((change + 1.0) * state + weight_in * kept[..., None], state, mask)
        return finish((weight_out * after).sum(-1), kept, skip, silu).to(x.dtype), after
    before, decay, weight = as_complex(state), as_complex(change) + 1.0, as_complex(conjugate(weight_out))
    hidden = hold(decay * before + weight_in[..., 0] * kept[..., None], before, mask)
    return finish((weight * hidden).real.sum(-1), kept, skip, silu).to(x.dtype), torch.view_as_real(hidden)


def finish(y: Tensor, x: Tensor, skip: Tensor | None, silu: bool = True) -> Tensor:
    """Return y + skip x, with `silu` silu(y + skip x), or y without a skip."""
    if skip is None:
        return y
    return nn.functional.silu(y + skip * x) if silu else y + skip * x


def hold(after: Tensor, before: Tensor, mask: Tensor | None) -> Tensor:
    """Return the states `[B, ...]` after a position that `mask` `[B]` keeps, else those before it; None = all kept."""
    return after if mask is None else torch.where(mask.view(-1, *(1,) * (after.dim() - 1)), after, before)
