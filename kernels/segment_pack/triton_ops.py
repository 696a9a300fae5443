"""Position-aware pack with Triton kernels, as custom operators."""

from typing import Any

import torch

from luna_mega.kernels.segment_pack import triton_kernels
from luna_mega.kernels.segment_pack.torch_backend import row_index

INPUTS = "Tensor states, Tensor score, Tensor? mask, Tensor starts"


def segment_pack(
    states: torch.Tensor,
    score: torch.Tensor,
    row: torch.Tensor,
    mask: torch.Tensor | None,
    rows: int,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `reference.segment_pack`; with `cu_seqlens` as `torch_backend.segment_pack`."""
    index, batch = row_index(row, rows, cu_seqlens)
    # The tokens of a row follow each other.
    starts = torch.searchsorted(index, torch.arange(batch * rows + 1, device=row.device))
    flat = states.flatten(0, 1), score.flatten().float(), None if mask is None else mask.flatten()
    packed, entropy, _, total = torch.ops.luna_mega.segment_pack_triton(*flat, starts)
    return packed.to(states.dtype).unflatten(0, (batch, rows)), entropy.view(batch, rows), total.view(batch, rows) != 0


@torch.library.custom_op(
    "luna_mega::segment_pack_triton", mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _pack(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return triton_kernels.forward(*inputs)


@_pack.register_fake
def _(states: torch.Tensor, score: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = starts.shape[0] - 1
    sums = (states.new_empty(rows, dtype=torch.float32) for _ in range(3))
    return states.new_empty(rows, states.shape[1], dtype=torch.float32), *sums


@torch.library.custom_op(
    "luna_mega::segment_pack_triton_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad_packed, Tensor grad_entropy, {INPUTS}, Tensor packed, Tensor entropy, Tensor peak, "
        "Tensor total) -> (Tensor, Tensor)"
    ),
)
def _pack_backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return triton_kernels.backward(*inputs)


@_pack_backward.register_fake
def _(grad_packed: torch.Tensor, grad_entropy: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return inputs[0].new_empty(inputs[0].shape), inputs[1].new_empty(inputs[1].shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx: Any, grad_packed: torch.Tensor, grad_entropy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    gradients = torch.ops.luna_mega.segment_pack_triton_backward(grad_packed, grad_entropy, *ctx.saved_tensors)
    return *gradients, None, None


_pack.register_autograd(_backward, setup_context=_save_for_backward)
