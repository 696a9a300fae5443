"""Coefficients of real and complex averages from parameters, and the gradients of the parameters, in one launch each.

`coefficients.py` defines them (Mega section 3.1, Megalodon section 3.1). The parameters are `[R, N]` (complex:
projection `[D, N, 2]`, phase `[D]`) of any dtype, and the results are `[..., N, R]`. Intermediate values are float64,
because the decay over a chunk multiplies an error by the length of the chunk.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.triton_launch import launch, next_power_of_2
from . import coefficients

BLOCK = 256
LEAST = tl.constexpr(coefficients.LEAST)
TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def _double(pointer, places, inside):
    return tl.load(pointer + places, inside, other=0.0).to(tl.float32).to(tl.float64)


@triton.jit
def _store(pointer, places, value, inside):
    tl.store(pointer + places, value.to(tl.float32), inside)


@triton.jit
def _rates(input_logit, damping_logit):
    """Return p, the damping, q and log q, without cancellation if q is close to 0 or 1."""
    gate, damping = tl.sigmoid(input_logit), tl.sigmoid(damping_logit)
    lost = gate * damping
    q = tl.maximum(tl.sigmoid(-input_logit) + gate * tl.sigmoid(-damping_logit), LEAST)
    rounded = 1.0 - lost
    # log(1 - x) is -x if 1 - x rounds to 1; otherwise the factor removes the effect of the rounding.
    slow = tl.where(rounded == 1.0, -lost, tl.log(rounded) * (lost / tl.maximum(1.0 - rounded, LEAST)))
    return gate, damping, q, tl.where(lost > 0.5, tl.log(q), slow)


@triton.jit
def _damped_kernel(
    input_logit, damping_logit, expansion, projection,  # [R, N]
    output,  # [3, N, R]
    total, channel_rows, scale,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, source = place < total, place % channel_rows * N + place // channel_rows
    gate, _, _, log_q = _rates(_double(input_logit, source, inside), _double(damping_logit, source, inside))
    _store(output, place, log_q, inside)
    _store(output, total + place, gate * _double(expansion, source, inside), inside)
    _store(output, 2 * total + place, scale * _double(projection, source, inside), inside)


@triton.jit
def _damped_backward_kernel(
    input_logit, damping_logit, expansion, projection,  # [R, N]
    sums, input_sums,  # [directions, 2, N, D], [N, D]
    grad_input, grad_damping, grad_expansion, grad_projection,  # [R, N]
    total, channel_rows, channels, scale,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the parameters from the sums of `triton_scan_backward.backward`.

    If `input_sums` is None, the sums lack the factors p beta and eta / sqrt(N), which this kernel applies.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, n, channel_row = place < total, place % N, place // N
    first = channel_row // channels * 2 * N * channels + n * channels + channel_row % channels
    entry_logit, damping_logits = _double(input_logit, place, inside), _double(damping_logit, place, inside)
    gate, damping, q, _ = _rates(entry_logit, damping_logits)
    weight, exit = _double(expansion, place, inside), scale * _double(projection, place, inside)
    grad_out, slope = _double(sums, first, inside), _double(sums, first + N * channels, inside)
    if input_sums is None:
        grad_in, grad_out, slope = exit * grad_out, gate * weight * grad_out, gate * weight * exit * slope
    else:
        grad_in = _double(input_sums, n * channels + channel_row, inside)
    # d log q / d logit = -(1 - sigmoid(logit)) p damping / q
    through = tl.where(q > LEAST, slope * gate * damping, 0.0)
    _store(grad_input, place, (grad_in * gate * weight - through) * tl.sigmoid(-entry_logit), inside)
    _store(grad_damping, place, -through * tl.sigmoid(-damping_logits), inside)
    _store(grad_expansion, place, grad_in * gate, inside)
    _store(grad_projection, place, grad_out * scale, inside)


@triton.jit
def _turned(log_size, turns):
    """Return the real and imaginary parts of exp(log_size + 2 pi i turns)."""
    size = tl.exp(log_size)
    radians = (turns - tl.floor(turns + 0.5)) * TWO_PI
    return size * tl.cos(radians), size * tl.sin(radians)


@triton.jit
def _complex_kernel(
    input_logit, damping_logit, phase_logit, projection,  # [D, N], [D, N], [D], [D, N, 2]
    output,  # [10, N, D]
    channels, scale,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write q, its relative rounding error, log |q|, turns of q and their rounding error, p, and gamma / sqrt(N)."""
    n, d = tl.arange(0, BLOCK_N)[:, None], (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    inside, source, place, states = (n < N) & (d < channels), d * N + n, n * channels + d, N * channels
    gate, _, _, log_q = _rates(_double(input_logit, source, inside), _double(damping_logit, source, inside))
    turns = tl.sigmoid(_double(phase_logit, d, d < channels)) * (n + 1) / N
    real, imaginary = _turned(log_q, turns)
    lost_real, lost_imaginary = real - real.to(tl.float32), imaginary - imaginary.to(tl.float32)
    size = real * real + imaginary * imaginary
    scaled = tl.where(size > 1e-40, 1.0 / tl.maximum(size, 1e-40), 0.0)
    lost_real, lost_imaginary = lost_real * scaled, lost_imaginary * scaled
    values = (
        real, imaginary,
        lost_real * real + lost_imaginary * imaginary, lost_imaginary * real - lost_real * imaginary,
        log_q, turns, turns - turns.to(tl.float32),
        gate,
        scale * _double(projection, 2 * source, inside), scale * _double(projection, 2 * source + 1, inside),
    )  # fmt: skip
    for i in tl.static_range(10):
        _store(output + i * states, place, values[i], inside)


@triton.jit
def _complex_backward_kernel(
    input_logit, damping_logit, phase_logit,  # [D, N], [D, N], [D]
    sums, input_sums,  # [4, N, D], [N, D]
    grad_input, grad_damping, grad_phase_logit, grad_projection,  # [D, N], [D, N], [D], [D, N, 2]
    channels, scale,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the parameters from complex `sums` `[4, N, D]`.

    `sums` contains gradient times state, and gradient times the derivative of the state with respect to q.
    """
    n, d = tl.arange(0, BLOCK_N)[:, None], tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside, source, place, states = (n < N) & (d < channels)[None, :], d * N + n, n * channels + d, N * channels
    entry_logit, damping_logits = _double(input_logit, source, inside), _double(damping_logit, source, inside)
    gate, damping, q, log_q = _rates(entry_logit, damping_logits)
    phase_logits = _double(phase_logit, d, d < channels)
    frequency = (n + 1.0) / N
    real, imaginary = _turned(log_q * 0.0, tl.sigmoid(phase_logits)[None, :] * frequency)
    slope_real = _double(sums, 2 * states + place, inside)
    slope_imaginary = _double(sums, 3 * states + place, inside)
    grad_in = _double(input_sums, place, inside) * gate
    through = tl.where(q > LEAST, (real * slope_real - imaginary * slope_imaginary) * gate * damping, 0.0)
    grad_phase = -TWO_PI * q * (real * slope_imaginary + imaginary * slope_real) * frequency
    grad_phase = tl.sum(tl.where(inside, grad_phase, 0.0), 0) * tl.sigmoid(phase_logits) * tl.sigmoid(-phase_logits)
    _store(grad_input, source, (grad_in - through) * tl.sigmoid(-entry_logit), inside)
    _store(grad_damping, source, -through * tl.sigmoid(-damping_logits), inside)
    _store(grad_phase_logit, d, grad_phase, d < channels)
    _store(grad_projection, 2 * source, scale * _double(sums, place, inside), inside)
    _store(grad_projection, 2 * source + 1, -scale * _double(sums, states + place, inside), inside)


def damped(*parameters: Tensor) -> Tensor:
    """Return log q, p beta and eta / sqrt(N), `[3, N, R]` float32."""
    channel_rows, states = parameters[0].shape
    output = parameters[0].new_empty((3, states, channel_rows), dtype=torch.float32)
    _launch(_damped_kernel, channel_rows * states, states, *parameters, output, channel_rows * states, channel_rows)
    return output


def complex_factors(*parameters: Tensor) -> Tensor:
    """Return the numbers of `_complex_kernel`: 7 factors, p, and the two parts of the projection, `[10, N, D]`."""
    channels, states = parameters[0].shape
    output = parameters[0].new_empty((10, states, channels), dtype=torch.float32)
    _launch_tiles(_complex_kernel, channels, states, *parameters, output, channels)
    return output


def backward(sums: Tensor, input_sums: Tensor | None, *parameters: Tensor) -> list[Tensor]:
    """Return the gradients of the parameters from `sums` `[directions, 2, P, N, D]` and `input_sums` `[N, D]`."""
    (channel_rows, states), channels = parameters[0].shape, sums.shape[-1]
    grads = [torch.empty_like(parameter, dtype=torch.float32) for parameter in parameters]
    if parameters[3].dim() == 2:
        total, arguments = channel_rows * states, (*parameters, sums, input_sums, *grads)
        _launch(_damped_backward_kernel, total, states, *arguments, total, channel_rows, channels)
    else:
        arguments = *parameters[:3], sums, input_sums, *grads
        _launch_tiles(_complex_backward_kernel, channels, states, *arguments, channels)
    # `to` takes time even if the dtype is the same.
    pairs = zip(grads, parameters, strict=True)
    return [grad if parameter.dtype == torch.float32 else grad.to(parameter.dtype) for grad, parameter in pairs]


def _launch(kernel: Any, total: int, states: int, *arguments: Any) -> None:
    """Launch a kernel for `total` numbers; its last argument is 1 / sqrt(N)."""
    options = {"N": states, "BLOCK": BLOCK, "num_warps": 4, "num_stages": 1}
    launch(kernel, (-(-total // BLOCK),), *arguments, states**-0.5, **options)


def _launch_tiles(kernel: Any, channels: int, states: int, *arguments: Any) -> None:
    """Launch a kernel for tiles of states and channels; its last argument is 1 / sqrt(N)."""
    block_n = next_power_of_2(states)
    block_d = max(1, BLOCK // block_n)
    options = {"N": states, "BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": 4, "num_stages": 1}
    launch(kernel, (-(-channels // block_d),), *arguments, states**-0.5, **options)
