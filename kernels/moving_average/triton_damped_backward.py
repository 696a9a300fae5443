"""Backward pass of the damped EMA in Triton: no states are stored.

The gradients of the parameters come from a second scan of x, which computes each state and its derivative with respect
to q, s_t = q s_{t-1} + h_{t-1}. The gradient of x is a scan of the result's gradient backward in time, in which the
input and output weights are exchanged.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from luna_mega.kernels.moving_average.triton_damped_forward import (
    LOWEST_LOG_Q,
    Plan,
    Rows,
    choose,
    decay,
    of_directions,
    place,
    position,
    scan,
    state_tile,
    states_before,
)


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _gradient_kernel(
    gradient, x, mask,  # [B, T, D], [B, T, D], [B, T]
    log_q, weight_in, weight_out,  # [N, D], rows are `width` apart
    starts,  # [1 or 2 with CARRIED, slots, N, D]
    last_gradient,  # [S, N, D]
    sums,  # [slots, 2, N, D]
    skip,  # [D]
    other, inner,  # [B, T, D]
    skip_sums,  # [slots, D]
    cu_seqlens, length, chunk, chunks, channels, blocks, width, slots,  # see `Plan`
    stride_b, stride_t, stride_d, x_stride_b, x_stride_t, x_stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    REVERSED: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """Write the sums over a chunk of gradient times state, and of gradient times slope (d state / d q).

    `gradient` is the gradient of the average or, if `skip` is given, of the result. In the latter case, `inner`
    receives the gradient of the average, and `skip_sums` the gradient of the skip. SCALED: the second sum is the
    gradient of q.
    """
    block, sequence, row, first, size, number, slot, begin, count = place(cu_seqlens, length, chunk, chunks, blocks)
    if (count <= 0) & (number > 0):
        return
    n, d, inside, tile = state_tile(block, channels, N, BLOCK_N, BLOCK_D)
    end = tl.where(inside, count, 0)
    rows, kept = n * width + d[None, :], n * channels + d[None, :]
    states = channels * N
    q, correction = decay(tl.load(log_q + rows, tile, other=LOWEST_LOG_Q), UNROLL)
    if SCALED or skip is not None:
        entry = tl.load(weight_in + rows, tile, other=0.0)
        exit = tl.load(weight_out + rows, tile, other=0.0)
        if not SCALED:
            exit *= entry
    state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    slope = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if starts is not None:
        state = tl.load(starts + slot * states + kept, tile, other=0.0)
        if CARRIED:
            slope = tl.load(starts + (slots + slot) * states + kept, tile, other=0.0)
    state_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    slope_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if skip is not None:
        skip_weight = tl.load(skip + d, inside, other=0.0)
        skip_sum = tl.zeros([BLOCK_D], tl.float32)
    values = gradient + row * stride_b + (first + begin) * stride_t + d * stride_d
    inputs = x + row * x_stride_b + (first + begin) * x_stride_t + d * x_stride_d
    token = row * length + first + begin
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
        state += state * correction
        slope += slope * correction
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, REVERSED)
            entering, received = signals[i], gradients[i]
            if mask is not None:
                entering = tl.where(keeps[i], entering, 0.0)
            if SHIFT:
                state_sum += received[None, :] * state
                slope_sum += received[None, :] * slope
            next_slope = slope * q + state
            if SCALED:
                following = state * q + entry * entering[None, :]
            else:
                following = state * q + entering[None, :]
            if SCALED:
                next_slope = tl.where(t < count, next_slope, slope)
                following = tl.where(t < count, following, state)
            state, slope = following, next_slope
            if skip is not None:
                inside_silu = tl.sum(exit * state, 0) + skip_weight * signals[i]
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
                state_sum += received[None, :] * state
                slope_sum += received[None, :] * slope
    if SCALED:
        slope_sum *= exit
        if last_gradient is not None:
            if begin + chunk >= size:
                slope_sum += slope * tl.load(last_gradient + sequence * states + kept, tile, other=0.0)
    tl.store(sums + 2 * slot * states + kept, state_sum, tile)
    tl.store(sums + (2 * slot + 1) * states + kept, slope_sum, tile)
    if skip is not None:
        tl.store(skip_sums + slot * channels + d, skip_sum, inside)


def backward(
    gradient: Tensor, last_gradient: Tensor | None, x: Tensor, mask: Tensor | None, skip: Tensor | None,
    coefficients: Tensor, initial_state: Tensor | None, return_state: bool, shift: bool, cu_seqlens: Tensor | None,
    max_seqlen: int,
) -> Any:  # fmt: skip
    """Return the gradients of x, skip and the initial states, None for None, and the sums of `damped_backward`."""
    rows = of_directions(coefficients, x.shape[2])
    if not return_state:
        last_gradient = None

    def run(plan: Plan) -> list[Tensor | None]:
        return _backward(plan, gradient, last_gradient, x, mask, skip, rows, initial_state)

    return choose(_gradient_kernel, run, x, coefficients.shape[1:], shift, cu_seqlens, max_seqlen)


def _backward(
    plan: Plan, gradient: Tensor, last_gradient: Tensor | None, x: Tensor, mask: Tensor | None, skip: Tensor | None,
    rows: Rows, initial_state: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    scaled, log_q = initial_state is not None or last_gradient is not None, rows[0][0]
    gradient, sums, grad_skip = _parameter_sums(
        plan, gradient, last_gradient, x, mask, skip, rows, initial_state, scaled
    )
    after = None
    if last_gradient is not None:
        # At its first position, a scan has decayed its initial states once already.
        after = last_gradient * torch.exp(-log_q.clamp(min=LOWEST_LOG_Q.value))
    rows = [(rates, weight_out, weight_in) for rates, weight_in, weight_out in rows]
    starts = states_before(plan, gradient, None, rows, scaled, after, flipped=True)
    options: dict[str, Any] = {"scaled": scaled, "gradient": True}
    other = None
    if plan.directions == 2:
        other = scan(plan, 1, gradient, mask, rows, starts, log_q.new_empty(x.shape), **options)
    options |= {"skip": skip, "other": other}
    if scaled:
        first = log_q.new_empty(plan.sequences, plan.states, plan.channels)
        input_sums = log_q.new_zeros(plan.slots, plan.states, plan.channels)
        options |= {"last": first, "x": x, "sums": input_sums}
    grad_x = scan(plan, 0, gradient, mask, rows, starts, x.new_empty(x.shape), **options)
    grad_initial = None if initial_state is None else first * log_q.exp()
    return [grad_x, grad_skip, grad_initial, sums, input_sums.sum(0) if scaled else None]


def _parameter_sums(
    plan: Plan, gradient: Tensor, last_gradient: Tensor | None, x: Tensor, mask: Tensor | None, skip: Tensor | None,
    rows: Rows, initial_state: Tensor | None, scaled: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradient of the average, the sums `[directions, 2, N, D]`, and the gradient of the skip."""
    log_q = rows[0][0]
    starts = states_before(plan, x, mask, rows, scaled, initial_state, slope=True)
    # Varlen sequences leave slots unused.
    sums = log_q.new_zeros(plan.directions, plan.slots, 2, plan.states, plan.channels)
    received, other, skip_sums = gradient, None, log_q.new_zeros(plan.slots if skip is not None else 0, plan.channels)
    if skip is not None:
        gradient = log_q.new_empty(x.shape)
        if plan.directions == 2:
            # The forward pass does not store it: it is as large as x in float32, and fast to recompute.
            other = scan(plan, 1, x, mask, rows, starts, log_q.new_empty(x.shape))
    finish = (None,) * 4 if skip is None else (skip, other, gradient, skip_sums)
    for direction, of_direction in enumerate(sums.unbind()):
        plan.launch(
            _gradient_kernel,
            *(received, x, mask, *rows[direction]),
            *(starts[direction], last_gradient, of_direction, *finish, *plan.sizes),
            *(*received.stride(), *x.stride()),
            UNROLL=plan.unroll // 2,  # four tiles of states leave fewer registers for inputs than two
            REVERSED=direction == 1,
            SHIFT=plan.shift and direction == 1,
            SCALED=scaled,
            CARRIED=plan.chunks > 1,
        )
        received, finish = gradient, (None,) * 4
    return gradient, sums.sum(1), None if skip is None else skip_sums.sum(0)
