"""The damped EMA in PyTorch: by FFT, or in chunks with a carried state; memory linear in the length."""

import functools

import torch
from torch import nn

from luna_mega.kernels.damped_ema.coefficients import series
from luna_mega.kernels.damped_ema.reference import finish, hold

CHUNK = 64
# Shorter chunks, whose matrices take less time to make, and the positions in a batch up to which they are faster.
SHORT_CHUNKS = ((16, 1024), (32, 4096))
# From this number of positions in the batch on, chunks are faster than the FFT (README).
MANY_POSITIONS = 512
# Elements of x in one block for each thread, which several tensors of this size share the processor's cache with, and
# the least number of channels: more of them would only take memory.
BLOCK, LEAST_CHANNELS = 1 << 18, 32
INPUTS = (
    "Tensor x, Tensor? mask, Tensor? skip, Tensor taps, SymInt center, Tensor? inward, Tensor? outward, Tensor? decay, "
    "Tensor? initial"
)


def damped_ema(
    x, coefficients, skip=None, mask=None, shift=False, truncation=None, initial_state=None, return_state=False
):  # fmt: skip
    """Return `reference.damped_ema`; the final state only on request."""
    length, channels = x.shape[1:]
    chunk = chunk_length(x, return_state or initial_state is not None)
    if truncation is not None and truncation < length:
        chunk, length = 0, truncation
    if not chunk:
        taps, center = _taps(coefficients, channels, length, shift)
        return torch.ops.luna_mega.damped_ema(x, mask, skip, taps, center, None, None, None, None)[0], None
    taps, center, inward, outward, decay = _chunk_maps(coefficients, channels, chunk, shift)
    output, _, state = torch.ops.luna_mega.damped_ema(
        x, mask, skip, taps, center, inward, outward, decay, initial_state
    )
    return output, _final_state(x, mask, coefficients, state, inward) if return_state else None


def chunk_length(x, stateful):
    """Return the positions in a chunk of x `[B, T, D]`; 0 = no chunks, an FFT of all positions is faster."""
    if torch.compiler.is_compiling():
        return CHUNK  # a compiled program does not look at the length: one serves all
    positions, length = x.shape[0] * x.shape[1], x.shape[1]
    if positions < MANY_POSITIONS and not stateful:
        return 0
    return next((chunk for chunk, most in SHORT_CHUNKS if length <= chunk or positions <= most), CHUNK)


def step(x, state, coefficients, skip, mask):
    """Return `reference.step`, but to add (q - 1) h: thousands of steps add up the rounding error of q."""
    change, weight_in, weight_out = coefficients
    kept = x if mask is None else x.masked_fill(~mask[:, None], 0.0)
    after = torch.addcmul(state, state, change).addcmul_(weight_in, kept[..., None].to(change.dtype))
    state = hold(after, state, mask)
    return finish((weight_out * state).sum(-1), x, skip), state


def _taps(coefficients, channels, length, shift):
    """Return the kernel of both directions in one row per channel, and the index at which the lag is 0."""
    log_q, weight_in, weight_out = coefficients
    return _directed(series(weight_in * weight_out, log_q, length), channels, shift)


def _directed(kernel, channels, shift):
    """Return the lags of both directions, `[D or 2 D, K]`, in one row per channel, and the index of lag 0."""
    length = kernel.shape[1]
    if len(kernel) == channels:
        return kernel, 0
    center = length if shift else length - 1  # without shift lag 0 counts in both directions
    forward = nn.functional.pad(kernel[:channels], (center, 0))
    return forward + nn.functional.pad(kernel[channels:].flip(1), (0, center)), center


def _chunk_maps(coefficients, channels, chunk, shift):
    """Return the taps of a chunk, the index of lag 0, the matrices to the states and back, and q^C - 1.

    The matrices are `[D, N', C]`, q^C - 1 is `[D, N']`. N' = N, or 2 N with the states of the average that runs
    backwards last.
    """
    log_q, weight_in, weight_out = coefficients
    positions = torch.arange(chunk + 1, device=log_q.device, dtype=log_q.dtype)
    powers = torch.exp(log_q[..., None] * positions)
    now, later = powers[..., :chunk], powers[..., 1:]
    taps, center = _directed(((weight_in * weight_out)[:, None] @ now)[:, 0], channels, shift)
    inward, outward = weight_in[..., None] * now, weight_out[..., None] * later
    decay = torch.expm1(log_q * chunk)
    if len(decay) == channels:
        return taps, center, inward.flip(-1), outward, decay
    if shift:
        outward = torch.cat([outward[:channels], weight_out[channels:, :, None] * now[channels:]])
    inward = torch.cat([inward[:channels].flip(-1), inward[channels:]], dim=1)
    outward = torch.cat([outward[:channels], outward[channels:].flip(-1)], dim=1)
    return taps, center, inward, outward, torch.cat([decay[:channels], decay[channels:]], dim=1)


def _final_state(x, mask, coefficients, state, inward):
    """Return the state behind the last position, from the state before the last chunk, which may be short."""
    chunk = inward.shape[-1]
    rest = (x.shape[1] - 1) % chunk + 1
    gained = gained_states(x[:, -rest:], None if mask is None else mask[:, -rest:], inward[..., chunk - rest :])
    return torch.exp(coefficients[0] * rest) * state + gained


def gained_states(x, mask, inward):
    """Return the states `[B, D, N']` with which a chunk ends if it starts from zero; `inward` `[D, N', T]`."""
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0.0)
    return torch.einsum("dnt,btd->bdn", inward, x.to(inward.dtype))


@functools.lru_cache
def _fft_length(at_least):
    """Return the next number without prime factors above 5; other sizes of an FFT take up to six times as long."""
    while True:
        rest = at_least
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return at_least
        at_least += 1


def _spectrum(taps, center, size):
    """Return the spectrum of the taps on a circle of `size` positions, with negative lags at the end."""
    circle = torch.roll(nn.functional.pad(taps, (0, size - taps.shape[1])), -center, 1)
    return torch.fft.rfft(circle)[:, None]


def _convolve(signal, taps, center, size):
    """Apply every lag of `taps` `[D, K]` to a signal `[D, B, T]` at once."""
    spectrum = torch.fft.rfft(signal, n=size) * _spectrum(taps, center, size)
    return torch.fft.irfft(spectrum, n=size)[..., : signal.shape[-1]]


def _convolve_backward(gradient, signal, taps, center):
    length, size = signal.shape[-1], _circle(signal, taps, center)
    spectrum = torch.fft.rfft(gradient, n=size)
    grad_signal = torch.fft.irfft(spectrum * _spectrum(taps, center, size).conj(), n=size)[..., :length]
    lags = torch.fft.irfft((spectrum * torch.fft.rfft(signal, n=size).conj()).sum(1), n=size)
    return grad_signal, torch.roll(lags, center, 1)[:, : taps.shape[1]]


def _circle(signal, taps, center):
    return _fft_length(signal.shape[-1] + max(center, taps.shape[1] - center - 1))


def _toeplitz(taps, center, chunk):
    """Return the matrix `[D, C, C]` of the taps; row: position of the input, column: position of the output."""
    taps = nn.functional.pad(taps, (chunk - 1 - center, 0))
    return taps.unfold(1, chunk, 1).flip(1)


def _lag_sums(products, center):
    """Return the sums over the diagonals, the transpose of `_toeplitz`."""
    chunk = products.shape[-1]
    # With 2 C - 1 columns instead of 2 C, each row starts one column further right.
    rows = nn.functional.pad(products.flip(1), (0, chunk)).flatten(1)[:, : chunk * (2 * chunk - 1)]
    sums = rows.view(-1, chunk, 2 * chunk - 1).sum(1)
    return nn.functional.pad(sums, (center - chunk + 1, 0))


def _carry(gains, decay, first, forward, backward):
    """Return the states before each chunk, s_i = q^C s_{i-1} + gains_{i-1}, `[D, B, chunks, N']`, in place of `gains`.

    `decay`: q^C - 1; where it is complex, pairs of states are complex numbers. `first`: the states to begin with, `[D,
    B, N']`. `forward`, `backward`: the slices of the states that run with time and against it.
    """
    carried = gains.new_empty(gains.shape[2], *gains.shape[:2], gains.shape[3])
    carried[0] = first
    carried[1:, ..., forward] = gains[:, :, :-1, forward].permute(2, 0, 1, 3)
    carried[1:, ..., backward] = gains[:, :, 1:, backward].flip(2).permute(2, 0, 1, 3)
    rows, decay = _numbers(carried, decay).unbind(0), decay[:, None]
    for before, row in zip(rows[:-1], rows[1:], strict=True):
        row.add_(before).addcmul_(before, decay)
    gains[..., forward] = carried[..., forward].permute(1, 2, 0, 3)
    gains[..., backward] = carried[..., backward].flip(0).permute(1, 2, 0, 3)
    return gains


def _numbers(states, decay):
    """Return states as the numbers that `decay` multiplies: pairs as complex numbers where it is complex."""
    return torch.view_as_complex(states.unflatten(-1, (-1, 2))) if decay.is_complex() else states


def _pairs(numbers):
    """Return complex numbers as pairs of real ones."""
    return torch.view_as_real(numbers).flatten(-2) if numbers.is_complex() else numbers


def _directions(inward, center):
    count = inward.shape[1] if center == 0 else inward.shape[1] // 2
    return slice(0, count), slice(count, None)


def _states(chunks, inward, decay, initial, directions):
    gains = (chunks.flatten(1, 2) @ inward.mT).unflatten(1, chunks.shape[1:3])
    first = 0.0 if initial is None else initial.transpose(0, 1)
    return _carry(gains, decay, first, *directions)


def _scan(chunks, taps, center, inward, outward, decay, initial):
    """Return the average of chunks `[D, B, chunks, C]`, in the same shape, and the state before the last chunk."""
    states = _states(chunks, inward, decay, initial, _directions(inward, center))
    rows = chunks.flatten(1, 2) @ _toeplitz(taps, center, chunks.shape[-1])
    rows.baddbmm_(states.flatten(1, 2), outward)
    return rows.view(chunks.shape), states[:, :, -1]


def _scan_backward(gradient, grad_last, chunks, taps, center, inward, outward, decay, initial):
    forward, backward = _directions(inward, center)
    states = _states(chunks, inward, decay, initial, (forward, backward))
    rows, grad_rows = chunks.flatten(1, 2), gradient.flatten(1, 2)
    from_output = (grad_rows @ outward.mT).view(states.shape)
    if grad_last is not None:
        from_output[:, :, -1] += grad_last.transpose(0, 1)
    decay, from_first = decay.conj().resolve_conj(), from_output[:, :, 0].clone()
    grad_gains = _carry(from_output, decay, 0.0, backward, forward)
    first = _numbers(grad_gains[:, :, 0], decay)
    grad_initial = from_first + _pairs(torch.addcmul(first, first, decay[:, None]))
    states, grad_gains = states.flatten(1, 2), grad_gains.flatten(1, 2)
    grad_decay = _decay_gradient(grad_gains, states) if decay.is_complex() else (grad_gains * states).sum(1)
    grad_chunks = grad_rows @ _toeplitz(taps, center, chunks.shape[-1]).mT
    grad_chunks.baddbmm_(grad_gains, inward)
    grad_taps = _lag_sums(rows.mT @ grad_rows, center)
    grad_inward, grad_outward = grad_gains.mT @ rows, states.mT @ grad_rows
    return grad_chunks.view(chunks.shape), grad_taps, grad_inward, grad_outward, grad_decay, grad_initial


def _decay_gradient(gradients, states):
    """Return the sums of complex gradients times conjugate states, all as pairs `[D, R, 2 N]`: pairs `[D, 2 N]`.

    A product of all states with all takes less time and memory than one of complex tensors and its sum.
    """
    products = (gradients.mT @ states).unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).diagonal(0, 1, 3)
    real, imaginary = products[:, 0, 0] + products[:, 1, 1], products[:, 1, 0] - products[:, 0, 1]
    return torch.stack((real, imaginary), -1).flatten(1)


def _blocks(x):
    """Return slices of the channels on a CPU; elsewhere many small kernels cost more than the memory they save."""
    batch, length, channels = x.shape
    size = channels
    if x.device.type == "cpu":
        size = max(LEAST_CHANNELS, BLOCK * torch.get_num_threads() // max(batch * length, 1))
    return [slice(start, min(start + size, channels)) for start in range(0, channels, size)]


def _rows(x, mask, multiple):
    """Return `[B, T, D]` as `[D, B, T']`, with zeros where masked and up to T', a multiple of `multiple`."""
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0.0)
    x = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % multiple)).contiguous()
    # Transposing a contiguous matrix is four times as fast as copying a permuted slice.
    return x.flatten(0, 1).t().contiguous().view(-1, *x.shape[:2])


def run(x, mask, skip, taps, center, inward, outward, decay, initial):
    """Return the result, the argument of silu, and the state before the last chunk; the last two may be empty.

    Without `inward`, `outward` and `decay` all lags stand in `taps`, which are convolved by FFT. With them `taps` are
    the lags within a chunk. A `decay` of real pairs `[D, N, 2]` multiplies complex states, whose parts take turns.
    """
    batch, length, channels = x.shape
    average = torch.empty(x.shape, dtype=taps.dtype, device=x.device)
    last = taps.new_empty(0 if inward is None else (batch, channels, inward.shape[1]))
    chunk = 1 if inward is None else inward.shape[2]
    for block in _blocks(x):
        rows = _rows(x[..., block].to(taps.dtype), mask, chunk)
        if inward is None:
            rows = _convolve(rows, taps[block], center, _circle(rows, taps, center))
        else:
            maps = _of_block(block, inward, outward, decay, initial)
            rows, state = _scan(rows.unflatten(-1, (-1, chunk)), taps[block], center, *maps)
            rows, last[:, block] = rows.flatten(2), state.transpose(0, 1)
        average[..., block] = rows[..., :length].permute(1, 2, 0)
    if skip is None:
        return average.to(x.dtype), taps.new_empty(0), last
    average.addcmul_(skip, x)
    return nn.functional.silu(average).to(x.dtype), average, last


_damped_ema = torch.library.custom_op(
    "luna_mega::damped_ema", run, mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor, Tensor)"
)


@_damped_ema.register_fake
def _(x, mask, skip, taps, center, inward, outward, decay, initial):
    average = taps.new_empty(0 if skip is None else x.shape)
    last = taps.new_empty(0 if inward is None else (x.shape[0], x.shape[2], inward.shape[1]))
    return x.new_empty(x.shape), average, last


def run_backward(gradient, grad_last, average, x, mask, skip, taps, center, inward, outward, decay, initial):
    """Return the gradients of x, skip, taps, inward, outward, decay and initial; empty where the input is None."""
    length, dtype = x.shape[1], taps.dtype
    chunk = 1 if inward is None else inward.shape[2]
    grads = _empty_like(x, skip, taps, inward, outward, decay, initial)
    grad_x, grad_skip, grad_taps, *grad_maps, grad_initial = grads
    for block in _blocks(x):
        inputs, grad_average = x[..., block].to(dtype), gradient[..., block].to(dtype)
        if skip is not None:
            grad_average = torch.ops.aten.silu_backward(grad_average, average[..., block])
            grad_skip[block] = (grad_average * inputs).sum((0, 1))
        rows, grad_rows = _rows(inputs, mask, chunk), _rows(grad_average, None, chunk)
        if inward is None:
            through, grad_taps[block] = _convolve_backward(grad_rows, rows, taps[block], center)
        else:
            through, grad_taps[block], *of_maps, of_initial = _scan_backward(
                grad_rows.unflatten(-1, (-1, chunk)),
                None if grad_last is None else grad_last[:, block],
                rows.unflatten(-1, (-1, chunk)),
                taps[block],
                center,
                *_of_block(block, inward, outward, decay, initial),
            )
            for grad, value in zip(grad_maps, of_maps, strict=True):
                grad[block] = value.view_as(grad[block])
            if initial is not None:
                grad_initial[:, block] = of_initial.transpose(0, 1)
            through = through.flatten(2)
        grad_block = through[..., :length].permute(1, 2, 0)
        if mask is not None:
            grad_block = grad_block.masked_fill(~mask[..., None], 0.0)
        if skip is not None:
            grad_block = torch.addcmul(grad_block, grad_average, skip[block])
        grad_x[..., block] = grad_block
    return grads


_damped_ema_backward = torch.library.custom_op(
    "luna_mega::damped_ema_backward",
    run_backward,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor? grad_last, Tensor average, {INPUTS}) -> Tensor[]",
)


@_damped_ema_backward.register_fake
def _(gradient, grad_last, average, x, mask, skip, taps, center, inward, outward, decay, initial):
    return _empty_like(x, skip, taps, inward, outward, decay, initial)


def _empty_like(x, *inputs):
    return [x.new_empty(x.shape), *(x.new_empty(0 if t is None else t.shape, dtype=inputs[1].dtype) for t in inputs)]


def _of_block(block, inward, outward, decay, initial):
    decay = decay[block]
    decay = torch.view_as_complex(decay) if decay.dim() == 3 else decay
    return inward[block], outward[block], decay, None if initial is None else initial[:, block]


def _save_for_backward(ctx, inputs, output):
    x, mask, skip, taps, ctx.center, *rest = inputs
    ctx.save_for_backward(x, mask, skip, taps, *rest, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient, _, grad_last):
    x, mask, skip, taps, *rest, average = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(x)
    grads = torch.ops.luna_mega.damped_ema_backward(
        gradient, grad_last, average, x, mask, skip, taps, ctx.center, *rest
    )
    inputs = (x, skip, taps, *rest)
    grad_x, *grads = (None if tensor is None else grad for tensor, grad in zip(inputs, grads, strict=True))
    return grad_x, None, *grads[:2], None, *grads[2:]


_damped_ema.register_autograd(_backward, setup_context=_save_for_backward)
