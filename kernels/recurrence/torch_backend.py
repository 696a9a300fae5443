"""Real and complex averages in PyTorch, by FFT or in chunks with a recurrent state; memory is linear in the length.

The lag weights are real. A complex state is stored as alternating real and imaginary parts.
"""

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .._custom_operator import register
from .._mode import COMPILED, FORMULAS, TRANSFORMED, mode
from ..sequences import ALL_TOKENS, Sequences
from ..upcast import as_complex
from . import formula, lag_tables
from .coefficients import Coefficients, powers, powers_less_one, times
from .lag_tables import CHUNK, toeplitz
from .reference import keep_states

# (chunk length, positions in a batch): matrices of short chunks take less time, so they are faster for small batches.
SHORT_CHUNKS = ((16, 1024), (32, 4096))
# From this number of positions in the batch on, chunks are faster than the FFT (README).
MANY_POSITIONS = 512
# Elements of x per thread in a block of channels, so that about five such tensors fit one core's cache, and the least
# number of channels in a block.
BLOCK, LEAST_CHANNELS = 1 << 18, 32
INPUTS = (
    "Tensor x, Tensor? mask, Tensor? skip, Tensor log_decay, Tensor? turns, Tensor weight_in, Tensor weight_out, "
    "Tensor? initial, SymInt chunk, SymInt length, bool shift"
)


def average(
    x: Tensor, coefficients: Coefficients, skip: Tensor | None = None, sequences: Sequences = ALL_TOKENS,
    shift: bool = False, truncation: int | None = None, initial_state: Tensor | None = None, return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `reference.average`, with `silu` for real states; complex states support only one direction."""
    mask = sequences.mask
    if mode() in FORMULAS:
        return formula.average(x, coefficients, skip, sequences, shift, truncation, initial_state, return_state)
    length = x.shape[1]
    chunk = chunk_length(x, return_state or initial_state is not None)
    if truncation is not None and truncation < length:
        chunk, length = 0, truncation
    initial = None if initial_state is None else initial_state.flatten(2)
    output, _, last, _ = operator(x, mask, skip, *coefficients, initial, chunk, length, shift)
    return output, _final_state(x, mask, coefficients, last, chunk) if return_state else None


def chunk_length(x: Tensor, stateful: bool) -> int:
    """Return the positions in a chunk of x `[B, T, D]`; 0 = no chunks, an FFT of all positions is faster."""
    if mode() >= COMPILED:
        return CHUNK  # a program must not depend on the length
    positions, length = x.shape[0] * x.shape[1], x.shape[1]
    if positions < MANY_POSITIONS and not stateful:
        return 0
    return next((chunk for chunk, most in SHORT_CHUNKS if length <= chunk or positions <= most), CHUNK)


def step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, Tensor, Tensor], skip: Tensor | None, mask: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `reference.step`, but add (q - 1) h: rounding errors of q would accumulate over many steps."""
    change, weight_in, weight_out = coefficients
    signal = x if mask is None else x.masked_fill(~mask[:, None], 0.0)
    if signal.dtype != change.dtype:  # `to` takes time even if the dtype is the same
        signal = signal.to(change.dtype)
    if change.dim() == 2:
        after, entering, dims = torch.addcmul(state, state, change), signal[..., None], [2]
    elif mode() >= TRANSFORMED:  # compilers, ONNX and vmap do not support these complex numbers
        after, entering, dims = state + times(change, state), signal[..., None, None], [2, 3]
    else:
        number = as_complex(state)
        after = torch.view_as_real(torch.addcmul(number, number, as_complex(change)))
        entering, dims = signal[..., None, None], [2, 3]
    state = keep_states(torch.addcmul(after, weight_in, entering), state, mask)
    y = (weight_out * state).sum(dims)
    if skip is not None:
        y = nn.functional.silu(y + skip * signal) if silu else torch.addcmul(y, skip, signal)
    return y if y.dtype == x.dtype else y.to(x.dtype), state


def _final_state(x: Tensor, mask: Tensor | None, coefficients: Coefficients, last: Tensor, chunk: int) -> Tensor:
    """Return the state after the last position, from the state before the last chunk, which may be incomplete."""
    rest = (x.shape[1] - 1) % chunk + 1
    exponents = torch.arange(rest - 1, -1, -1, device=x.device)
    log_decay, turns, weight_in, _ = coefficients
    input_map = (weight_in[..., None, None] * powers(log_decay, turns, exponents)).flatten(1, 2)
    x = x[:, -rest:]
    if mask is not None:
        x = x.masked_fill(~mask[:, -rest:, None], 0.0)
    # Not a matrix product: `backward()` under autocast would compute its gradients in half precision.
    gained = (input_map * x.to(input_map.dtype).mT[:, :, None]).sum(-1)
    last, gained = (states.unflatten(2, (-1, coefficients.components)) for states in (last, gained))
    state = last + times(powers_less_one(log_decay, turns, rest), last) + gained
    return state if coefficients.components > 1 else state.squeeze(-1)


@functools.lru_cache
def _fft_length(at_least: int) -> int:
    """Return the next number without prime factors above 5; an FFT of another size takes up to six times as long."""
    while True:
        rest = at_least
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return at_least
        at_least += 1


def _spectrum(taps: Tensor, center: int, size: int) -> Tensor:
    """Return the spectrum of the lag weights `taps` on a circle of `size` positions, with negative lags at the end."""
    circle = torch.roll(nn.functional.pad(taps, (0, size - taps.shape[1])), -center, 1)
    return torch.fft.rfft(circle)[:, None]


def _convolve(signal: Tensor, taps: Tensor, center: int, size: int) -> Tensor:
    """Apply the weights `taps` `[D, K]` of all lags to a signal `[D, B, T]` by FFT."""
    spectrum = torch.fft.rfft(signal, n=size) * _spectrum(taps, center, size)
    return torch.fft.irfft(spectrum, n=size)[..., : signal.shape[-1]]


def _convolve_backward(gradient: Tensor, signal: Tensor, taps: Tensor, center: int) -> tuple[Tensor, Tensor]:
    length, size = signal.shape[-1], _circle(signal, taps, center)
    spectrum = torch.fft.rfft(gradient, n=size)
    grad_signal = torch.fft.irfft(spectrum * _spectrum(taps, center, size).conj_physical(), n=size)[..., :length]
    lags = torch.fft.irfft((spectrum * torch.fft.rfft(signal, n=size).conj_physical()).sum(1), n=size)
    return grad_signal, torch.roll(lags, center, 1)[:, : taps.shape[1]]


def _circle(signal: Tensor, taps: Tensor, center: int) -> int:
    return _fft_length(signal.shape[-1] + max(center, taps.shape[1] - center - 1))


def _lag_sums(products: Tensor, center: int) -> Tensor:
    """Return the sums over the diagonals (the transpose of `toeplitz`)."""
    chunk = products.shape[-1]
    # With 2 C - 1 columns instead of 2 C, each row starts one column further right.
    skewed = nn.functional.pad(products.flip(1), (0, chunk)).flatten(1)[:, : chunk * (2 * chunk - 1)]
    sums = skewed.view(-1, chunk, 2 * chunk - 1).sum(1)
    return nn.functional.pad(sums, (center - chunk + 1, 0))


def _scan_chunks(chunk_states: Tensor, decay: Tensor, first: float | Tensor, forward: slice, backward: slice) -> Tensor:
    """Compute the states before each chunk, s_i = q^C s_{i-1} + chunk_states_{i-1}, in place of `chunk_states`.

    `chunk_states` is `[D, B, chunks, N']`. `decay` is q^C - 1; if it is complex, pairs of states are complex numbers.
    `first` contains the initial states, `[D, B, N']`; `forward` and `backward` are the slices of the two time
    directions.
    """
    carried = chunk_states.new_empty(chunk_states.shape[2], *chunk_states.shape[:2], chunk_states.shape[3])
    carried[0] = first
    carried[1:, ..., forward] = chunk_states[:, :, :-1, forward].permute(2, 0, 1, 3)
    carried[1:, ..., backward] = chunk_states[:, :, 1:, backward].flip(2).permute(2, 0, 1, 3)
    states, decay = _numbers(carried, decay).unbind(0), decay[:, None]
    for before, after in pairwise(states):
        after.add_(before).addcmul_(before, decay)
    chunk_states[..., forward] = carried[..., forward].permute(1, 2, 0, 3)
    chunk_states[..., backward] = carried[..., backward].flip(0).permute(1, 2, 0, 3)
    return chunk_states


def _numbers(states: Tensor, decay: Tensor) -> Tensor:
    """Return states that `decay` can multiply: as complex numbers if `decay` is complex."""
    return torch.view_as_complex(states.unflatten(-1, (-1, 2))) if decay.is_complex() else states


def _pairs(numbers: Tensor) -> Tensor:
    """Return complex numbers as pairs of real numbers; real numbers are unchanged."""
    return torch.view_as_real(numbers).flatten(-2) if numbers.is_complex() else numbers


def _directions(input_map: Tensor, center: int) -> tuple[slice, slice]:
    count = input_map.shape[1] if center == 0 else input_map.shape[1] // 2
    return slice(0, count), slice(count, None)


def _states(
    chunks: Tensor, input_map: Tensor, decay: Tensor, initial: Tensor | None, directions: tuple[slice, slice]
) -> Tensor:
    chunk_states = (chunks.flatten(1, 2) @ input_map.mT).unflatten(1, chunks.shape[1:3])
    first = 0.0 if initial is None else initial.transpose(0, 1)
    return _scan_chunks(chunk_states, decay, first, *directions)


def _scan(
    chunks: Tensor, taps: Tensor, center: int, input_map: Tensor, output_map: Tensor, decay: Tensor,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the average of chunks `[D, B, chunks, C]` in the same shape, and the state before the last chunk."""
    states = _states(chunks, input_map, decay, initial, _directions(input_map, center))
    outputs = chunks.flatten(1, 2) @ toeplitz(taps, center, chunks.shape[-1])
    outputs.baddbmm_(states.flatten(1, 2), output_map)
    return outputs.view(chunks.shape), states[:, :, -1]


def _scan_backward(
    gradient: Tensor, grad_last: Tensor | None, chunks: Tensor, taps: Tensor, center: int, input_map: Tensor,
    output_map: Tensor, decay: Tensor, initial: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    forward, backward = _directions(input_map, center)
    states = _states(chunks, input_map, decay, initial, (forward, backward))
    inputs, grad_outputs = chunks.flatten(1, 2), gradient.flatten(1, 2)
    from_output = (grad_outputs @ output_map.mT).view(states.shape)
    if grad_last is not None:
        from_output[:, :, -1] += grad_last.transpose(0, 1)
    decay, from_first = decay.conj_physical(), from_output[:, :, 0].clone()
    grad_states = _scan_chunks(from_output, decay, 0.0, backward, forward)
    first = _numbers(grad_states[:, :, 0], decay)
    grad_initial = from_first + _pairs(torch.addcmul(first, first, decay[:, None]))
    states, grad_states = states.flatten(1, 2), grad_states.flatten(1, 2)
    grad_decay = _decay_gradient(grad_states, states) if decay.is_complex() else (grad_states * states).sum(1)
    grad_chunks = grad_outputs @ toeplitz(taps, center, chunks.shape[-1]).mT
    grad_chunks.baddbmm_(grad_states, input_map)
    grad_taps = _lag_sums(inputs.mT @ grad_outputs, center)
    grad_input_map, grad_output_map = grad_states.mT @ inputs, states.mT @ grad_outputs
    return grad_chunks.view(chunks.shape), grad_taps, grad_input_map, grad_output_map, grad_decay, grad_initial


def _decay_gradient(gradients: Tensor, states: Tensor) -> Tensor:
    """Return the sums `[D, 2 N]` of complex gradients `[D, R, 2 N]` times conjugate states, all as pairs.

    A matrix product of all states takes less time and memory than a product of complex tensors and a sum.
    """
    products = (gradients.mT @ states).unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).diagonal(0, 1, 3)
    real, imaginary = products[:, 0, 0] + products[:, 1, 1], products[:, 1, 0] - products[:, 0, 1]
    return torch.stack((real, imaginary), -1).flatten(1)


def _blocks(x: Tensor) -> list[slice]:
    """Return slices of the channels on the CPU, and one slice on other devices.

    On a GPU, launching many small kernels would take more time than the saved memory is worth.
    """
    batch, length, channels = x.shape
    size = channels
    if x.device.type == "cpu":
        size = max(LEAST_CHANNELS, BLOCK * torch.get_num_threads() // max(batch * length, 1))
    return [slice(start, min(start + size, channels)) for start in range(0, channels, size)]


def _channels_first(x: Tensor, mask: Tensor | None, chunk: int) -> Tensor:
    """Return x `[B, T, D]` as `[D, B, T']` with 0 at masked positions and at the end.

    T' is T or, with chunks, the next multiple of their length.
    """
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0.0)
    x = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % max(chunk, 1))).contiguous()
    # Transposing a contiguous matrix is four times as fast as copying a permuted slice.
    return x.flatten(0, 1).t().contiguous().view(x.shape[2], *x.shape[:2])


def _maps(
    coefficients: Coefficients, skip: Tensor | None, channels: int, chunk: int, length: int, shift: bool
) -> tuple[Tensor, list[Any], list[Tensor]]:
    """Return the lag weights, the chunk matrices (None without chunks), and tables for the backward pass.

    The skip weights of a complex average are added to lag 0.
    """
    maps: list[Any]
    if chunk:
        taps, *maps, kept = lag_tables.chunk_maps(coefficients, channels, chunk, shift)
    else:
        taps, kept = lag_tables.lags(coefficients, channels, length, shift)
        maps = [None, None, None]
    if coefficients.turns is not None and skip is not None:
        taps = taps.clone()
        taps[:, 0] += skip
    return taps, maps, kept


def _keep(coefficients: Coefficients, taps: Tensor, maps: list[Any], kept: list[Tensor]) -> list[Tensor]:
    """Return the results of `_maps` to store for the backward pass: all for real states, none for complex states."""
    return [taps, *(table for table in maps if table is not None), *kept] if coefficients.turns is None else []


def _average(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, log_decay: Tensor, turns: Tensor | None, weight_in: Tensor,
    weight_out: Tensor, initial: Tensor | None, chunk: int, length: int, shift: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Return the result, the argument of silu, the states before the last chunk, and tables for the backward pass.

    All except the result may be empty.
    """
    coefficients, channels = Coefficients(log_decay, turns, weight_in, weight_out), x.shape[2]
    taps, maps, kept = _maps(coefficients, skip, channels, chunk, length, shift)
    center = lag_tables.center(coefficients, channels, chunk or length, shift)
    average = torch.empty(x.shape, dtype=taps.dtype, device=x.device)
    last = taps.new_empty((x.shape[0], channels, maps[0].shape[1]) if chunk else 0)
    for block in _blocks(x):
        signal = _channels_first(x[..., block].to(taps.dtype), mask, chunk)
        if not chunk:
            signal = _convolve(signal, taps[block], center, _circle(signal, taps, center))
        else:
            chunks = signal.unflatten(-1, (-1, chunk))
            chunks, state = _scan(chunks, taps[block], center, *_block_maps(block, maps, initial))
            signal, last[:, block] = chunks.flatten(2), state.transpose(0, 1)
        average[..., block] = signal[..., : x.shape[1]].permute(1, 2, 0)
    if skip is None or turns is not None:
        result, average = average.to(x.dtype), taps.new_empty(0)
    else:
        average.addcmul_(skip, x)
        result = nn.functional.silu(average).to(x.dtype)
    return result, average, last, _keep(coefficients, taps, maps, kept)


def _average_fake(
    x: Tensor, skip: Tensor | None, log_decay: Tensor, turns: Tensor | None, weight_in: Tensor, weight_out: Tensor,
    chunk: int, length: int, shift: bool, **_: object,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    average = log_decay.new_empty(0 if skip is None or turns is not None else x.shape)
    states, kept = weight_out.numel() // x.shape[2], list[Tensor]()
    if turns is None:
        coefficients = Coefficients(log_decay, turns, weight_in, weight_out)
        kept = _keep(coefficients, *_maps(coefficients, None, x.shape[2], chunk, length, shift))
    last = log_decay.new_empty((x.shape[0], x.shape[2], states) if chunk else 0)
    return x.new_empty(x.shape), average, last, kept


def _average_backward(
    gradient: Tensor, grad_last: Tensor | None, average: Tensor, kept: list[Tensor], x: Tensor, mask: Tensor | None,
    skip: Tensor | None, log_decay: Tensor, turns: Tensor | None, weight_in: Tensor, weight_out: Tensor,
    initial: Tensor | None, chunk: int, length: int, shift: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x, skip, the coefficients and initial; None for arguments that are None."""
    coefficients, channels, dtype = Coefficients(log_decay, turns, weight_in, weight_out), x.shape[2], log_decay.dtype
    if kept:
        taps, *kept = kept
        maps: list[Any] = kept[:3] if chunk else [None] * 3
        kept = kept[3:] if chunk else kept
    else:
        taps, maps, kept = _maps(coefficients, skip, channels, chunk, length, shift)
    center = lag_tables.center(coefficients, channels, chunk or length, shift)
    gate = skip if turns is None else None
    like = (x, skip, initial, taps, *maps)
    empty: list[Any] = [None if tensor is None else tensor.new_empty(tensor.shape) for tensor in like]
    grad_x, grad_skip, grad_initial, grad_taps, *grad_maps = empty
    for block in _blocks(x):
        inputs, grad_average = x[..., block].to(dtype), gradient[..., block].to(dtype)
        if gate is not None:
            grad_average = torch.ops.aten.silu_backward(grad_average, average[..., block])
            grad_skip[block] = (grad_average * inputs).sum((0, 1))
        signal = _channels_first(inputs, mask, chunk)
        grad_signal = _channels_first(grad_average, None, chunk)
        if not chunk:
            grad_signal, grad_taps[block] = _convolve_backward(grad_signal, signal, taps[block], center)
        else:
            grad_signal, grad_taps[block], *block_grads, block_initial = _scan_backward(
                grad_signal.unflatten(-1, (-1, chunk)),
                None if grad_last is None else grad_last[:, block],
                signal.unflatten(-1, (-1, chunk)),
                taps[block],
                center,
                *_block_maps(block, maps, initial),
            )
            for grad, value in zip(grad_maps, block_grads, strict=True):
                grad[block] = value.view_as(grad[block])
            if initial is not None:
                grad_initial[:, block] = block_initial.transpose(0, 1)
            grad_signal = grad_signal.flatten(2)
        grad_block = grad_signal[..., : x.shape[1]].permute(1, 2, 0)
        if mask is not None:
            grad_block = grad_block.masked_fill(~mask[..., None], 0.0)
        grad_x[..., block] = grad_block if gate is None else torch.addcmul(grad_block, grad_average, gate[block])
    if chunk:
        grads = lag_tables.chunk_maps_backward(coefficients, channels, chunk, shift, kept, grad_taps, *grad_maps)
    else:
        grads = lag_tables.lags_backward(coefficients, channels, length, shift, kept, grad_taps)
    if turns is not None and skip is not None:
        grad_skip = grad_taps[:, 0].clone()
    return [grad_x, grad_skip, *grads, grad_initial]


def _block_maps(block: slice, maps: list[Any], initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    input_map, output_map, decay = (table[block] for table in maps)
    decay = torch.view_as_complex(decay) if decay.dim() == 3 else decay
    return input_map, output_map, decay, None if initial is None else initial[:, block]


def flops(states: int, is_complex: bool) -> tuple[int, int]:
    """Return the FLOPs of an operator and of its gradient, counted as the recurrence, for the states at all positions.

    Multiply-adds are q h + p x (q and h of a complex average are complex), and the real part of w h.
    """
    update, output = (5, 2) if is_complex else (2, 1)
    return 2 * states * (update + output), 2 * states * (3 * update + 2 * output)


def _flops(x: Tensor, log_decay: Tensor, turns: Tensor | None, **_: object) -> tuple[int, int]:
    return flops(x.shape[0] * x.shape[1] * log_decay.numel(), turns is not None)


operator = register(
    "moving_average",
    INPUTS,
    "(Tensor, Tensor, Tensor, Tensor[])",
    _average,
    _average_fake,
    _average_backward,
    flops=_flops,
    differentiable=("x", "skip", "log_decay", "turns", "weight_in", "weight_out", "initial"),
    gradients={0: (), 2: ("skip", "weight_out")},
    saved="Tensor average, Tensor[] kept",
    save=lambda inputs, outputs: (outputs[1], list(outputs[3])),
    formula=formula.operator,
)
