"""Helpers of all ops for exported programs: dynamic sizes and accurate logarithms.

Exported programs must not depend on this package, so these helpers use only PyTorch operators that ONNX supports.
"""

from typing import Any

import torch
from torch import Tensor

from ._mode import EXPORTED, mode


def chunk_positions(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions `[chunks, size]`, padded with the last one, and a mask that is False for padding.

    The last chunk is padding because compilers treat a size of 1 as a constant. An exported program computes the number
    of chunks at run time. If it were computed from a shape, the program would only accept lengths similar to the
    example's.
    """
    if mode() == EXPORTED:
        chunks: Any = ((torch.full((), length, device=device) + size - 1) // size + 1).item()
        torch._check(chunks >= 2)
    else:
        chunks = -(-length // size) + 1
    position = torch.arange(chunks * size, device=device).view(chunks, size)
    return position.clamp(max=length - 1), position < length


def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x), accurate near 0, unlike the ONNX export of `torch.log1p`."""
    return 2.0 * torch.atanh(x / (2.0 + x)) if mode() == EXPORTED else torch.log1p(x)


def expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1, accurate near 0, unlike the ONNX export of `torch.expm1`."""
    return torch.tanh(0.5 * x) * (torch.exp(x) + 1.0) if mode() == EXPORTED else torch.expm1(x)


def lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """Return start + weight (end - start); exporters decompose `torch.lerp` into ops that some runtimes lack."""
    return start + weight * (end - start) if mode() == EXPORTED else torch.lerp(start, end, weight)
