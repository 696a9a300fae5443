"""The complex exponential moving average as Megalodon's code computes it (Megalodon, section 3.2).

This file is the specification: every faster path is tested against it. Shapes: input `[B, T, D]`, logits `[D, N]` and
`[D]`, projection and states real pairs, `[D, N, 2]` and `[B, D, N, 2]`. Masks are boolean, True = keep.
"""

import math

import torch

from luna_mega.kernels.damped_ema.reference import hold


def coefficients(
    input_logit: torch.Tensor, damping_logit: torch.Tensor, phase_logit: torch.Tensor, projection: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return p, q and gamma / sqrt(N), `[D, N]` each, the last two complex."""
    states = input_logit.shape[1]
    p = torch.sigmoid(input_logit)
    number = torch.arange(1, states + 1, device=p.device)
    phase = torch.sigmoid(phase_logit)[:, None] * (2 * math.pi / states) * number
    q = torch.polar(1.0 - p * torch.sigmoid(damping_logit), phase)
    return p, q, torch.view_as_complex(projection.contiguous()) / math.sqrt(states)


def step(
    x: torch.Tensor,
    state: torch.Tensor,
    coefficients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    skip: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y_t = Re <gamma / sqrt(N), h_t> + omega x_t and h_t = q h_{t-1} + p x_t of one position, x `[B, D]`.

    At a position that the mask `[B]` drops, x_t = 0 and h_t = h_{t-1}.
    """
    p, q, weight_out = coefficients
    kept = (x if mask is None else x.masked_fill(~mask[:, None], 0.0)).to(p.dtype)
    before = torch.view_as_complex(state.contiguous())
    hidden = hold(q * before + p * kept[..., None], before, mask)
    average = (weight_out * hidden).real.sum(-1)
    if skip is not None:
        average = average + skip * kept
    return average.to(x.dtype), torch.view_as_real(hidden)


def complex_ema(
    x: torch.Tensor,
    coefficients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    skip: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the results of steps at all positions, and the final state if asked; states decay at dropped positions."""
    p, state, outputs = coefficients[0], initial_state, []
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0.0)
    if state is None:
        state = p.new_zeros(x.shape[0], *p.shape, 2)
    for t in range(x.shape[1]):
        output, state = step(x[:, t], state, coefficients, skip, None)
        outputs.append(output)
    return torch.stack(outputs, 1), state if return_state else None
