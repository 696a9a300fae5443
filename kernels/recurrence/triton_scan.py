"""Forward pass of the recurrence in Triton: a scan in registers, in chunks that run in parallel.

A program processes one chunk of one sequence with the states of BLOCK_D channels in a tile `[BLOCK_N, BLOCK_D]`, or in
two tiles for the real and imaginary parts of complex states.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.triton_launch import cdiv, contiguous, launch
from . import triton_coefficients, triton_diagonal
from .triton_chunks import (
    chunk_state_kernel,
    decayed_positions,
    load_rate,
    place,
    position,
    state_passing_kernel,
    state_tile,
)
from .triton_numbers import add, add_scaled, load, real_times, select, store, times, zeros
from .triton_plan import Plan, choose

# The rates and the weights of the input in the state and of the state in the average, for each direction. Real: log q,
# p beta and eta / sqrt(N), `[N, D]` with rows that are R apart. Complex: the factors `[7, N, D]` of
# `triton_coefficients`, p `[N, D]` and gamma / sqrt(N) `[2, N, D]`.
ByDirection = list[tuple[Tensor, ...]]


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _scan_kernel(
    signal, mask,  # [B, T, D], [B, T]
    rates, weight_in, weight_out,  # see `ByDirection`
    skip,  # [D]
    starts,  # [slots, P, N, D]
    other, x, output,  # [B, T, D]
    last,  # [S, P, N, D]
    sums,  # [slots, N, D]
    cu_seqlens, length, chunk, chunks, channels, blocks, channel_rows, slots,  # see `Plan`
    stride_b, stride_t, stride_d, x_stride_b, x_stride_t, x_stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COMPONENTS: tl.constexpr, UNROLL: tl.constexpr,
    REVERSED: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write one direction of the average of `signal`, plus `other`, with the skip: silu(average + skip signal).

    The skip of a complex average is part of the average, without silu. GRADIENT: `signal` is the gradient of an
    average, the two weights are exchanged, and the result is the gradient of x: masked average + skip signal. `sums`
    receives the sums of the states times x. `last` receives the states after the last position, or the gradient of
    the states before the first position.
    """
    block, sequence, batch, first, size, number, slot, begin, count = place(cu_seqlens, length, chunk, chunks, blocks)
    if (count <= 0) & (number > 0):
        return
    n, d, inside, tile = state_tile(block, channels, N, BLOCK_N, BLOCK_D)
    states, end = channels * N, tl.where(inside, count, 0)
    rate_places = n * channel_rows + d[None, :]
    state_places = rate_places if COMPONENTS == 2 else n * channels + d[None, :]  # if equal, one saves registers
    q, lost = load_rate(rates, rate_places, states, tile, UNROLL, COMPONENTS)
    entry = load(weight_in, rate_places, states, tile, COMPONENTS if GRADIENT else 1)
    exit = load(weight_out, rate_places, states, tile, 1 if GRADIENT else COMPONENTS)
    if not SCALED:
        exit = times(exit, entry)
    state = zeros([BLOCK_N, BLOCK_D], COMPONENTS)
    if starts is not None:
        state = load(starts + slot * COMPONENTS * states, state_places, states, tile, COMPONENTS)
        decayed = decayed_positions(count, begin + chunk >= size)
    if skip is not None:
        skip_weight = tl.load(skip + d, inside, other=0.0)
    if sums is not None:
        total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        inputs = x + batch * x_stride_b + (first + begin) * x_stride_t + d * x_stride_d
    values = signal + batch * stride_b + (first + begin) * stride_t + d * stride_d
    token = batch * length + first + begin
    places = token * channels + d
    for start in range(0, count, UNROLL):
        signals, keeps, others, multiplied = (), (), (), ()
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, REVERSED)
            used = t < end
            signals += (tl.load(values + t * stride_t, used, other=0.0).to(tl.float32),)
            keep = t < count
            if mask is not None:
                keep = tl.load(mask + token + t, keep, other=0)
            keeps += (keep,)
            if other is not None:
                others += (tl.load(other + places + t * channels, used, other=0.0),)
            if sums is not None:
                value = tl.load(inputs + t * x_stride_t, used, other=0.0).to(tl.float32)
                multiplied += (tl.where(keep, value, 0.0),)
        state = add(state, times(state, lost))
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, REVERSED)
            entering = signals[i]
            if mask is not None and not GRADIENT:
                entering = tl.where(keeps[i], entering, 0.0)
            if SHIFT:
                average = tl.sum(real_times(exit, state), 0)
            following = times(state, q)
            if SCALED and REVERSED and starts is not None:
                following = select(t < decayed, following, state)
            following = add_scaled(following, entry if SCALED else None, entering[None, :])
            if last is not None and not REVERSED:
                following = select(t < count, following, state)
            state = following
            if not SHIFT:
                average = tl.sum(real_times(exit, state), 0)
            if sums is not None:
                total += state[0] * multiplied[i][None, :]
            if other is not None:
                average += others[i]
            if COMPONENTS == 2 and skip is not None:
                average += skip_weight * entering
            if GRADIENT and mask is not None:
                average = tl.where(keeps[i], average, 0.0)
            if COMPONENTS == 1 and skip is not None:
                average += skip_weight * signals[i]
                if not GRADIENT:
                    average *= tl.sigmoid(average)
            tl.store(output + places + t * channels, average.to(output.dtype.element_ty), t < end)
    if last is not None:
        if GRADIENT:
            state = select(count > 0, times(state, q), state)
        elif not SCALED:
            state = times(state, entry)
        if (REVERSED and number == 0) or (not REVERSED and begin + chunk >= size):
            store(last + sequence * COMPONENTS * states, state_places, states, tile, state)
    if sums is not None:
        tl.store(sums + slot * states + state_places, total, tile)


def coefficients_by_direction(plan: Plan, coefficients: Tensor) -> ByDirection:
    """Return the coefficients of each direction; `coefficients` is the result of `damped` or `complex_factors`."""
    if plan.components == 2:
        return [(coefficients[:7], coefficients[7], coefficients[8:])]
    halves = [coefficients] if plan.directions == 1 else coefficients.split(plan.channels, 2)
    return [half.unbind() for half in halves]


def channels_last(states: Tensor) -> Tensor:
    """Convert states `[S, D, N]` or `[S, D, N, 2]` to float32 `[S, P, N, D]`: a program reads adjacent channels."""
    return states.float().transpose(1, -1).contiguous()


def states_before(
    plan: Plan, signal: Tensor, mask: Tensor | None, coefficients: ByDirection, scaled: bool, initial: Tensor | None,
    *, flipped: bool = False, slope: bool = False,
) -> Sequence[Tensor | None]:  # fmt: skip
    """Return the states of each direction before every chunk, `[slots, P, N, D]`; with slopes `[2, slots, P, N, D]`.

    `scaled`: the signal is multiplied by the weight of the input. With one chunk per sequence the states are `initial`.
    """
    rates, weight, _ = coefficients[0]  # the kernels add the offset of direction 1
    if plan.chunks == 1:
        return [initial] * plan.directions
    ends = rates.new_empty(plan.state_shape(plan.directions, *(2,) * slope, plan.slots))
    options = {"COMPONENTS": plan.components, "FLIPPED": flipped, "SLOPE": slope}
    # `state_passing_kernel` starts from real initial states, but decays complex states only over complete chunks.
    starts = None if plan.components == 1 else initial
    inputs = (signal, mask, rates, weight if scaled else None, starts, ends, *plan.sizes, *signal.stride())
    plan.launch(chunk_state_kernel, *inputs, directions=plan.directions, **options)
    blocks = cdiv(plan.states * plan.channels, 128)
    launch(
        state_passing_kernel, (blocks * plan.sequences, plan.directions), ends, rates, initial, blocks, *plan.sizes,
        N=plan.states, BLOCK=128, AHEAD=8 // plan.components, num_warps=4, num_stages=1, **options,
    )  # fmt: skip
    return plan.each_direction(ends)


def scan(
    plan: Plan, direction: int, signal: Tensor, mask: Tensor | None, coefficients: ByDirection,
    starts: Sequence[Tensor | None], output: Tensor, *, scaled: bool = False, skip: Tensor | None = None,
    other: Tensor | None = None, last: Tensor | None = None, x: Tensor | None = None, sums: Tensor | None = None,
    gradient: bool = False,
) -> Tensor:  # fmt: skip
    """Write one direction of the average of `signal` into `output`, as `_scan_kernel` does, and return it."""
    plan.launch(
        _scan_kernel,
        *(signal, mask, *coefficients[direction], skip),
        *(starts[direction], other, x, output, last, sums, *plan.sizes),
        *(*signal.stride(), *((0, 0, 0) if x is None else x.stride())),
        REVERSED=(direction == 1) != gradient,
        SHIFT=plan.shift and direction == 1,
        SCALED=scaled,
        GRADIENT=gradient,
    )
    return output


def coefficient_kernels(fused: bool) -> Any:
    """Return the module that computes the coefficients of the kernels, and the gradients of the parameters."""
    return triton_coefficients if fused else triton_diagonal


def forward(x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the final states (empty unless requested), and the coefficients of the kernels."""
    mask, skip, *parameters, initial, return_state, shift, cu_seqlens, max_seqlen, fused = contiguous(*inputs)
    x, kernel_set = x.resolve_neg(), coefficient_kernels(fused)
    initial, is_complex = None if initial is None else channels_last(initial), parameters[3].dim() == 3
    coefficients = (kernel_set.complex_factors if is_complex else kernel_set.damped)(*parameters)
    scaled = is_complex or initial is not None

    def run(plan: Plan) -> tuple[Tensor, Tensor | None]:
        by_direction = coefficients_by_direction(plan, coefficients)
        last = by_direction[0][0].new_empty(plan.state_shape(plan.sequences)) if return_state else None
        starts, other = states_before(plan, x, mask, by_direction, scaled, initial), None
        if plan.directions == 2:
            # Direction 1 stays in float32 until direction 0 is added.
            other = scan(plan, 1, x, mask, by_direction, starts, by_direction[0][0].new_empty(x.shape))
        output = x.new_empty(x.shape)
        scan(plan, 0, x, mask, by_direction, starts, output, scaled=scaled, skip=skip, other=other, last=last)
        return output, last

    output, last = choose(_scan_kernel, run, x, parameters, shift, cu_seqlens, max_seqlen)
    last = output.new_empty(0, dtype=torch.float32) if last is None else channels_last(last)
    return output, last, coefficients
