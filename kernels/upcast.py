"""Conversions of tensors: to float32, or float64 for float64 inputs, and to complex numbers."""

import torch
from torch import Tensor

from ._mode import TRANSFORMED, mode


def upcast(x: Tensor) -> Tensor:
    """Return the tensor in float32 or, if it is float64, unchanged."""
    # `to` takes time in any case, which matters for decoding steps.
    return x if x.dtype == torch.float32 or x.dtype == torch.float64 else x.float()


def upcast_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32."""
    for x in tensors:  # a loop takes half of the time of `any`, which matters for decoding steps
        if x is not None and x.dtype == torch.float64:
            return torch.float64
    return torch.float32


def as_complex(pairs: Tensor) -> Tensor:
    """Return real pairs `[..., 2]` as complex numbers, without a copy if their place in the storage allows that."""
    if mode() >= TRANSFORMED:  # neither place nor strides are known
        return torch.complex(*pairs.unbind(-1))
    pairs = pairs.contiguous()  # does not change the strides of an empty tensor
    if pairs.storage_offset() % 2 or pairs.stride(-1) != 1:
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(pairs)
