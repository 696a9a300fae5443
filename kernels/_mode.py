"""The mode in which PyTorch runs a call: eager, in a transform of `torch.func`, compiled or exported."""

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

try:  # without them, batches of gradients raise an error of PyTorch
    from torch._C import _dispatch_key_parse, _dispatch_keys

    _BATCHED = _dispatch_key_parse("Batched")
except (ImportError, RuntimeError):
    _BATCHED = None  # type: ignore[assignment]

# Eager: operators may be computed without PyTorch's dispatcher, or not, because a mode of dispatch is active. In a
# transform: by `torch.func`, or tangents of forward mode may be computed. Programs: of `torch.compile`, or exported.
DIRECT, DISPATCHED, TRANSFORMED, COMPILED, EXPORTED = range(5)
# Here, a call must consist of operators of PyTorch, which have derivatives of every kind and order.
FORMULAS = (TRANSFORMED, EXPORTED)


def mode() -> int:
    """Return the mode of the current call, one of the constants above; values can be read below `TRANSFORMED`."""
    if torch.compiler.is_compiling():
        # Before torch 2.13, `torch.compiler.is_exporting()` is always True under Dynamo, also in `torch.compile`.
        return EXPORTED if torch.compiler._is_exporting_flag else COMPILED
    if not HAS_NAMES:
        return DISPATCHED
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return TRANSFORMED
    return DISPATCHED if _len_torch_dispatch_stack() else DIRECT


def has_lost_tangent(x: Tensor) -> bool:
    """Return whether `x` has a tangent that `mode` does not find because a name is missing."""
    return not HAS_NAMES and mode() < COMPILED and forward_ad.unpack_dual(x).tangent is not None


def is_batched(x: object) -> bool:
    """Return whether `x` is a batch (`is_grads_batched` of `torch.autograd.grad`), which `mode` does not find."""
    return _BATCHED is not None and isinstance(x, Tensor) and _dispatch_keys(x).has(_BATCHED)


def is_known(condition: Any) -> bool:
    """Return a condition on sizes; in a program, whether all sizes meet it, so that no guard is added."""
    return torch.fx.experimental.symbolic_shapes.statically_known_true(condition) if mode() >= COMPILED else condition


def tracing_error() -> RuntimeError:
    """Return the error of a call while `torch.jit.trace` records operations."""
    return RuntimeError("`torch.jit.trace` is not supported; use `torch.export.export`")


def is_capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph records the operations on the device of `x`."""
    return x.is_cuda and mode() < COMPILED and torch.cuda.is_current_stream_capturing()


def forbid_capture(x: Tensor, what: str, instead: str) -> None:
    """Raise `RuntimeError` while a CUDA graph records operations on the device of `x`."""
    if is_capturing(x):
        raise RuntimeError(f"a CUDA graph cannot contain {what}; {instead}")
