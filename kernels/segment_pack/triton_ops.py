"""Position-aware pack with Triton kernels, as custom operators."""

import torch

from luna_mega.kernels._operator import Values, register
from luna_mega.kernels.segment_pack import triton_kernels
from luna_mega.kernels.segment_pack.torch_backend import row_index


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


def _fake(states: torch.Tensor, score: torch.Tensor, mask: torch.Tensor | None, starts: torch.Tensor) -> Values:
    rows = starts.shape[0] - 1
    sums = (states.new_empty(rows, dtype=torch.float32) for _ in range(3))
    return states.new_empty(rows, states.shape[1], dtype=torch.float32), *sums


register(
    "luna_mega::segment_pack_triton",
    "Tensor states, Tensor score, Tensor? mask, Tensor starts",
    "(Tensor, Tensor, Tensor, Tensor)",
    triton_kernels.forward,
    _fake,
    triton_kernels.backward,
    differentiable=("states", "score"),
    gradients=(0, 1),
    saved="Tensor packed, Tensor entropy, Tensor peak, Tensor total",
    save=lambda inputs, outputs: outputs,
)
