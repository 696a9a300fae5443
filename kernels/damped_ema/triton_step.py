"""One position of the causal damped EMA in Triton."""

import torch
import triton
import triton.language as tl

from luna_mega.kernels._triton import launch


@triton.jit
def _step_kernel(
    x, state, input_logit, damping_logit, expansion, projection, skip, mask, output, next_state, channels, blocks,
    stride_b, stride_d, scale,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One position of the causal average, from the logits on. Program `(block of channels, row of the batch)`."""
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
    entering = value
    if mask is not None:
        entering = tl.where(tl.load(mask + row), value, 0.0)
    before = tl.load(state + row * channels * N + rows, tile, other=0.0)
    # q - 1, not q: thousands of steps add up the rounding error of q.
    after = before - gate * damping * before + entry * entering[:, None]
    tl.store(next_state + row * channels * N + rows, after, tile)
    average = tl.sum(exit * after, 1)
    if skip is not None:
        average += value * tl.load(skip + d, inside, other=0.0).to(tl.float32)
        average *= tl.sigmoid(average)
    tl.store(output + row * channels + d, average.to(output.dtype.element_ty), inside)


def step_forward(x, state, input_logit, damping_logit, expansion, projection, skip, mask):
    """(y `[B, D]`, next state); the parameters in any dtype."""
    channels, states = input_logit.shape
    output, next_state = x.new_empty(x.shape), torch.empty_like(state)
    block_n = triton.next_power_of_2(states)
    block = max(16, 1024 // block_n)
    blocks = triton.cdiv(channels, block)
    launch(
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


@torch.library.custom_op("luna_mega::damped_ema_step_triton", mutates_args=())
def _step(
    x: torch.Tensor,
    state: torch.Tensor,
    input_logit: torch.Tensor,
    damping_logit: torch.Tensor,
    expansion: torch.Tensor,
    projection: torch.Tensor,
    skip: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = (state, input_logit, damping_logit, expansion, projection, skip, mask)
    return step_forward(x, *(None if tensor is None else tensor.contiguous() for tensor in tensors))


@_step.register_fake
def _(x, state, input_logit, damping_logit, expansion, projection, skip, mask):
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _save_for_step_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])


def _step_backward(ctx, gradient, next_gradient):
    x, state, *parameters, skip, mask, after = ctx.saved_tensors
    input_logit, damping_logit, expansion, projection = (parameter.float() for parameter in parameters)
    value, gradient, scale = x.float(), gradient.float(), projection.shape[1] ** -0.5
    gate, damping = torch.sigmoid(input_logit), torch.sigmoid(damping_logit)
    kept = value if mask is None else value.masked_fill(~mask[:, None], 0.0)
    grad_skip = None
    if skip is not None:
        average = torch.addcmul((scale * projection * after).sum(-1), skip.float(), value)
        gradient = torch.ops.aten.silu_backward(gradient, average)
        grad_skip = (gradient * value).sum(0).to(skip.dtype)
    received = next_gradient + gradient[..., None] * (scale * projection)
    through = (received * gate * expansion).sum(-1)
    grad_x = through if mask is None else through.masked_fill(~mask[:, None], 0.0)
    if skip is not None:
        grad_x = grad_x + gradient * skip.float()
    grad_entry = (received * kept[..., None]).sum(0)
    grad_loss = -(received * state).sum(0)  # of gate damping = 1 - q
    grads = (
        (grad_entry * expansion + grad_loss * damping) * gate * (1 - gate),
        grad_loss * gate * damping * (1 - damping),
        grad_entry * gate,
        scale * (gradient[..., None] * after).sum(0),
    )
    grads = (grad.to(parameter.dtype) for grad, parameter in zip(grads, parameters, strict=True))
    return grad_x.to(x.dtype), received - received * gate * damping, *grads, grad_skip, None


_step.register_autograd(_step_backward, setup_context=_save_for_step_backward)


def step(x, state, parameters, skip, mask):
    """`reference.step`, from the parameters themselves: computing the coefficients would take longer than the step."""
    return torch.ops.luna_mega.damped_ema_step_triton(x, state, *parameters, skip, mask)
