"""One position of the causal damped EMA in Triton."""

import torch
import triton
import triton.language as tl

from luna_mega.kernels.common import triton_launch


@triton.jit
def _step_kernel(
    x, state, input_logit, damping_logit, expansion, projection, skip, mask, output, next_state, channels, blocks,
    stride_b, stride_d, scale,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Process one position of the causal average, from the logits. Program `(block of channels, batch row)`."""
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


def forward_step(x, state, input_logit, damping_logit, expansion, projection, skip, mask):
    """Return (y `[B, D]`, next state); the parameters may have any dtype."""
    channels, states = input_logit.shape
    output, next_state = x.new_empty(x.shape), torch.empty_like(state)
    block_n = triton.next_power_of_2(states)
    block = max(16, 1024 // block_n)
    blocks = triton.cdiv(channels, block)
    triton_launch.launch(
        _step_kernel,
        (blocks * len(x),),
        *(x, state, input_logit, damping_logit, expansion, projection, skip, mask, output, next_state),
        *(channels, blocks, *x.stride(), states**-0.5),
        N=states,
        BLOCK_N=block_n,
        BLOCK_D=block,
        num_warps=4,
        num_stages=1,
    )
    return output, next_state
