"""Helpers of all ops for exported, compiled and captured programs: dynamic sizes and accurate logarithms.

Exported programs must not depend on this package, so these helpers use only PyTorch operators that ONNX supports.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Private names of PyTorch, which may disappear; without them, every call is an operator.
try:
    from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack

    HAS_NAMES = forward_ad._current_level is not None
except (AttributeError, ImportError):
    HAS_NAMES = False


def is_exporting() -> bool:
    """Return whether the call is being exported.

    Before torch 2.13, `torch.compiler.is_exporting()` is always True under Dynamo, also in `torch.compile`.
    """
    return bool(torch.compiler._is_exporting_flag)


def is_transformed() -> bool:
    """Return whether `torch.func` transforms the call, or it may compute tangents in forward mode."""
    return HAS_NAMES and not torch.compiler.is_compiling() and _has_transforms()


def _has_transforms() -> bool:
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_eager() -> bool:
    """Return whether the call is neither compiled, exported nor transformed: its values can be read."""
    return not torch.compiler.is_compiling() and not (HAS_NAMES and _has_transforms())


def has_lost_tangent(x: Tensor) -> bool:
    """Return whether `x` has a tangent that `is_transformed` does not find because a name is missing."""
    return not HAS_NAMES and not in_program() and forward_ad.unpack_dual(x).tangent is not None


def in_parts() -> bool:
    """Return whether a call must consist of operators of PyTorch, which have derivatives of every kind and order."""
    return is_exporting() or is_transformed()


def is_direct() -> bool:
    """Return whether an operator may be computed without PyTorch's dispatcher: eagerly, and in no mode of dispatch."""
    return HAS_NAMES and not (torch.compiler.is_compiling() or _has_transforms() or _len_torch_dispatch_stack())


def in_program() -> bool:
    """Return whether the call is being compiled or exported."""
    return torch.compiler.is_compiling()


def is_known(condition: Any) -> bool:
    """Return a condition on sizes; in a program, whether all sizes meet it, so that no guard is added."""
    return torch.fx.experimental.symbolic_shapes.statically_known_true(condition) if in_program() else condition


def forbid_tracing() -> None:
    """Raise `RuntimeError` while `torch.jit.trace` records operations."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError("`torch.jit.trace` is not supported; use `torch.export.export`")


def is_capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph records the operations on the device of `x`."""
    return x.is_cuda and not in_program() and torch.cuda.is_current_stream_capturing()


def forbid_capture(x: Tensor, what: str, instead: str) -> None:
    """Raise `RuntimeError` while a CUDA graph records operations on the device of `x`."""
    if is_capturing(x):
        raise RuntimeError(f"a CUDA graph cannot contain {what}; {instead}")


def chunk_positions(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return positions `[chunks, size]`, padded with the last one, and a mask that is False for padding.

    The last chunk is padding because compilers treat a size of 1 as a constant. An exported program computes the number
    of chunks at run time. If it were computed from a shape, the program would only accept lengths similar to the
    example's.
    """
    if is_exporting():
        chunks: Any = ((torch.full((), length, device=device) + size - 1) // size + 1).item()
        torch._check(chunks >= 2)
    else:
        chunks = -(-length // size) + 1
    position = torch.arange(chunks * size, device=device).view(chunks, size)
    return position.clamp(max=length - 1), position < length


def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x), accurate near 0, unlike the ONNX export of `torch.log1p`."""
    return 2.0 * torch.atanh(x / (2.0 + x)) if is_exporting() else torch.log1p(x)


def expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1, accurate near 0, unlike the ONNX export of `torch.expm1`."""
    return torch.tanh(0.5 * x) * (torch.exp(x) + 1.0) if is_exporting() else torch.expm1(x)


def lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """Return start + weight (end - start); exporters decompose `torch.lerp` into ops that some runtimes lack."""
    return start + weight * (end - start) if is_exporting() else torch.lerp(start, end, weight)
