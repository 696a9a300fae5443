"""The complex average in Triton: a scan in registers, in chunks that run in parallel, forward and backward.

The division into programs is the same as in `damped_ema`: a program of one warp processes one chunk with the states of
BLOCK_D channels in two tiles `[BLOCK_N, BLOCK_D]`, real and imaginary parts. The layout of states is `[..., 2, N, D]`.

The backward pass stores no states. A second scan of x computes each state and its derivative with respect to q,
s_t = q s_{t-1} + h_{t-1}. The gradient of x is a scan of the gradient in reversed time: r_t = g dy_t + q r_{t+1}. Here
r is a complex derivative, dL = Re(r dh); the state of the scan is q r_{t+1}.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from luna_mega.kernels.common.triton_launch import next_power_of_2
from luna_mega.kernels.moving_average.coefficients import conjugate
from luna_mega.kernels.moving_average.triton_coefficients import complex_backward, complex_factors
from luna_mega.kernels.moving_average.triton_damped_forward import (
    Plan,
    choose,
    place,
    position,
    sequence_slots,
    state_tile,
)
from luna_mega.kernels.moving_average.triton_step import load_pair, times


@triton.jit
def _rate(factors, rows, states, tile, UNROLL: tl.constexpr):
    """Return q, and the rounding error of q that accumulates over UNROLL steps."""
    q_real, q_imaginary = load_pair(factors, rows, states, tile)
    lost_real, lost_imaginary = load_pair(factors + 2 * states, rows, states, tile)
    return q_real, q_imaginary, lost_real * UNROLL, lost_imaginary * UNROLL


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _chunk_state_kernel(
    signal, mask,  # [B, T, D], [B, T]
    factors,  # [8, N, D], see `triton_coefficients`
    weight_in, weight_out,  # [N, D], [2, N, D]
    starts,  # [S, 2, N, D]
    ends,  # [slots, 2 or 4 with SLOPE, N, D]
    cu_seqlens, length, chunk, chunks, channels, blocks, width, slots,  # see `Plan`
    stride_b, stride_t, stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr, SLOPE: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write the states at the end of a chunk with zero initial states; the first chunk starts from `starts`.

    SLOPE: also write their derivatives with respect to q. GRADIENT: run backward in time. The program index is `(block,
    chunk, sequence)`.
    """
    block, sequence, row, first, size, number, slot, begin, count = place(cu_seqlens, length, chunk, chunks, blocks)
    if count <= 0:
        return
    n, d, inside, tile = state_tile(block, channels, N, BLOCK_N, BLOCK_D)
    rows, states, end = n * channels + d[None, :], channels * N, tl.where(inside, count, 0)
    q_real, q_imaginary, lost_real, lost_imaginary = _rate(factors, rows, states, tile, UNROLL)
    real, imaginary = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    slope_real, slope_imaginary = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if GRADIENT:
        out_real, out_imaginary = load_pair(weight_out, rows, states, tile)
    else:
        entry = tl.load(weight_in + rows, tile, other=0.0)
    if starts is not None:
        if (begin + chunk >= size) if GRADIENT else (number == 0):
            real, imaginary = load_pair(starts + 2 * sequence * states, rows, states, tile)
    values = signal + row * stride_b + (first + begin) * stride_t + d * stride_d
    token = row * length + first + begin
    for start in range(0, count, UNROLL):
        entering = ()
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, GRADIENT)
            value = tl.load(values + t * stride_t, t < end, other=0.0).to(tl.float32)
            if mask is not None:
                value = tl.where(tl.load(mask + token + t, t < count, other=0), value, 0.0)
            entering += (value[None, :],)
        gain_real, gain_imaginary = times(real, imaginary, lost_real, lost_imaginary)
        real, imaginary = real + gain_real, imaginary + gain_imaginary
        if SLOPE:
            gain_real, gain_imaginary = times(slope_real, slope_imaginary, lost_real, lost_imaginary)
            slope_real, slope_imaginary = slope_real + gain_real, slope_imaginary + gain_imaginary
        for i in tl.static_range(UNROLL):
            if SLOPE:
                turned_real, turned_imaginary = times(slope_real, slope_imaginary, q_real, q_imaginary)
                slope_real, slope_imaginary = turned_real + real, turned_imaginary + imaginary
            if GRADIENT:
                real += out_real * entering[i]
                imaginary += out_imaginary * entering[i]
                next_real, next_imaginary = times(real, imaginary, q_real, q_imaginary)
                if starts is not None:
                    t = position(start + i, count, UNROLL, GRADIENT)
                    next_real = tl.where(t < count, next_real, real)
                    next_imaginary = tl.where(t < count, next_imaginary, imaginary)
                real, imaginary = next_real, next_imaginary
            else:
                next_real, imaginary = times(real, imaginary, q_real, q_imaginary)
                real = next_real + entry * entering[i]
    kept = ends + (4 if SLOPE else 2) * slot * states + rows
    tl.store(kept, real, tile)
    tl.store(kept + states, imaginary, tile)
    if SLOPE:
        tl.store(kept + 2 * states, slope_real, tile)
        tl.store(kept + 3 * states, slope_imaginary, tile)


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _state_passing_kernel(
    ends,  # [slots, 2 or 4 with SLOPE, N, D]
    factors,  # [8, N, D], see `triton_coefficients`
    starts,  # [S, 2, N, D]
    own_blocks, cu_seqlens, length, chunk, chunks, channels, blocks, width, slots,
    N: tl.constexpr, BLOCK: tl.constexpr, SLOPE: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Replace the states at the end of each chunk by the states before the chunk, in the direction of the scan.

    The program index is `(block of states, sequence)`.
    """
    program = tl.program_id(0).to(tl.int64)
    block, sequence = program % own_blocks, program // own_blocks
    first_slot, size = sequence_slots(cu_seqlens, sequence, length, chunk, chunks)
    states = channels * N
    rows = block * BLOCK + tl.arange(0, BLOCK)
    tile = rows < states
    power_real, power_imaginary = load_pair(factors + 4 * states, rows, states, tile)
    by_real, by_imaginary = load_pair(factors + 6 * states, rows, states, tile)
    count = tl.maximum(tl.cdiv(size, chunk), 1)
    real, imaginary = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    slope_real, slope_imaginary = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if starts is not None:
        real, imaginary = load_pair(starts + 2 * sequence * states, rows, states, tile)
    for step in range(0, count):
        number = count - 1 - step if GRADIENT else step
        values = ends + (4 if SLOPE else 2) * (first_slot + number) * states + rows
        end_real, end_imaginary = load_pair(values, 0, states, tile)
        tl.store(values, real, tile)
        tl.store(values + states, imaginary, tile)
        if SLOPE:
            slope_end_real, slope_end_imaginary = load_pair(values + 2 * states, 0, states, tile)
            tl.store(values + 2 * states, slope_real, tile)
            tl.store(values + 3 * states, slope_imaginary, tile)
            # The end of the first chunk includes the decayed initial states.
            turned_real, turned_imaginary = times(slope_real, slope_imaginary, power_real, power_imaginary)
            gained_real, gained_imaginary = times(real, imaginary, by_real, by_imaginary)
            slope_real = slope_end_real + tl.where(step == 0, 0.0, slope_real + turned_real + gained_real)
            slope_imaginary += turned_imaginary + gained_imaginary
            slope_imaginary = slope_end_imaginary + tl.where(step == 0, 0.0, slope_imaginary)
        turned_real, turned_imaginary = times(real, imaginary, power_real, power_imaginary)
        real = end_real + tl.where(step == 0, 0.0, real + turned_real)
        imaginary = end_imaginary + tl.where(step == 0, 0.0, imaginary + turned_imaginary)


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _scan_kernel(
    signal, mask,  # [B, T, D], [B, T]
    factors,  # [8, N, D], see `triton_coefficients`
    weight_in, weight_out,  # [N, D], [2, N, D]
    skip,  # [D]
    starts,  # [slots, 2, N, D]
    x, output,  # [B, T, D]
    last,  # [S, 2, N, D]
    sums,  # [slots, N, D]
    cu_seqlens, length, chunk, chunks, channels, blocks, width, slots,  # see `Plan`
    stride_b, stride_t, stride_d, x_stride_b, x_stride_t, x_stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write the average including the skip, and the states after the last step to `last`.

    GRADIENT: `signal` is the gradient of the result, the scan runs backward in time, the result is the gradient of x,
    and `sums` receives the sum of the real part of the states times x.
    """
    block, sequence, row, first, size, number, slot, begin, count = place(cu_seqlens, length, chunk, chunks, blocks)
    if (count <= 0) & (number > 0):
        return
    n, d, inside, tile = state_tile(block, channels, N, BLOCK_N, BLOCK_D)
    rows, states, end = n * channels + d[None, :], channels * N, tl.where(inside, count, 0)
    q_real, q_imaginary, lost_real, lost_imaginary = _rate(factors, rows, states, tile, UNROLL)
    entry = tl.load(weight_in + rows, tile, other=0.0)
    out_real, out_imaginary = load_pair(weight_out, rows, states, tile)
    real, imaginary = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if starts is not None:
        real, imaginary = load_pair(starts + 2 * slot * states, rows, states, tile)
    if skip is not None:
        skip_weight = tl.load(skip + d, inside, other=0.0)
    if GRADIENT:
        total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        inputs = x + row * x_stride_b + (first + begin) * x_stride_t + d * x_stride_d
    values = signal + row * stride_b + (first + begin) * stride_t + d * stride_d
    token = row * length + first + begin
    for start in range(0, count, UNROLL):
        signals, keeps, multiplied = (), (), ()
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, GRADIENT)
            signals += (tl.load(values + t * stride_t, t < end, other=0.0).to(tl.float32),)
            keep = t < count
            if mask is not None:
                keep = tl.load(mask + token + t, keep, other=0)
            keeps += (keep,)
            if GRADIENT:
                value = tl.load(inputs + t * x_stride_t, t < end, other=0.0).to(tl.float32)
                multiplied += (tl.where(keep, value, 0.0),)
        gain_real, gain_imaginary = times(real, imaginary, lost_real, lost_imaginary)
        real, imaginary = real + gain_real, imaginary + gain_imaginary
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, GRADIENT)
            value = signals[i]
            if not GRADIENT:
                value = tl.where(keeps[i], value, 0.0)
            if GRADIENT:
                real += out_real * value[None, :]
                imaginary += out_imaginary * value[None, :]
                result = tl.sum(entry * real, 0)
                total += real * multiplied[i][None, :]
            next_real, next_imaginary = times(real, imaginary, q_real, q_imaginary)
            if not GRADIENT:
                next_real += entry * value[None, :]
            if last is not None or (GRADIENT and starts is not None):
                next_real = tl.where(t < count, next_real, real)
                next_imaginary = tl.where(t < count, next_imaginary, imaginary)
            real, imaginary = next_real, next_imaginary
            if not GRADIENT:
                result = tl.sum(out_real * real - out_imaginary * imaginary, 0)
            if skip is not None:
                result += skip_weight * value
            if GRADIENT and mask is not None:
                result = tl.where(keeps[i], result, 0.0)
            tl.store(output + (token + t) * channels + d, result.to(output.dtype.element_ty), t < end)
    if last is not None:
        if (number == 0) if GRADIENT else (begin + chunk >= size):
            tl.store(last + 2 * sequence * states + rows, real, tile)
            tl.store(last + (2 * sequence + 1) * states + rows, imaginary, tile)
    if GRADIENT:
        tl.store(sums + slot * states + rows, total, tile)


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _gradient_kernel(
    gradient, x, mask,  # [B, T, D], [B, T, D], [B, T]
    factors,  # [8, N, D], see `triton_coefficients`
    weight_in, weight_out,  # [N, D], [2, N, D]
    starts,  # [slots, 2 or 4 with CARRIED, N, D]
    last_gradient,  # [S, 2, N, D]
    sums,  # [slots, 4, N, D]
    skip_sums,  # [slots, D]
    cu_seqlens, length, chunk, chunks, channels, blocks, width, slots,  # see `Plan`
    stride_b, stride_t, stride_d, x_stride_b, x_stride_t, x_stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Write the sums of gradient times state, and the gradients of q and of the skip, over a chunk.

    The sums are `[slots, 4, N, D]`: real and imaginary parts of complex derivatives.
    """
    block, sequence, row, first, size, number, slot, begin, count = place(cu_seqlens, length, chunk, chunks, blocks)
    if (count <= 0) & (number > 0):
        return
    n, d, inside, tile = state_tile(block, channels, N, BLOCK_N, BLOCK_D)
    rows, states, end = n * channels + d[None, :], channels * N, tl.where(inside, count, 0)
    q_real, q_imaginary, lost_real, lost_imaginary = _rate(factors, rows, states, tile, UNROLL)
    entry = tl.load(weight_in + rows, tile, other=0.0)
    zeros = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    real, imaginary, slope_real, slope_imaginary = zeros, zeros, zeros, zeros
    if starts is not None:
        real, imaginary = load_pair(starts + (4 if CARRIED else 2) * slot * states, rows, states, tile)
        if CARRIED:
            slope_real, slope_imaginary = load_pair(starts + (4 * slot + 2) * states, rows, states, tile)
    sum_real, sum_imaginary, by_real, by_imaginary = zeros, zeros, zeros, zeros
    skip_sum = tl.zeros([BLOCK_D], tl.float32)
    values = gradient + row * stride_b + (first + begin) * stride_t + d * stride_d
    inputs = x + row * x_stride_b + (first + begin) * x_stride_t + d * x_stride_d
    token = row * length + first + begin
    for start in range(0, count, UNROLL):
        entering, received = (), ()
        for i in tl.static_range(UNROLL):
            t = start + i
            value = tl.load(inputs + t * x_stride_t, t < end, other=0.0).to(tl.float32)
            if mask is not None:
                value = tl.where(tl.load(mask + token + t, t < count, other=0), value, 0.0)
            entering += (value,)
            received += (tl.load(values + t * stride_t, t < end, other=0.0).to(tl.float32),)
        gain_real, gain_imaginary = times(real, imaginary, lost_real, lost_imaginary)
        real, imaginary = real + gain_real, imaginary + gain_imaginary
        gain_real, gain_imaginary = times(slope_real, slope_imaginary, lost_real, lost_imaginary)
        slope_real, slope_imaginary = slope_real + gain_real, slope_imaginary + gain_imaginary
        for i in tl.static_range(UNROLL):
            next_slope_real, next_slope_imaginary = times(slope_real, slope_imaginary, q_real, q_imaginary)
            next_slope_real += real
            next_slope_imaginary += imaginary
            next_real, next_imaginary = times(real, imaginary, q_real, q_imaginary)
            next_real += entry * entering[i][None, :]
            if last_gradient is not None:
                used = start + i < count
                next_slope_real = tl.where(used, next_slope_real, slope_real)
                next_slope_imaginary = tl.where(used, next_slope_imaginary, slope_imaginary)
                next_real, next_imaginary = tl.where(used, next_real, real), tl.where(used, next_imaginary, imaginary)
            real, imaginary = next_real, next_imaginary
            slope_real, slope_imaginary = next_slope_real, next_slope_imaginary
            gained = received[i][None, :]
            sum_real += gained * real
            sum_imaginary += gained * imaginary
            by_real += gained * slope_real
            by_imaginary += gained * slope_imaginary
            skip_sum += received[i] * entering[i]
    out_real, out_imaginary = load_pair(weight_out, rows, states, tile)
    by_real, by_imaginary = times(by_real, by_imaginary, out_real, out_imaginary)
    if last_gradient is not None:
        if begin + chunk >= size:
            of_last_real, of_last_imaginary = load_pair(last_gradient + 2 * sequence * states, rows, states, tile)
            more_real, more_imaginary = times(slope_real, slope_imaginary, of_last_real, of_last_imaginary)
            by_real += more_real
            by_imaginary += more_imaginary
    kept = sums + 4 * slot * states + rows
    tl.store(kept, sum_real, tile)
    tl.store(kept + states, sum_imaginary, tile)
    tl.store(kept + 2 * states, by_real, tile)
    tl.store(kept + 3 * states, by_imaginary, tile)
    tl.store(skip_sums + slot * channels + d, skip_sum, inside)


def planes(states: Tensor) -> Tensor:
    """Convert pairs `[..., D, N, 2]` to `[..., 2, N, D]`, or back."""
    return states.transpose(-1, -3).contiguous()


def _fitting(plan: Plan) -> Plan:
    """Return the plan with 8 complex states per thread."""
    return plan._replace(block=max(1, min(32, 256 // next_power_of_2(plan.states))))


def _states_before(
    plan: Plan, signal: Tensor, mask: Tensor | None, factors: Tensor, weights: tuple[Tensor, Tensor],
    starts: Tensor | None, *, slope: bool = False, gradient: bool = False,
) -> Tensor | None:  # fmt: skip
    """Return the states before every chunk, `[slots, 2, N, D]`, or with their slopes, `[slots, 4, N, D]`."""
    if plan.chunks == 1:
        return starts
    ends = factors.new_empty(plan.slots, 4 if slope else 2, plan.states, plan.channels)
    options = {"SLOPE": slope, "GRADIENT": gradient}
    inputs = (signal, mask, factors, *weights, starts, ends, *plan.sizes, *signal.stride())
    plan.launch(_chunk_state_kernel, *inputs, **options)
    plan.pass_states(_state_passing_kernel, ends, factors, starts, **options)
    return ends


def _scan(
    plan: Plan, signal: Tensor, mask: Tensor | None, factors: Tensor, weights: tuple[Tensor, Tensor],
    skip: Tensor | None, starts: Tensor | None, output: Tensor, last: Tensor | None, x: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:  # fmt: skip
    plan.launch(
        _scan_kernel,
        *(signal, mask, factors, *weights, skip, starts, x, output, last, sums, *plan.sizes),
        *(*signal.stride(), *((0, 0, 0) if x is None else x.stride())),
        GRADIENT=x is not None,
    )


def forward(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, input_logit: Tensor, damping_logit: Tensor,
    phase_logit: Tensor, projection: Tensor, initial: Tensor | None, return_state: bool, cu_seqlens: Tensor | None,
    max_seqlen: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result and the final states `[S, D, N, 2]`, empty unless requested."""
    parameters = input_logit, damping_logit, phase_logit, projection
    initial = None if initial is None else planes(initial.float())

    def run(plan: Plan) -> Any:
        plan = _fitting(plan)
        factors, weights = complex_factors(plan.chunk, *parameters)
        last = factors.new_empty(plan.sequences, 2, plan.states, plan.channels) if return_state else None
        starts, output = _states_before(plan, x, mask, factors, weights, initial), x.new_empty(x.shape)
        _scan(plan, x, mask, factors, weights, skip, starts, output, last)
        return output, factors.new_empty(0) if last is None else planes(last)

    return choose(_scan_kernel, run, x, input_logit.shape[::-1], False, cu_seqlens, max_seqlen)


def backward(
    gradient: Tensor, last_gradient: Tensor | None, x: Tensor, mask: Tensor | None, skip: Tensor | None,
    input_logit: Tensor, damping_logit: Tensor, phase_logit: Tensor, projection: Tensor, initial: Tensor | None,
    return_state: bool, cu_seqlens: Tensor | None, max_seqlen: int,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x, skip, the four parameters and the initial states, None for None."""
    parameters = input_logit, damping_logit, phase_logit, projection
    first = None if initial is None else planes(initial.float())
    # dL = Re(r dh): r is the conjugate of the pair of derivatives.
    arriving = planes(conjugate(last_gradient)) if return_state and last_gradient is not None else None

    def run(plan: Plan) -> Any:
        plan = _fitting(plan)
        factors, weights = complex_factors(plan.chunk, *parameters)
        starts = _states_before(plan, x, mask, factors, weights, first, slope=True)
        # Varlen sequences leave slots unused.
        sums = factors.new_zeros(plan.slots, 4, plan.states, plan.channels)
        skip_sums = factors.new_zeros(plan.slots, plan.channels)
        plan.launch(
            _gradient_kernel,
            *(gradient, x, mask, factors, *weights, starts, arriving, sums, skip_sums, *plan.sizes),
            *(*gradient.stride(), *x.stride()),
            UNROLL=plan.unroll // 2,  # four pairs of tiles leave fewer registers for inputs than one
            CARRIED=plan.chunks > 1,
        )
        starts = _states_before(plan, gradient, None, factors, weights, arriving, gradient=True)
        before = None
        if initial is not None:
            before = factors.new_empty(plan.sequences, 2, plan.states, plan.channels)
        grad_x, input_sums = x.new_empty(x.shape), factors.new_zeros(plan.slots, plan.states, plan.channels)
        _scan(plan, gradient, mask, factors, weights, skip, starts, grad_x, before, x, input_sums)
        grads = complex_backward(sums.sum(0), input_sums.sum(0), *parameters)
        return grad_x, None if skip is None else skip_sums.sum(0), *grads, before

    made = choose(_gradient_kernel, run, x, input_logit.shape[::-1], False, cu_seqlens, max_seqlen)
    grad_x, grad_skip, *grads, before = made
    grad_skip = None if skip is None else grad_skip.to(skip.dtype)
    return [grad_x, grad_skip, *grads, None if initial is None else conjugate(planes(before)).to(initial.dtype)]
