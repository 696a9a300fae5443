"""Position-aware pack with Triton kernels, as custom operators."""

import torch
from torch import Tensor

from luna_mega.kernels._custom_operator import Values, register
from luna_mega.kernels.segment_pack import triton_kernels


def pack(states: Tensor, score: Tensor, mask: Tensor | None, index: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed rows, entropy and total weight of tokens `[N, D]`; `index` `[N]` are their rows, in order."""
    starts = torch.searchsorted(index, torch.arange(rows + 1, device=index.device))
    packed, entropy, _, total = _operator(states, score, mask, starts)
    return packed, entropy, total


def _fake(states: Tensor, starts: Tensor, **_: object) -> Values:
    rows = starts.shape[0] - 1
    sums = (states.new_empty(rows, dtype=torch.float32) for _ in range(3))
    return states.new_empty(rows, states.shape[1], dtype=torch.float32), *sums


_operator = register(
    "luna_mega::segment_pack_triton",
    "Tensor states, Tensor score, Tensor? mask, Tensor starts",
    "(Tensor, Tensor, Tensor, Tensor)",
    triton_kernels.forward,
    _fake,
    triton_kernels.backward,
    flops=lambda states, **_: (2 * states.numel(), 4 * states.numel()),
    differentiable=("states", "score"),
    gradients=(0, 1),
    saved="Tensor packed, Tensor entropy, Tensor peak, Tensor total",
    save=lambda inputs, outputs: outputs,
)
