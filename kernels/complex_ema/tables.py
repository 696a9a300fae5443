"""Tables of powers of q for the PyTorch backend, and the gradients of what is made of them, in closed form.

A table has a row for every power, so that one row times another is a product of contiguous tensors; it is turned into
real pairs `[D, 2 N, E]`, where real and imaginary parts take turns, by one transposition of a matrix. The functions of
this file stand inside an operator, where complex numbers are in no compiler's way.
"""

import math

import torch

from luna_mega.kernels.complex_ema.coefficients import Coefficients, angle, powers_less_one

# Channels times positions of the tables in memory at the same time, where gradients need several, and least channels.
BLOCK, LEAST_CHANNELS = 1 << 12, 32


def _power(of: Coefficients, exponent: float) -> torch.Tensor:
    log_decay, turn = of[:2]
    return torch.polar(torch.exp(log_decay * exponent), angle(turn * exponent, log_decay.dtype))


def _table(of: Coefficients, count: int, step: int = 1) -> torch.Tensor:
    """Return q^(step t) for t < count, `[count, D, N]`, by doubling: a product has few factors and little error."""
    first = torch.view_as_complex(of.weight_out)
    rows = first.new_empty(count, *first.shape)
    rows[0] = 1.0
    done = 1
    while done < count:
        more = min(done, count - done)
        torch.mul(rows[:more], _power(of, step * done), out=rows[done : done + more])
        done += more
    return rows


def _pairs(rows: torch.Tensor) -> torch.Tensor:
    """Return complex numbers `[E, D, N]` as real pairs `[D, 2 N, E]`."""
    matrix = torch.view_as_real(rows).flatten(1).t().contiguous()
    return matrix.view(rows.shape[1], -1, rows.shape[0])


def _real(weight: torch.Tensor) -> torch.Tensor:
    """Return real weights `[D, N]` as pairs `[D, 2 N]`."""
    return torch.stack((weight, torch.zeros_like(weight)), -1).flatten(1)


def chunk_maps(of: Coefficients, chunk: int) -> tuple[torch.Tensor, ...]:
    """Return the lags within a chunk `[D, C]`, the matrices from a chunk to the states and back, and q^C - 1.

    The matrices are `[D, 2 N, C]`, q^C - 1 is `[D, N, 2]`.
    """
    rows = _table(of, chunk + 1)
    inward = _pairs(rows[:chunk].flip(0).mul_(of.weight_in))
    outward = _pairs(rows.mul_(torch.view_as_complex(of.weight_out)).conj_physical_())
    taps = _real(of.weight_in)[:, None] @ outward[..., :chunk]
    return taps[:, 0], inward, outward[..., 1:], powers_less_one(of.log_decay, of.turn, chunk)


def chunk_maps_backward(of: Coefficients, chunk: int, *gradients: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the coefficients from those of `chunk_maps`, of some channels at a time."""
    parts, size = [], max(LEAST_CHANNELS, BLOCK // chunk)
    for start in range(0, len(of.turn), size):
        block = slice(start, start + size)
        some = Coefficients(*(numbers[block] for numbers in of))
        parts.append(_chunk_maps_backward(some, chunk, *(gradient[block] for gradient in gradients)))
    return [torch.cat(grads) for grads in zip(*parts, strict=True)]


def _chunk_maps_backward(of, chunk, grad_taps, grad_inward, grad_outward, grad_decay):
    powers, weight_out = _table(of, chunk + 1), torch.view_as_complex(of.weight_out)
    now, later = powers[:chunk], powers[1:]
    # The derivative for a complex number x + i y is that for x, less i times that for y; the way out is conjugate.
    sums, slopes = _sums(_rows(grad_inward).flip(0).conj_physical_().mul_(now))
    out_sums, out_slopes = _sums(_rows(grad_outward).mul_(later))
    tap_sums, tap_slopes = _sums(torch.view_as_complex(torch.view_as_real(now) * grad_taps.t()[..., None, None]))
    grad_out = torch.addcmul(out_sums, of.weight_in, tap_sums)
    grad_in = sums.real + (weight_out * tap_sums).real
    out_slopes = out_slopes + out_sums + of.weight_in * tap_slopes  # the first way out is q, not 1
    last = torch.view_as_complex(grad_decay).conj() * powers[chunk]
    return _of_slopes(of.weight_in * slopes + weight_out * out_slopes + chunk * last, grad_in, grad_out)


def series(of: Coefficients, length: int) -> torch.Tensor:
    """Return Re sum_n p_n g_n q_n^t for t < length, `[D, length]`: q^(i c + j) = q^(i c) q^j."""
    inner, outer = _split(length)
    coarse = _table(of, outer, inner).mul_(of.weight_in * torch.view_as_complex(of.weight_out)).conj_physical_()
    return (_pairs(coarse).mT @ _pairs(_table(of, inner))).flatten(1)[:, :length]


def series_backward(of: Coefficients, grad_taps: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the coefficients from that of `series`."""
    length = grad_taps.shape[1]
    inner, outer = _split(length)
    grad = torch.nn.functional.pad(grad_taps, (0, outer * inner - length)).unflatten(1, (outer, inner))
    position = torch.arange(outer * inner, device=grad.device, dtype=grad.dtype).view(outer, inner)
    fine, coarse = _pairs(_table(of, inner)), _pairs(_table(of, outer, inner)).unflatten(1, (-1, 2))
    weight_out = torch.view_as_complex(of.weight_out)
    ones = grad.new_ones(outer)
    signs, ones = torch.cat((ones, -ones)), torch.cat((ones, ones))
    sums = []
    for weighted in (grad, position * grad):
        within = (fine @ weighted.mT).unflatten(1, (-1, 2))
        # Sums as products: faster than sums of short rows.
        real, imaginary = (coarse * within).flatten(2) @ signs, (coarse * within.flip(2)).flatten(2) @ ones
        sums.append(torch.complex(real, imaginary))
    plain, lagged = sums
    slopes = of.weight_in * weight_out * lagged
    return _of_slopes(slopes, (weight_out * plain).real, of.weight_in * plain)


def _split(length):
    inner = 1 << (max(length - 1, 1).bit_length() + 1) // 2
    return inner, -(-length // inner)


def _rows(pairs: torch.Tensor) -> torch.Tensor:
    """Return real pairs `[D, 2 N, E]` as complex numbers `[E, D, N]`."""
    matrix = pairs.flatten(0, 1).t().contiguous()
    return torch.view_as_complex(matrix.view(pairs.shape[2], pairs.shape[0], -1, 2))


def _sums(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over t of complex numbers `[E, D, N]`, and of t times them, `[D, N]`, by a product."""
    pairs = torch.view_as_real(rows)
    ramp = torch.arange(len(rows), device=pairs.device, dtype=pairs.dtype)
    sums = torch.stack((torch.ones_like(ramp), ramp)) @ pairs.flatten(1)
    return torch.view_as_complex(sums.view(2, *pairs.shape[1:])).unbind()


def _of_slopes(slopes, grad_in, grad_out):
    """Return the gradients of the coefficients; `slopes`: of log q, the others as complex derivatives."""
    return [
        slopes.real.contiguous(),
        slopes.imag.double() * (-2 * math.pi),
        grad_in.contiguous(),
        torch.view_as_real(grad_out.conj().resolve_conj()),
    ]
