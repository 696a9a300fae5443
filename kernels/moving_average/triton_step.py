"""One position of both averages in Triton. Tiles are `[BLOCK_D, BLOCK_N]`: channels by states."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from luna_mega.kernels.common import triton_launch
from luna_mega.kernels.common.triton_launch import cdiv, next_power_of_2


@triton.jit
def times(a_real, a_imaginary, b_real, b_imaginary):
    return a_real * b_real - a_imaginary * b_imaginary, a_real * b_imaginary + a_imaginary * b_real


@triton.jit
def load_pair(pointer, rows, states, tile):
    """Return real and imaginary parts."""
    return tl.load(pointer + rows, tile, other=0.0), tl.load(pointer + states + rows, tile, other=0.0)


@triton.jit
def _damped_step_kernel(
    x, state,  # [B, D], [B, D, N]
    input_logit, damping_logit, expansion, projection,  # [D, N]
    skip, mask,  # [D], [B]
    output, next_state,  # [B, D], [B, D, N]
    channels, blocks, stride_b, stride_d, scale,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Process one position of the causal average, given the logits.

    The program index is `(block of channels, batch row)`.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    n, d = tl.arange(0, BLOCK_N)[None, :], program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < channels
    tile = (n < N) & inside[:, None]
    rows = d[:, None] * N + n
    gate = tl.sigmoid(tl.load(input_logit + rows, tile, other=0.0).to(tl.float32))
    damping = tl.sigmoid(tl.load(damping_logit + rows, tile, other=0.0).to(tl.float32))
    entry = gate * tl.load(expansion + rows, tile, other=0.0).to(tl.float32)
    exit = scale * tl.load(projection + rows, tile, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride_b + d * stride_d, inside, other=0.0).to(tl.float32)
    before = tl.load(state + row * channels * N + rows, tile, other=0.0)
    # q - 1, not q: rounding errors of q would accumulate over many steps.
    after = before - gate * damping * before + entry * value[:, None]
    if mask is not None:
        after = tl.where(tl.load(mask + row), after, before)
    tl.store(next_state + row * channels * N + rows, after, tile)
    average = tl.sum(exit * after, 1)
    if skip is not None:
        average += value * tl.load(skip + d, inside, other=0.0).to(tl.float32)
        average *= tl.sigmoid(average)
    tl.store(output + row * channels + d, average.to(output.dtype.element_ty), inside)


@triton.jit
def _complex_step_kernel(
    x, state,  # [B, D], [B, D, N, 2]
    change, weight_in, weight_out,  # [D, N, 2]
    skip, mask,  # [D], [B]
    output, next_state,  # [B, D], [B, D, N, 2]
    channels, blocks, stride_b, stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Process one position of the complex average.

    All arguments except x and the skip are real pairs `[..., D, N, 2]`. The program index is `(block, row)`.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    n, d = tl.arange(0, BLOCK_N)[None, :], program % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < channels
    tile = (n < N) & inside[:, None]
    rows = 2 * (d[:, None] * N + n)
    before = state + row * channels * N * 2
    real, imaginary = load_pair(before, rows, 1, tile)
    change_real, change_imaginary = load_pair(change, rows, 1, tile)
    value = tl.load(x + row * stride_b + d * stride_d, inside, other=0.0).to(tl.float32)
    if mask is not None:
        value = tl.where(tl.load(mask + row), value, 0.0)
    # q - 1, not q: rounding errors of q would accumulate over many steps.
    gain_real, gain_imaginary = times(real, imaginary, change_real, change_imaginary)
    gain_real += tl.load(weight_in + rows, tile, other=0.0) * value[:, None]
    if mask is not None:  # masked positions do not change the state
        keep = tl.load(mask + row)
        gain_real, gain_imaginary = tl.where(keep, gain_real, 0.0), tl.where(keep, gain_imaginary, 0.0)
    real += gain_real
    imaginary += gain_imaginary
    after = next_state + row * channels * N * 2
    tl.store(after + rows, real, tile)
    tl.store(after + 1 + rows, imaginary, tile)
    out_real, out_imaginary = load_pair(weight_out, rows, 1, tile)
    average = tl.sum(out_real * real + out_imaginary * imaginary, 1)
    if skip is not None:
        average += value * tl.load(skip + d, inside, other=0.0)
    tl.store(output + row * channels + d, average.to(output.dtype.element_ty), inside)


def damped_step(
    x: Tensor, state: Tensor, input_logit: Tensor, damping_logit: Tensor, expansion: Tensor, projection: Tensor,
    skip: Tensor | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (y `[B, D]`, next state); the parameters may have any dtype."""
    parameters, scale = (input_logit, damping_logit, expansion, projection), input_logit.shape[1] ** -0.5
    return _step(_damped_step_kernel, 1024, x, state, *parameters, skip, mask, numbers=(scale,))


def complex_step(
    x: Tensor, state: Tensor, change: Tensor, weight_in: Tensor, weight_out: Tensor, skip: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (y `[B, D]`, next state) from the coefficients of `complex_ema_coefficients`."""
    return _step(_complex_step_kernel, 512, x, state, change, weight_in, weight_out, skip, mask)


def _step(
    kernel: Any, tile: int, x: Tensor, state: Tensor, *inputs: Any, numbers: tuple[float, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Launch a kernel with `tile` states per program."""
    (channels, states), output, next_state = state.shape[1:3], x.new_empty(x.shape), torch.empty_like(state)
    block_n = next_power_of_2(states)
    block = max(16, tile // block_n)
    blocks = cdiv(channels, block)
    triton_launch.launch(
        kernel, (blocks * len(x),),
        x, state, *inputs, output, next_state, channels, blocks, *x.stride(), *numbers,
        N=states, BLOCK_N=block_n, BLOCK_D=block, num_warps=4, num_stages=1,
    )  # fmt: skip
    return output, next_state
