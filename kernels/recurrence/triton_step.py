"""One position of a real or complex average in Triton. Tiles are `[BLOCK_D, BLOCK_N]`: channels by states."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.triton_launch import cdiv, launch, next_power_of_2
from .triton_numbers import add, add_scaled, load, real_times, select, store, times


@triton.jit
def _step_kernel(
    x, state,  # [B, D], [B, D, N] or [B, D, N, 2]
    rates, damping_logit, weight_in, weight_out,  # [D, N] or [D, N, 2]
    skip, mask,  # [D], [B]
    output, next_state,  # as x and the state
    channels, blocks, stride_b, stride_d, scale,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COMPONENTS: tl.constexpr,
):  # fmt: skip
    """Process one position of a causal average.

    `rates`, `weight_in` and `weight_out` are the input logit, expansion and projection of a real average, or
    `complex_ema_coefficients`; `damping_logit` is then None. The program index is `(block of channels, sequence)`.
    """
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    n, d = tl.arange(0, BLOCK_N)[None, :], program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < channels
    tile = (n < N) & inside[:, None]
    places = COMPONENTS * (d[:, None] * N + n)
    own = batch * channels * N * COMPONENTS
    entry = tl.load(weight_in + places, tile, other=0.0).to(tl.float32)
    change, exit = load(rates, places, 1, tile, COMPONENTS), load(weight_out, places, 1, tile, COMPONENTS)
    if COMPONENTS == 1:
        gate = tl.sigmoid(change[0])
        damping = tl.sigmoid(tl.load(damping_logit + places, tile, other=0.0).to(tl.float32))
        change, entry, exit = (-gate * damping,), gate * entry, (scale * exit[0],)
    else:
        exit = exit[0], -exit[1]  # `weight_out` is conjugated
    value = tl.load(x + batch * stride_b + d * stride_d, inside, other=0.0).to(tl.float32)
    if COMPONENTS == 2 and mask is not None:
        value = tl.where(tl.load(mask + batch), value, 0.0)
    before = load(state + own, places, 1, tile, COMPONENTS)
    # q - 1, not q: rounding errors of q would accumulate over many steps.
    after = add(before, add_scaled(times(before, change), (entry,), value[:, None]))
    if mask is not None:  # masked positions do not change the state
        after = select(tl.load(mask + batch), after, before)
    store(next_state + own, places, 1, tile, after)
    average = tl.sum(real_times(exit, after), 1)
    if skip is not None:
        average += value * tl.load(skip + d, inside, other=0.0).to(tl.float32)
        if COMPONENTS == 1:
            average *= tl.sigmoid(average)
    tl.store(output + batch * channels + d, average.to(output.dtype.element_ty), inside)


def step(x: Tensor, state: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (y `[B, D]`, next state); `inputs` are those of the kernel from `rates` to `mask`, of any dtype."""
    (channels, states), components, x = state.shape[1:3], state.dim() - 2, x.resolve_neg()
    output, next_state = x.new_empty(x.shape), torch.empty_like(state)
    block_n = next_power_of_2(states)
    block = max(16, 1024 // components // block_n)
    blocks = cdiv(channels, block)
    launch(
        _step_kernel, (blocks * len(x),),
        x, state, *inputs, output, next_state, channels, blocks, *x.stride(), states**-0.5,
        N=states, BLOCK_N=block_n, BLOCK_D=block, COMPONENTS=components, num_warps=4, num_stages=1,
    )  # fmt: skip
    return output, next_state
