"""The forward pass of gated attention with two kernels, for long sequences or chunks.

The forward kernel recomputes the weights for every slice of the value. With more than two slices, it is faster to write
the weights with one kernel and to multiply them with another. The backward pass uses both kernels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common import triton_launch
from . import triton_backward
from .triton_forward import GatedCall, attend

# The numbers of keys and of columns of the value from which two kernels are faster, estimated from machine code.
LONG, WIDE = 1024, 513


class Kernels(NamedTuple):
    """The number of kernels of a forward pass."""

    kernels: int


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output `[B, T, V]` and, for softmax, log2 of its denominators, `[B, T]` float32."""
    call = GatedCall(*arguments)
    large = min(call.queries, call.keys) >= LONG and call.width >= WIDE
    # A weight of a softmax depends on all scores of a row. Segments with bounds can be many and empty.
    possible = call.narrow and call.function != "softmax" and call.bounds is None
    if not (large and possible and triton_launch.target(call.query.device).large):
        return attend(call)

    def run(chosen: Kernels) -> tuple[Tensor, Tensor]:
        return _multiply_weights(call) if chosen.kernels == 2 else attend(call)

    return call.choose(triton_backward.product_kernel, [Kernels(2), Kernels(1)], run)


def _multiply_weights(call: GatedCall) -> tuple[Tensor, Tensor]:
    output = call.value.new_empty(*call.query.shape[:2], call.width)
    for part in triton_backward.split(call, triton_backward.BackwardTiles(128, 64, 64, 256, 8, 3)):
        triton_backward.write_scores(part, None, None, None)
        triton_backward.multiply_scores(
            part, part.weights, call.value, output, transposed=False, scaled=False, add=False
        )
    return output, call.query.new_empty(0, dtype=torch.float32)
