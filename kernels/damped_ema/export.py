"""The damped EMA of an exported program: chunks and groups of chunks by real matrices, without FFT and without a loop.

One program serves every length. For B sequences of T positions and D channels it holds B T D numbers a few times, and
D N (T / 2048)^2 for the decays between groups.
"""

import torch
from torch import nn

from luna_mega.kernels._export import chunk_positions
from luna_mega.kernels.damped_ema.reference import finish
from luna_mega.kernels.damped_ema.torch_backend import CHUNK, _chunk_maps, _taps, _toeplitz

# Chunks in a group.
GROUP = 32


def damped_ema(
    x, coefficients, skip=None, mask=None, shift=False, truncation=None, initial_state=None, return_state=False
):  # fmt: skip
    """Return `reference.damped_ema`; the final state only on request."""
    log_q, weight_in, _ = coefficients
    channels = x.shape[2]
    signal = (x if mask is None else x.masked_fill(~mask[..., None], 0.0)).to(log_q.dtype)
    if truncation is not None:
        return finish(_truncated(signal, *_taps(coefficients, channels, truncation, shift)), x, skip), None
    taps, center, inward, outward, _ = _chunk_maps(coefficients, channels, CHUNK, shift)
    average, before, last, rest, since = in_chunks(
        signal, taps, center, inward, outward, lambda gains: _states(gains, log_q * CHUNK, initial_state)
    )
    state = None
    if return_state:
        gained = weight_in[..., None] * torch.exp(log_q[..., None] * since) @ last
        state = (torch.exp(log_q * rest)[..., None] * before + gained).permute(2, 0, 1)
    return finish(average, x, skip), state


def in_chunks(signal, taps, center, inward, outward, states_before):
    """Return the average of a signal `[B, T, D]`, the states before the last chunk `[D, N', B]`, and that chunk.

    The chunk is `[D, C, B]`; behind it stand its length, and for every position the number of positions behind it.
    `states_before` makes the states before all chunks from what each chunk adds to them, `[D, N', B, M]`.
    """
    batch, length = signal.shape[:2]
    position, real = chunk_positions(length, CHUNK, signal.device)
    chunks = signal[:, position].masked_fill(~real[..., None], 0.0).permute(3, 0, 1, 2)
    rows = chunks.flatten(1, 2)
    states = states_before((inward @ rows.mT).unflatten(2, (batch, -1)))
    rows = rows @ _toeplitz(taps, center, CHUNK) + states.flatten(2).mT @ outward
    average = rows.unflatten(1, (batch, -1)).flatten(2).permute(1, 2, 0)
    # The last chunk is empty, and the one before it may be short; zeros take the places behind it.
    rest = real[-2].sum()
    since = (rest - 1 - torch.arange(CHUNK, device=signal.device)).clamp(min=0)
    average = average[:, torch.arange(length, device=signal.device)]
    return average, states[..., -2], chunks[:, :, -2].mT, rest, since


def _truncated(signal, taps, center):
    """Apply the taps `[D, K]`, all there are, to a signal `[B, T, D]`."""
    padded = nn.functional.pad(signal.mT, (taps.shape[1] - center - 1, center))
    return nn.functional.conv1d(padded, taps.flip(1)[:, None], groups=len(taps)).mT


def _states(gains, rate, initial):
    """Return the states before each chunk, `[D, N', B, M]` of the gains of the chunks; `rate`: log q of a chunk."""
    first = torch.zeros_like(gains[..., :1])
    if len(rate) == len(gains):
        if initial is not None:
            first = initial.permute(1, 2, 0)[..., None]
        return _scan(torch.cat([first, gains[..., :-1]], dim=-1), rate)
    forward, backward = gains.chunk(2, dim=1)
    gains = torch.cat([forward, backward.flip(-1)], dim=1)
    states = _scan(torch.cat([first, gains[..., :-1]], dim=-1), torch.cat(rate.chunk(2), dim=1))
    forward, backward = states.chunk(2, dim=1)
    return torch.cat([forward, backward.flip(-1)], dim=1)


def _scan(x, rate):
    """Return s_i = q s_{i-1} + x_i along the last dimension of `[D, N, B, M]`, log q = `rate` `[D, N]`."""
    # What fills up the last group comes behind all that counts.
    position, _ = chunk_positions(x.shape[-1], GROUP, x.device)
    within = x[..., position] @ _powers(rate, torch.arange(GROUP, device=x.device), 0).mT[:, :, None]
    groups = torch.arange(position.shape[0], device=x.device)
    before = within[..., -1] @ _powers(rate * GROUP, groups, 1).mT
    since = torch.arange(1, GROUP + 1, device=x.device)
    states = within + before[..., None] * torch.exp(rate[..., None] * since)[:, :, None, None]
    return states.flatten(3)[..., torch.arange(x.shape[-1], device=x.device)]


def _powers(rate, index, least):
    """Return q^(i - j - least), `[D, N, index, index]`, and 0 where the exponent is below 0."""
    lag = index[:, None] - index - least
    return torch.exp(rate[..., None, None] * lag.clamp(min=0)).masked_fill(lag < 0, 0.0)
