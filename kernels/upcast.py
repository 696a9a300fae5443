"""Compute in float32, or in float64 for float64 inputs."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Return the tensor in float32 or, if it is float64, unchanged."""
    return x.to(upcast_dtype(x))


def upcast_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32
