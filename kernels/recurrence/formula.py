"""The averages in an exported program: real matrices for chunks and for groups of chunks, without FFT and loops.

One program supports every length. For B sequences of T positions and D channels, it stores B T D numbers a few times,
and D N (T / 2048)^2 numbers for the decays between groups. A state consists of P real numbers: 2 if it is complex, else
1. M is the number of chunks, and N' = 2 N with two directions, else N.
"""

import torch
from torch import Tensor, nn

from .._export import chunk_positions
from ..sequences import ALL_TOKENS, Sequences
from . import lag_tables
from .coefficients import Coefficients, powers, times
from .lag_tables import CHUNK, toeplitz
from .reference import add_skip

# Chunks in a group.
GROUP = 32


def average(
    x: Tensor, coefficients: Coefficients, skip: Tensor | None = None, sequences: Sequences = ALL_TOKENS,
    shift: bool = False, truncation: int | None = None, initial_state: Tensor | None = None, return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `reference.average`, with `silu` for real states; complex states support only one direction."""
    channels, mask = x.shape[2], sequences.mask
    signal = (x if mask is None else x.masked_fill(~mask[..., None], 0.0)).to(coefficients.log_decay.dtype)
    if truncation is not None:
        taps, _ = lag_tables.lags(coefficients, channels, truncation, shift)
        center = lag_tables.center(coefficients, channels, truncation, shift)
        padded = nn.functional.pad(signal.mT, (taps.shape[1] - center - 1, center))
        y = nn.functional.conv1d(padded, taps.flip(1)[:, None], groups=channels).mT
        return add_skip(y, x, skip).to(x.dtype), None
    taps, input_map, output_map = _chunk_maps(coefficients, channels, shift)
    center = lag_tables.center(coefficients, channels, CHUNK, shift)
    if coefficients.turns is not None and skip is not None:
        taps, skip = torch.cat((taps[:, :1] + skip[:, None], taps[:, 1:]), 1), None
    maps = taps, center, input_map, output_map
    result, before, last, rest, since = _in_chunks(signal, *maps, coefficients, initial_state)
    state = None
    if return_state:
        last_map = coefficients.weight_in[..., None, None] * powers(coefficients.log_decay, coefficients.turns, since)
        last_chunk = (last_map.flatten(1, 2) @ last).unflatten(1, (-1, coefficients.components)).permute(3, 0, 1, 2)
        decay = powers(coefficients.log_decay, coefficients.turns, rest[None]).squeeze(-1)
        state = times(decay, before.permute(3, 0, 1, 2)) + last_chunk
        state = state if coefficients.components > 1 else state.squeeze(-1)
    return add_skip(result, x, skip).to(x.dtype), state


def operator(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, log_decay: Tensor, turns: Tensor | None, weight_in: Tensor,
    weight_out: Tensor, initial: Tensor | None, chunk: int, length: int, shift: bool,
) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
    """Return the result and the state before the last chunk as `torch_backend.operator` does."""
    coefficients, last = Coefficients(log_decay, turns, weight_in, weight_out), None
    truncation = length if length < x.shape[1] else None
    output, _ = average(x, coefficients, skip, Sequences(mask), shift, truncation, initial)
    if chunk and len(log_decay) == x.shape[2]:
        before = (x.shape[1] - 1) // chunk * chunk
        if before:
            earlier = Sequences(None if mask is None else mask[:, :before])
            last = average(x[:, :before], coefficients, None, earlier, initial_state=initial, return_state=True)[1]
        last = initial if last is None else last.flatten(2)
    return output, None, last


def _chunk_maps(coefficients: Coefficients, channels: int, shift: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `lag_tables.chunk_maps`, computed with real operators."""
    if coefficients.turns is None:
        return lag_tables.chunk_maps(coefficients, channels, CHUNK, shift)[:3]
    log_decay, turns, weight_in, weight_out = coefficients
    q_powers = powers(log_decay, turns, torch.arange(CHUNK + 1, device=log_decay.device))
    input_map = weight_in[..., None, None] * q_powers[..., :CHUNK].flip(-1)
    output_map = times(weight_out[:, :, None], q_powers.mT).mT * weight_out.new_tensor((1.0, -1.0))[:, None]
    taps = (weight_in[:, None] @ output_map[:, :, 0, :CHUNK]).squeeze(1)
    return taps, input_map.flatten(1, 2), output_map[..., 1:].flatten(1, 2)


def _in_chunks(
    signal: Tensor, taps: Tensor, center: int, input_map: Tensor, output_map: Tensor, coefficients: Coefficients,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the average of a signal `[B, T, D]` in chunks.

    Returns:
        The average, the states before the last chunk `[D, N, P, B]`, the last chunk `[D, C, B]`, the number of
        positions in the last chunk, and the number of positions after each position of the last chunk, `[C]`.
    """
    batch, length = signal.shape[:2]
    position, real = chunk_positions(length, CHUNK, signal.device)
    chunks = signal[:, position].masked_fill(~real[..., None], 0.0).permute(3, 0, 1, 2)
    inputs = chunks.flatten(1, 2)
    chunk_states = (input_map @ inputs.mT).unflatten(2, (batch, -1)).unflatten(1, (-1, coefficients.components))
    states = _states(chunk_states, coefficients, initial)
    outputs = inputs @ toeplitz(taps, center, CHUNK) + states.flatten(3).flatten(1, 2).mT @ output_map
    result = outputs.unflatten(1, (batch, -1)).flatten(2).permute(1, 2, 0)
    # `chunk_positions` adds an empty chunk. The last chunk of the signal precedes it, and may contain padding.
    rest = real[-2].sum()
    since = (rest - 1 - torch.arange(CHUNK, device=signal.device)).clamp(min=0)
    result = result[:, torch.arange(length, device=signal.device)]
    return result, states[..., -2], chunks[:, :, -2].mT, rest, since


def _states(chunk_states: Tensor, coefficients: Coefficients, initial: Tensor | None) -> Tensor:
    """Return the states before each chunk, `[D, N', P, B, M]`, given the states that each chunk adds at its end."""
    first = torch.zeros_like(chunk_states[..., :1])
    rate, turns = coefficients.log_decay * CHUNK, None if coefficients.turns is None else coefficients.turns * CHUNK
    if len(rate) == len(chunk_states):
        if initial is not None:
            first = initial.unflatten(2, (chunk_states.shape[1], -1)) if initial.dim() == 3 else initial
            first = first.permute(1, 2, 3, 0)[..., None]
        return _scan(torch.cat([first, chunk_states[..., :-1]], dim=-1), rate, turns)
    forward, backward = chunk_states.chunk(2, dim=1)
    chunk_states = torch.cat([forward, backward.flip(-1)], dim=1)
    states = _scan(torch.cat([first, chunk_states[..., :-1]], dim=-1), torch.cat(rate.chunk(2), dim=1), turns)
    forward, backward = states.chunk(2, dim=1)
    return torch.cat([forward, backward.flip(-1)], dim=1)


def _scan(x: Tensor, rate: Tensor, turns: Tensor | None) -> Tensor:
    """Return s_i = q s_{i-1} + x_i along the last dimension of `[D, N, P, B, M]`.

    `rate` is log |q|, and `turns` the angle of q in revolutions, `[D, N]`.
    """
    # Padding of the last group is at the end, so it does not affect the values.
    position, _ = chunk_positions(x.shape[-1], GROUP, x.device)
    within = _product(x[..., position], _lags(rate, turns, torch.arange(GROUP, device=x.device), 0))
    groups, turns = torch.arange(position.shape[0], device=x.device), None if turns is None else turns * GROUP
    before = _product(within[..., -1], _lags(rate * GROUP, turns, groups, 1))
    since = powers(rate, turns, torch.arange(1, GROUP + 1, device=x.device))
    # `times` requires the P real numbers of a state in the last dimension.
    factor, states = since.mT[:, :, None, None], before[..., None].movedim(2, -1)
    states = within + times(factor, states).movedim(-1, 2)
    return states.flatten(4)[..., torch.arange(x.shape[-1], device=x.device)]


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return the product of numbers `[D, N, P, B, ..., J]` and a matrix `[D, N, P, I, J]`."""
    numbers, components = x.flatten(3, -2), matrix.mT.unbind(2)
    if len(components) == 1:
        product = numbers @ components[0][:, :, None]
    else:
        (real, imaginary), (a, b) = components, numbers.unbind(2)
        product = torch.stack((a @ real - b @ imaginary, a @ imaginary + b @ real), 2)
    return product.unflatten(3, x.shape[3:-1])


def _lags(rate: Tensor, turns: Tensor | None, index: Tensor, least: int) -> Tensor:
    """Return q^(i - j - least), `[D, N, P, index, index]`; entries with a negative exponent are 0."""
    lag = index[:, None] - index - least
    table = powers(rate, turns, lag.clamp(min=0).flatten()).unflatten(-1, lag.shape)
    return table.masked_fill(lag < 0, 0.0)
