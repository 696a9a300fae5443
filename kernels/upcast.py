"""Compute in float32, or in float64 for float64 inputs."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Return the tensor in float32 or, if it is float64, unchanged."""
    return x.to(upcast_dtype(x))


def upcast_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32."""
    for x in tensors:  # a loop takes half of the time of `any`, which matters for decoding steps
        if x is not None and x.dtype == torch.float64:
            return torch.float64
    return torch.float32
