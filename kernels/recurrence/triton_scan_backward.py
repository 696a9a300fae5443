"""Backward pass of the recurrence in Triton: no states are stored.

The gradients of the parameters come from a second scan of x, which computes each state and its derivative with respect
to q, s_t = q s_{t-1} + h_{t-1}. The gradient of x is a scan of the result's gradient backward in time, in which the
input weight p and the output weight w are exchanged: r_t = q r_{t+1} + w dy_t. For complex states, r is a complex
derivative, dL = Re(r dh).
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..common.triton_launch import contiguous, target
from .coefficients import conjugate
from .triton_chunks import load_rate, place, position, state_tile
from .triton_numbers import add, add_scaled, load, real_times, select, store, times, zeros
from .triton_plan import Plan, choose
from .triton_scan import ByDirection, channels_last, coefficient_kernels, coefficients_by_direction, scan, states_before


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _gradient_kernel(
    gradient, x, mask,  # [B, T, D], [B, T, D], [B, T]
    rates, weight_in, weight_out,  # see `ByDirection`
    starts,  # [1 or 2 with CARRIED, slots, P, N, D]
    last_gradient,  # [S, P, N, D]
    sums,  # [slots, 2, P, N, D]
    skip,  # [D]
    other, inner,  # [B, T, D]
    skip_sums,  # [slots, D]
    cu_seqlens, length, chunk, chunks, channels, blocks, channel_rows, slots,  # see `Plan`
    stride_b, stride_t, stride_d, x_stride_b, x_stride_t, x_stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COMPONENTS: tl.constexpr, UNROLL: tl.constexpr,
    REVERSED: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Write the sums over a chunk of gradient times state, and of gradient times slope (d state / d q).

    `gradient` is the gradient of the average or, if `skip` is given, of the result; `skip_sums` receives the gradient
    of the skip. `inner` receives the gradient of a real average with a skip, the argument of silu. SCALED: the second
    sum is the gradient of q.
    """
    block, sequence, batch, first, size, number, slot, begin, count = place(cu_seqlens, length, chunk, chunks, blocks)
    if (count <= 0) & (number > 0):
        return
    n, d, inside, tile = state_tile(block, channels, N, BLOCK_N, BLOCK_D)
    states, end = channels * N, tl.where(inside, count, 0)
    rate_places = n * channel_rows + d[None, :]
    state_places = rate_places if COMPONENTS == 2 else n * channels + d[None, :]  # if equal, one saves registers
    q, lost = load_rate(rates, rate_places, states, tile, UNROLL, COMPONENTS)
    if SCALED or skip is not None:
        entry = load(weight_in, rate_places, states, tile, 1)
        if COMPONENTS == 1:
            exit = load(weight_out, rate_places, states, tile, COMPONENTS)
            if not SCALED:
                exit = times(exit, entry)
    state, slope = zeros([BLOCK_N, BLOCK_D], COMPONENTS), zeros([BLOCK_N, BLOCK_D], COMPONENTS)
    if starts is not None:
        state = load(starts + slot * COMPONENTS * states, state_places, states, tile, COMPONENTS)
        if CARRIED:
            slope = load(starts + (slots + slot) * COMPONENTS * states, state_places, states, tile, COMPONENTS)
    state_sum, slope_sum = zeros([BLOCK_N, BLOCK_D], COMPONENTS), zeros([BLOCK_N, BLOCK_D], COMPONENTS)
    if skip is not None:
        skip_sum = tl.zeros([BLOCK_D], tl.float32)
        if COMPONENTS == 1:
            skip_weight = tl.load(skip + d, inside, other=0.0)
    values = gradient + batch * stride_b + (first + begin) * stride_t + d * stride_d
    inputs = x + batch * x_stride_b + (first + begin) * x_stride_t + d * x_stride_d
    token = batch * length + first + begin
    places = token * channels + d
    for start in range(0, count, UNROLL):
        signals, gradients, keeps, others = (), (), (), ()
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, REVERSED)
            used = t < end
            signals += (tl.load(inputs + t * x_stride_t, used, other=0.0).to(tl.float32),)
            gradients += (tl.load(values + t * stride_t, used, other=0.0).to(tl.float32),)
            if mask is not None:
                keeps += (tl.load(mask + token + t, t < count, other=0),)
            if other is not None:
                others += (tl.load(other + places + t * channels, used, other=0.0),)
        state = add(state, times(state, lost))
        slope = add(slope, times(slope, lost))
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, REVERSED)
            entering, received = signals[i], gradients[i]
            if mask is not None:
                entering = tl.where(keeps[i], entering, 0.0)
            if SHIFT:
                state_sum = add_scaled(state_sum, state, received[None, :])
                slope_sum = add_scaled(slope_sum, slope, received[None, :])
            next_slope = add(times(slope, q), state)
            following = add_scaled(times(state, q), entry if SCALED else None, entering[None, :])
            if last_gradient is not None:
                next_slope = select(t < count, next_slope, slope)
                following = select(t < count, following, state)
            state, slope = following, next_slope
            if COMPONENTS == 1 and skip is not None:
                inside_silu = tl.sum(real_times(exit, state), 0) + skip_weight * signals[i]
                if other is not None:
                    inside_silu += others[i]
                gate = tl.sigmoid(inside_silu)
                factor = gate * (1.0 + inside_silu * (1.0 - gate))
                # A position whose result is not used adds nothing, even if x is NaN there.
                unused = received == 0.0
                received = tl.where(unused, 0.0, received * factor)
                skip_sum += tl.where(unused, 0.0, received * signals[i])
                tl.store(inner + places + t * channels, received, t < end)
            if not SHIFT:
                state_sum = add_scaled(state_sum, state, received[None, :])
                slope_sum = add_scaled(slope_sum, slope, received[None, :])
            if COMPONENTS == 2 and skip is not None:
                skip_sum += received * entering
    if SCALED:
        if COMPONENTS == 2:  # loaded here, because the scan needs all registers
            exit = load(weight_out, rate_places, states, tile, COMPONENTS)
        slope_sum = times(slope_sum, exit)
        if last_gradient is not None:
            if begin + chunk >= size:
                received = load(last_gradient + sequence * COMPONENTS * states, state_places, states, tile, COMPONENTS)
                slope_sum = add(slope_sum, times(slope, received))
    own = sums + 2 * slot * COMPONENTS * states + state_places
    store(own, 0, states, tile, state_sum)
    store(own + COMPONENTS * states, 0, states, tile, slope_sum)
    if skip is not None:
        tl.store(skip_sums + slot * channels + d, skip_sum, inside)


def backward(
    gradient: Tensor, last_gradient: Tensor | None, coefficients: Tensor, x: Tensor, *inputs: Any
) -> list[Tensor | None]:
    """Return the gradients of x, skip, the parameters or coefficients and the initial states, None for None."""
    mask, skip, *parameters, initial, return_state, shift, cu_seqlens, max_seqlen, fused = contiguous(*inputs)
    gradient, x = gradient.resolve_neg(), x.resolve_neg()
    first, arriving = None if initial is None else channels_last(initial), last_gradient if return_state else None
    is_complex = parameters[3].dim() == 3
    if arriving is not None:
        # dL = Re(r dh): r is the conjugate of the pair of derivatives.
        arriving = channels_last(conjugate(arriving) if is_complex else arriving)
    scaled = is_complex or initial is not None or arriving is not None

    def run(plan: Plan) -> list[Tensor | None]:
        by_direction = coefficients_by_direction(plan, coefficients)
        received, sums, grad_skip = _parameter_sums(
            plan, gradient, arriving, x, mask, skip, by_direction, first, scaled
        )
        by_direction = [(rates, weight_out, weight_in) for rates, weight_in, weight_out in by_direction]
        starts = states_before(plan, received, None, by_direction, scaled, arriving, flipped=True)
        options: dict[str, Any] = {"scaled": scaled, "gradient": True}
        other = before = input_sums = None
        if plan.directions == 2:
            other = scan(plan, 1, received, mask, by_direction, starts, sums.new_empty(x.shape), **options)
        if initial is not None:
            before = sums.new_empty(plan.state_shape(plan.sequences))
        if scaled:
            input_sums = sums.new_zeros(plan.slots, plan.states, plan.channels)
            options |= {"x": x, "sums": input_sums}
        options |= {"skip": skip, "other": other, "last": before}
        grad_x = scan(plan, 0, received, mask, by_direction, starts, x.new_empty(x.shape), **options)
        return [grad_x, grad_skip, before, sums, None if input_sums is None else input_sums.sum(0)]

    grad_x, grad_skip, before, *sums = choose(_gradient_kernel, run, x, parameters, shift, cu_seqlens, max_seqlen)
    if before is not None:
        before = channels_last(before)
        before = (conjugate(before) if is_complex else before).to(initial.dtype)
    grad_parameters = coefficient_kernels(fused).backward(*sums, *parameters)
    return [grad_x, None if skip is None else grad_skip.to(skip.dtype), *grad_parameters, before]


def _parameter_sums(
    plan: Plan, gradient: Tensor, last_gradient: Tensor | None, x: Tensor, mask: Tensor | None, skip: Tensor | None,
    by_direction: ByDirection, initial: Tensor | None, scaled: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradient of the average, the sums `[directions, 2, P, N, D]`, and the gradient of the skip."""
    rates = by_direction[0][0]
    starts = states_before(plan, x, mask, by_direction, scaled, initial, slope=True)
    # Varlen sequences leave slots unused.
    sums = rates.new_zeros(plan.state_shape(plan.directions, plan.slots, 2))
    inner = other = skip_sums = None
    if skip is not None:
        skip_sums = rates.new_zeros(plan.slots, plan.channels)
        inner = rates.new_empty(x.shape) if plan.components == 1 else None
        if plan.directions == 2:
            # Recomputed, because storing a float32 tensor of the size of x in the forward pass takes more memory.
            other = scan(plan, 1, x, mask, by_direction, starts, rates.new_empty(x.shape))
    skip_arguments: tuple[Tensor | None, ...] = (skip, other, inner, skip_sums)
    # 200 registers: an A100 runs ten programs per multiprocessor instead of eight, although Triton 3.6 and 3.7 spill.
    few_registers = plan.components == 1 and scaled and target(x.device).capability == (8, 0)
    for direction, direction_sums in enumerate(plan.each_direction(sums)):
        plan.launch(
            _gradient_kernel,
            *(gradient, x, mask, *by_direction[direction]),
            *(starts[direction], last_gradient, direction_sums, *skip_arguments, *plan.sizes),
            *(*gradient.stride(), *x.stride()),
            UNROLL=plan.unroll // 2,  # twice as many tiles of states leave fewer registers for inputs
            REVERSED=direction == 1,
            SHIFT=plan.shift and direction == 1,
            SCALED=scaled,
            CARRIED=plan.chunks > 1,
            registers=200 if few_registers else None,
        )
        gradient, skip_arguments = gradient if inner is None else inner, (None,) * 4
    return gradient, sums.sum(1), None if skip_sums is None else skip_sums.sum(0)
