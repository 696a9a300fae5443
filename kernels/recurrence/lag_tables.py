"""Lag weights (taps) and chunk matrices of real and complex averages in PyTorch, with closed-form gradients.

All are computed from tables of powers of q. The real functions also run in exported programs. A complex table has one
row per power, so that a product of two rows is a product of contiguous tensors. One matrix transposition converts the
table to real pairs `[D, 2 N, E]` of alternating real and imaginary parts. The complex functions run inside an operator,
which hides complex numbers from compilers.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..upcast import as_complex
from .coefficients import Coefficients, powers_less_one, to_radians

CHUNK = 64
# Gradients are computed in blocks of channels: channels times positions of a block, and its least number of channels.
BLOCK, LEAST_CHANNELS = 1 << 12, 32


def toeplitz(taps: Tensor, center: int, chunk: int) -> Tensor:
    """Return the matrix `[D, C, C]` of the taps; row: position of the input, column: position of the output."""
    taps = nn.functional.pad(taps, (chunk - 1 - center, 0))
    return taps.unfold(1, chunk, 1).flip(1)


def lags(coefficients: Coefficients, channels: int, length: int, shift: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the weights of the first `length` lags in each direction, `[D, K]`, and tables for `lags_backward`."""
    if coefficients.turns is not None:
        return complex_series(coefficients, length), []
    tables = _series_tables(coefficients.log_decay, length)
    return _join(series(coefficients, length, *tables), channels, shift), tables


def center(coefficients: Coefficients, channels: int, length: int, shift: bool) -> int:
    """Return the index of lag 0 in the taps of chunks or sequences of this length."""
    if len(coefficients.log_decay) == channels:
        return 0
    return length if shift else length - 1  # without shift, both directions include lag 0


def lags_backward(
    coefficients: Coefficients, channels: int, length: int, shift: bool, tables: list[Any], grad_taps: Tensor
) -> list[Any]:
    """Return the gradients of the coefficients from the gradient of `lags`; `tables`: its last result."""
    if coefficients.turns is not None:
        return _complex_series_backward(coefficients, grad_taps)
    coarse, fine = tables
    grad_series = _split(grad_taps, len(coefficients.log_decay), channels, length, shift)
    return _series_backward(coefficients, coarse, fine, grad_series)


def chunk_maps(
    coefficients: Coefficients, channels: int, chunk: int, shift: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the taps of a chunk, the input map, the output map, q^C - 1, and tables for `chunk_maps_backward`.

    The maps `[D, N', C]` convert the inputs of a chunk to states, and states to outputs. q^C - 1 is `[D, N']`, complex
    `[D, N, 2]`. N' is N, or 2 N with real pairs of complex states, or with two directions, the one from the end last.
    """
    if coefficients.turns is not None:
        return *_complex_chunk_maps(coefficients, chunk), []
    log_q, _, weight_in, weight_out = coefficients
    positions = torch.arange(chunk + 1, device=log_q.device, dtype=log_q.dtype)
    powers = torch.exp(log_q[..., None] * positions)
    now, later = powers[..., :chunk], powers[..., 1:]
    taps = _join(((weight_in * weight_out)[:, None] @ now)[:, 0], channels, shift)
    input_map, output_map = weight_in[..., None] * now, weight_out[..., None] * later
    decay = torch.expm1(log_q * chunk)
    if len(decay) == channels:
        return taps, input_map.flip(-1), output_map, decay, [powers]
    if shift:
        output_map = torch.cat([output_map[:channels], weight_out[channels:, :, None] * now[channels:]])
    input_map = torch.cat([input_map[:channels].flip(-1), input_map[channels:]], dim=1)
    output_map = torch.cat([output_map[:channels], output_map[channels:].flip(-1)], dim=1)
    return taps, input_map, output_map, torch.cat([decay[:channels], decay[channels:]], dim=1), [powers]


def chunk_maps_backward(
    coefficients: Coefficients, channels: int, chunk: int, shift: bool, tables: list[Any], *gradients: Tensor
) -> list[Any]:
    """Return the gradients of the coefficients from the gradients of `chunk_maps`; `tables`: its last result."""
    if coefficients.turns is not None:
        return _complex_chunk_maps_backward(coefficients, chunk, *gradients)
    grad_taps, grad_input_map, grad_output_map, grad_decay = gradients
    log_q, _, weight_in, weight_out = coefficients
    grad_taps = _split(grad_taps, len(log_q), channels, chunk, shift)
    (powers,), first = tables, log_q.new_ones(len(log_q), 1)
    now, later = powers[..., :chunk], powers[..., 1:]
    if len(log_q) == channels:
        grad_input_map, out = grad_input_map.flip(-1), later
    else:
        forward, backward = grad_input_map.chunk(2, 1)
        grad_input_map = torch.cat((forward.flip(-1), backward))
        forward, backward = grad_output_map.chunk(2, 1)
        grad_output_map = torch.cat((forward, backward.flip(-1)))
        grad_decay = torch.cat(grad_decay.chunk(2, 1))
        out = torch.cat((later[:channels], now[channels:])) if shift else later
        first[channels:] = 0.0 if shift else 1.0
    # Sums over the positions t of a chunk, of gradients times q^t and times t q^t.
    ramp = torch.arange(chunk, device=log_q.device, dtype=log_q.dtype)
    weights = torch.stack((torch.ones_like(ramp), ramp), -1)
    in_sum, in_slope = ((grad_input_map * now) @ weights).unbind(-1)
    out_sum, out_slope = ((grad_output_map * out) @ weights).unbind(-1)
    tap_sum, tap_slope = (now @ (grad_taps[..., None] * weights)).unbind(-1)
    grad_in, grad_out = in_sum + weight_out * tap_sum, out_sum + weight_in * tap_sum
    slopes = weight_in * in_slope + weight_out * (out_slope + first * out_sum) + weight_in * weight_out * tap_slope
    return [slopes + chunk * grad_decay * powers[..., chunk], None, grad_in, grad_out]


def _join(kernel: Tensor, channels: int, shift: bool) -> Tensor:
    """Join the lags of both directions, `[D or 2 D, K]`, to one row per channel."""
    length = kernel.shape[1]
    if len(kernel) == channels:
        return kernel
    before = length if shift else length - 1
    forward = nn.functional.pad(kernel[:channels], (before, 0))
    return forward + nn.functional.pad(kernel[channels:].flip(1), (0, before))


def _split(gradient: Tensor, channel_rows: int, channels: int, length: int, shift: bool) -> Tensor:
    """Split the gradient into the two directions (the transpose of `_join`)."""
    if channel_rows == channels:
        return gradient
    return torch.cat((gradient[:, length if shift else length - 1 :], gradient[:, :length].flip(1)))


def series(coefficients: Coefficients, length: int, coarse: Tensor, fine: Tensor) -> Tensor:
    """Return sum_n p_n w_n q_n^t for t < length and real q, `[R, length]`, with q^(i c + j) = q^(i c) q^j."""
    weight = coefficients.weight_in * coefficients.weight_out
    return ((coarse * weight[..., None]).mT @ fine).flatten(-2)[..., :length]


def _series_tables(log_q: Tensor, length: int) -> list[Tensor]:
    inner = 16 if length <= 256 else 64
    outer = torch.arange(-(-length // inner), device=log_q.device, dtype=log_q.dtype) * inner
    fine = torch.exp(log_q[..., None] * torch.arange(inner, device=log_q.device, dtype=log_q.dtype))
    return [torch.exp(log_q[..., None] * outer), fine]


def _series_backward(coefficients: Coefficients, coarse: Tensor, fine: Tensor, grad: Tensor) -> list[Tensor | None]:
    blocks, inner = coarse.shape[2], fine.shape[2]
    grad = nn.functional.pad(grad, (0, blocks * inner - grad.shape[1])).unflatten(1, (blocks, inner))
    position = torch.arange(blocks * inner, device=grad.device, dtype=grad.dtype).view(blocks, inner)
    # Sums over all positions t of the gradient times q^t, and times t q^t.
    plain, lagged = ((coarse * (fine @ x.mT)).sum(-1) for x in (grad, position * grad))
    _, _, weight_in, weight_out = coefficients
    return [lagged * weight_in * weight_out, None, plain * weight_out, plain * weight_in]


def _table(coefficients: Coefficients, count: int, step: int = 1) -> Tensor:
    """Return q^(step t) for t < count, `[count, D, N]`.

    The number of computed powers doubles in every step, so that each is a product of few factors: rounding errors are
    small.
    """
    log_q, turns, _, weight_out = coefficients
    assert turns is not None
    table = as_complex(weight_out).new_empty(count, *log_q.shape)
    table[0] = 1.0
    done = 1
    while done < count:
        more = min(done, count - done)
        power = torch.polar(torch.exp(log_q * (step * done)), to_radians(turns * (step * done), log_q.dtype))
        torch.mul(table[:more], power, out=table[done : done + more])
        done += more
    return table


def _pairs(numbers: Tensor) -> Tensor:
    """Return complex numbers `[E, D, N]` as real pairs `[D, 2 N, E]`."""
    matrix = torch.view_as_real(numbers).flatten(1).t().contiguous()
    return matrix.view(numbers.shape[1], -1, numbers.shape[0])


def _real(weight: Tensor) -> Tensor:
    """Return real weights `[D, N]` as pairs `[D, 2 N]`."""
    return torch.stack((weight, torch.zeros_like(weight)), -1).flatten(1)


def _complex_chunk_maps(coefficients: Coefficients, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_q, turns, weight_in, weight_out = coefficients
    powers = _table(coefficients, chunk + 1)
    input_map = _pairs(powers[:chunk].flip(0).mul_(weight_in))
    output_map = _pairs(powers.mul_(as_complex(weight_out)).conj_physical_())
    taps = _real(weight_in)[:, None] @ output_map[..., :chunk]
    return taps[:, 0], input_map, output_map[..., 1:], powers_less_one(log_q, turns, chunk)


def _complex_chunk_maps_backward(coefficients: Coefficients, chunk: int, *gradients: Tensor) -> list[Tensor]:
    """Compute the gradients of one block of channels at a time."""
    block_grads, size = [], max(LEAST_CHANNELS, BLOCK // chunk)
    for start in range(0, len(coefficients.log_decay), size):
        block = slice(start, start + size)
        grads = _block_backward(coefficients.channel_rows(block), chunk, *(gradient[block] for gradient in gradients))
        block_grads.append(grads)
    return [torch.cat(grads) for grads in zip(*block_grads, strict=True)]


def _block_backward(
    coefficients: Coefficients, chunk: int, grad_taps: Tensor, grad_input_map: Tensor, grad_output_map: Tensor,
    grad_decay: Tensor,
) -> list[Tensor]:  # fmt: skip
    _, _, weight_in, weight_out = coefficients
    powers, weight_out = _table(coefficients, chunk + 1), as_complex(weight_out)
    now, later = powers[:chunk], powers[1:]
    # The complex derivative with respect to x + i y is d/dx - i d/dy; the output map contains conjugates.
    sums, slopes = _sums(_numbers(grad_input_map).flip(0).conj_physical_().mul_(now))
    out_sums, out_slopes = _sums(_numbers(grad_output_map).mul_(later))
    tap_sums, tap_slopes = _sums(torch.view_as_complex(torch.view_as_real(now) * grad_taps.t()[..., None, None]))
    grad_out = torch.addcmul(out_sums, weight_in, tap_sums)
    grad_in = sums.real + (weight_out * tap_sums).real
    out_slopes = out_slopes + out_sums + weight_in * tap_slopes  # the first output power is q, not 1
    last = torch.view_as_complex(grad_decay).conj_physical() * powers[chunk]
    return _gradients(weight_in * slopes + weight_out * out_slopes + chunk * last, grad_in, grad_out)


def complex_series(coefficients: Coefficients, length: int) -> Tensor:
    """Return Re sum_n p_n w_n q_n^t for t < length and complex q, `[D, length]`, with q^(i c + j) = q^(i c) q^j."""
    inner, outer = _factors(length)
    weight = coefficients.weight_in * as_complex(coefficients.weight_out)
    coarse = _table(coefficients, outer, inner).mul_(weight).conj_physical_()
    return (_pairs(coarse).mT @ _pairs(_table(coefficients, inner))).flatten(1)[:, :length]


def _complex_series_backward(coefficients: Coefficients, grad_taps: Tensor) -> list[Tensor]:
    length = grad_taps.shape[1]
    inner, outer = _factors(length)
    grad = torch.nn.functional.pad(grad_taps, (0, outer * inner - length)).unflatten(1, (outer, inner))
    position = torch.arange(outer * inner, device=grad.device, dtype=grad.dtype).view(outer, inner)
    fine, coarse = _pairs(_table(coefficients, inner)), _pairs(_table(coefficients, outer, inner)).unflatten(1, (-1, 2))
    weight_in, weight_out = coefficients.weight_in, as_complex(coefficients.weight_out)
    ones = grad.new_ones(outer)
    signs, ones = torch.cat((ones, -ones)), torch.cat((ones, ones))
    sums = []
    for weighted in (grad, position * grad):
        within = (fine @ weighted.mT).unflatten(1, (-1, 2))
        # Sums as matrix products, which are faster than sums over short rows.
        real, imaginary = (coarse * within).flatten(2) @ signs, (coarse * within.flip(2)).flatten(2) @ ones
        sums.append(torch.complex(real, imaginary))
    plain, lagged = sums
    return _gradients(weight_in * weight_out * lagged, (weight_out * plain).real, weight_in * plain)


def _factors(length: int) -> tuple[int, int]:
    inner = 1 << (max(length - 1, 1).bit_length() + 1) // 2
    return inner, -(-length // inner)


def _numbers(pairs: Tensor) -> Tensor:
    """Return real pairs `[D, 2 N, E]` as complex numbers `[E, D, N]`."""
    matrix = pairs.flatten(0, 1).t().contiguous()
    return torch.view_as_complex(matrix.view(pairs.shape[2], pairs.shape[0], -1, 2))


def _sums(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over t of complex numbers `[E, D, N]`, and of t times the numbers; both are `[D, N]`."""
    pairs = torch.view_as_real(numbers)
    ramp = torch.arange(len(numbers), device=pairs.device, dtype=pairs.dtype)
    sums = torch.stack((torch.ones_like(ramp), ramp)) @ pairs.flatten(1)
    first, second = torch.view_as_complex(sums.view(2, *pairs.shape[1:]))
    return first, second


def _gradients(slopes: Tensor, grad_in: Tensor, grad_out: Tensor) -> list[Tensor]:
    """Return the gradients of the coefficients.

    All arguments are complex derivatives; `slopes` is the derivative with respect to log q.
    """
    return [
        slopes.real.contiguous(),
        slopes.imag.double() * (-2 * math.pi),
        grad_in.contiguous(),
        torch.view_as_real(grad_out.conj_physical()),
    ]
