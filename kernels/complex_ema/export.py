"""The complex average of an exported program: that of `damped_ema`, with pairs of real numbers for its states."""

import torch

from luna_mega.kernels._export import chunk_positions
from luna_mega.kernels.complex_ema.coefficients import powers, times
from luna_mega.kernels.damped_ema.export import GROUP, in_chunks
from luna_mega.kernels.damped_ema.torch_backend import CHUNK


def complex_ema(x, coefficients, skip=None, mask=None, initial_state=None, return_state=False):
    """Return `reference.complex_ema`; the final state only on request."""
    log_decay, turn, weight_in, _ = coefficients
    signal = (x if mask is None else x.masked_fill(~mask[..., None], 0.0)).to(log_decay.dtype)
    taps, inward, outward = _chunk_maps(coefficients, skip)

    def states_before(gains):
        gains = gains.unflatten(1, (-1, 2))
        first = torch.zeros_like(gains[..., :1])
        if initial_state is not None:
            first = initial_state.permute(1, 2, 3, 0)[..., None]
        return _scan(torch.cat([first, gains[..., :-1]], dim=-1), log_decay * CHUNK, turn * CHUNK).flatten(1, 2)

    average, before, last, rest, since = in_chunks(signal, taps, 0, inward, outward, states_before)
    state = None
    if return_state:
        maps = weight_in[..., None, None] * powers(log_decay, turn, since.double())
        gained = (maps.flatten(1, 2) @ last).unflatten(1, (-1, 2)).permute(3, 0, 1, 2)
        decay = powers(log_decay, turn, rest.double()[None]).squeeze(-1)
        state = times(decay, before.unflatten(1, (-1, 2)).permute(3, 0, 1, 2)) + gained
    return average.to(x.dtype), state


def _chunk_maps(coefficients, skip):
    """Return the lags within a chunk `[D, C]`, and the matrices from a chunk to the states and back, `[D, 2 N, C]`."""
    log_decay, turn, weight_in, weight_out = coefficients
    of_q = powers(log_decay, turn, torch.arange(CHUNK + 1, dtype=torch.float64, device=turn.device))
    inward = weight_in[..., None, None] * of_q[..., :CHUNK].flip(-1)
    outward = times(weight_out[:, :, None], of_q.mT).mT * weight_out.new_tensor((1.0, -1.0))[:, None]
    taps = (weight_in[:, None] @ outward[:, :, 0, :CHUNK]).squeeze(1)
    if skip is not None:
        taps = torch.cat((taps[:, :1] + skip[:, None], taps[:, 1:]), 1)
    return taps, inward.flatten(1, 2), outward[..., 1:].flatten(1, 2)


def _scan(x, rate, turn):
    """Return s_i = q s_{i-1} + x_i along the last dimension of `[D, N, 2, B, M]`; `rate`, `turn`: of q, `[D, N]`."""
    # What fills up the last group comes behind all that counts.
    position, _ = chunk_positions(x.shape[-1], GROUP, x.device)
    within = _product(x[..., position], _lags(rate, turn, torch.arange(GROUP, device=x.device), 0))
    groups = torch.arange(position.shape[0], device=x.device)
    before = _product(within[..., -1], _lags(rate * GROUP, turn * GROUP, groups, 1))
    since = powers(rate, turn, torch.arange(1, GROUP + 1, device=x.device).double())
    # Pairs stand last in a product of numbers.
    factor, states = since.mT[:, :, None, None], before[..., None].movedim(2, -1)
    states = within + times(factor, states).movedim(-1, 2)
    return states.flatten(4)[..., torch.arange(x.shape[-1], device=x.device)]


def _product(x, matrix):
    """Return the product of complex numbers `[D, N, 2, B, ..., J]` and a matrix `[D, N, 2, I, J]`."""
    rows, (real, imaginary) = x.flatten(3, -2), matrix.mT.unbind(2)
    a, b = rows.unbind(2)
    product = torch.stack((a @ real - b @ imaginary, a @ imaginary + b @ real), 2)
    return product.unflatten(3, x.shape[3:-1])


def _lags(rate, turn, index, least):
    """Return q^(i - j - least), `[D, N, 2, index, index]`, and 0 where the exponent is below 0."""
    lag = index[:, None] - index - least
    table = powers(rate, turn, lag.clamp(min=0).double().flatten()).unflatten(-1, lag.shape)
    return table.masked_fill(lag < 0, 0.0)
