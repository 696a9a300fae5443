"""The complex average in PyTorch, by the forms of `damped_ema`: the lags are real, a complex state is two real ones."""

import torch

from luna_mega.kernels._export import in_program
from luna_mega.kernels.complex_ema import tables
from luna_mega.kernels.complex_ema.coefficients import Coefficients, powers, powers_less_one, times
from luna_mega.kernels.damped_ema import torch_backend as damped
from luna_mega.kernels.damped_ema.reference import hold

INPUTS = (
    "Tensor x, Tensor? mask, Tensor? skip, Tensor log_decay, Tensor turn, Tensor weight_in, Tensor weight_out, "
    "Tensor? initial, SymInt chunk"
)


def complex_ema(x, coefficients, skip=None, mask=None, initial_state=None, return_state=False):
    """Return `reference.complex_ema`; the final state only on request."""
    chunk = damped.chunk_length(x, return_state or initial_state is not None)
    initial = None if initial_state is None else initial_state.flatten(2)
    output, last = torch.ops.luna_mega.complex_ema(x, mask, skip, *coefficients, initial, chunk)
    return output, _final_state(x, mask, coefficients, last, chunk) if return_state else None


def step(x, state, coefficients, skip, mask):
    """Return `reference.step`, but to add (q - 1) h: thousands of steps add up the rounding error of q."""
    change, weight_in, weight_out = coefficients
    kept = (x if mask is None else x.masked_fill(~mask[:, None], 0.0)).to(change.dtype)
    if in_program():  # compilers and ONNX know no complex numbers
        after = state + times(change, state)
    else:
        number = torch.view_as_complex(state.contiguous())
        after = torch.view_as_real(torch.addcmul(number, number, torch.view_as_complex(change)))
    state = hold(torch.addcmul(after, weight_in, kept[..., None, None]), state, mask)
    average = (weight_out * state).flatten(2).sum(-1)
    if skip is not None:
        average = torch.addcmul(average, skip, kept)
    return average.to(x.dtype), state


def _final_state(x, mask, coefficients, last, chunk):
    """Return the state behind the last position, from the state before the last chunk, which may be short."""
    log_decay, turn, weight_in, _ = coefficients
    rest = (x.shape[1] - 1) % chunk + 1
    exponents = torch.arange(rest - 1, -1, -1, dtype=torch.float64, device=x.device)
    inward = (weight_in[..., None, None] * powers(log_decay, turn, exponents)).flatten(1, 2)
    gained = damped.gained_states(x[:, -rest:], None if mask is None else mask[:, -rest:], inward)
    last, gained = (states.unflatten(2, (-1, 2)) for states in (last, gained))
    return last + times(powers_less_one(log_decay, turn, rest), last) + gained


def _maps(of, skip, length, chunk):
    """Return the lags with the skip, which is a lag of 0, and the maps of chunks; without chunks all lags."""
    taps, *maps = tables.chunk_maps(of, chunk) if chunk else (tables.series(of, length),)
    if skip is not None:
        taps = taps.clone()
        taps[:, 0] += skip
    return taps, maps


@torch.library.custom_op("luna_mega::complex_ema", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)")
def _complex_ema(x, mask, skip, log_decay, turn, weight_in, weight_out, initial, chunk):
    """Return the result, and the states before the last chunk `[B, D, 2 N]`; chunk 0: all lags by FFT, no states."""
    taps, maps = _maps(Coefficients(log_decay, turn, weight_in, weight_out), skip, x.shape[1], chunk)
    output, _, last = damped.run(x, mask, None, taps, 0, *(maps or (None,) * 3), initial)
    return output, last


@_complex_ema.register_fake
def _(x, mask, skip, log_decay, turn, weight_in, weight_out, initial, chunk):
    return x.new_empty(x.shape), log_decay.new_empty((x.shape[0], x.shape[2], 2 * log_decay.shape[1]) if chunk else 0)


@torch.library.custom_op(
    "luna_mega::complex_ema_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor? grad_last, {INPUTS}) -> Tensor[]",
)
def _complex_ema_backward(
    gradient, grad_last, x, mask, skip, log_decay, turn, weight_in, weight_out, initial, chunk
):  # fmt: skip
    """Return the gradients of x, skip, the coefficients and the initial state; empty where the input is None."""
    of = Coefficients(log_decay, turn, weight_in, weight_out)
    taps, maps = _maps(of, skip, x.shape[1], chunk)
    grad_x, _, grad_taps, *grad_maps, grad_initial = damped.run_backward(
        gradient, grad_last, None, x, mask, None, taps, 0, *(maps or (None,) * 3), initial
    )
    if chunk:
        grads = tables.chunk_maps_backward(of, chunk, grad_taps, *grad_maps)
    else:
        grads = tables.series_backward(of, grad_taps)
    grad_skip = taps.new_empty(0) if skip is None else grad_taps[:, 0].clone()
    return [grad_x, grad_skip, *grads, grad_initial]


@_complex_ema_backward.register_fake
def _(gradient, grad_last, x, mask, skip, log_decay, turn, weight_in, weight_out, initial, chunk):
    inputs = (x, skip, log_decay, turn, weight_in, weight_out, initial)
    return [log_decay.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs]


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient, grad_last):
    x, mask, *rest = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(x)
    grads = torch.ops.luna_mega.complex_ema_backward(gradient, grad_last, x, mask, *rest, ctx.chunk)
    grad_x, *grads = (None if tensor is None else grad for tensor, grad in zip((x, *rest), grads, strict=True))
    return grad_x, None, *grads, None


_complex_ema.register_autograd(_backward, setup_context=_save_for_backward)
