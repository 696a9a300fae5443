"""Dispatch of all ops: backend selection and autocast.

Each public function of the kernels is an `Op`. The backend is specified by (in order of precedence) the argument of the
call, `use_backend` and the environment variable `LUNA_MEGA_BACKEND`. Otherwise the best supported backend is selected.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ._mode import EXPORTED, TRANSFORMED, mode, tracing_error

NAMES = ("auto", "reference", "torch", "native", "triton")
logger = logging.getLogger("luna_mega.kernels")


def _checked(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source} is {name!r}, which is not a backend; choose one of {', '.join(NAMES)}")
    return name


# Read once at import: torch.compile can guard on a process-wide default.
_default = _checked(os.environ.get("LUNA_MEGA_BACKEND", "auto"), "the environment variable LUNA_MEGA_BACKEND")
_override: str | None = None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op inside the block with backend `name` (one of `NAMES`), unless the call specifies a backend.

    The setting is one for all threads. If blocks of two threads overlap, it may persist after both.
    """
    global _override
    previous, _override = _override, _checked(name, "use_backend()'s argument")
    try:
        yield
    finally:
        _override = previous


Arguments = dict[str, Any]

FLOAT32_PRECISIONS = ("tf32x3", "ieee")
_float32_precision = "tf32x3"


@contextmanager
def use_float32_precision(name: str) -> Iterator[None]:
    """Multiply float32 matrices in Triton kernels with precision `name` inside the block.

    `"tf32x3"` (default) uses three tensor core passes, accurate to about 1e-6. `"ieee"` is true float32 and slower. The
    setting is one for all threads. If blocks of two threads overlap, it may persist after both.
    """
    global _float32_precision
    if name not in FLOAT32_PRECISIONS:
        raise ValueError(f"there is no float32 precision {name!r}; choose one of {', '.join(FLOAT32_PRECISIONS)}")
    previous, _float32_precision = _float32_precision, name
    try:
        yield
    finally:
        _float32_precision = previous


def float32_precision() -> str:
    """Return the precision set by `use_float32_precision`."""
    return _float32_precision


def is_autocast(device: str) -> bool:
    """Return whether autocast is enabled for a type of device; the meta device does not support it."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context in which ops on this type of device keep the dtypes of their inputs."""
    return torch.autocast(device, enabled=False) if is_autocast(device) else nullcontext()


OPS: dict[str, "Op"] = {}  # by name, for `explain`


@dataclass(frozen=True, eq=False)
class Op:
    """A public function of the kernels, with its backends and their limits. Autocast is disabled inside every backend.

    A call is a dict of validated arguments, which backends receive as keyword arguments. The sequences of a batch are
    its argument `sequences` (`Sequences`).

    Args:
        name: name of the public function, for errors and `explain`.
        backends: maps backend names to the functions that compute a call.
        unsupported: returns the reason why the Triton kernels do not support a call, or None if they do.
        with_weights: computes the output, the weights and further results with the reference.
        under_autocast: converts a call under autocast to the call that the Triton kernels compute.
        native_unsupported: returns the reason why the C library does not support a call, or None if it does; without
            arguments, the reason why it is missing. None = the op has no backend `"native"`.
    """

    name: str
    backends: dict[str, Callable[..., Any]]
    unsupported: Callable[..., str | None]
    with_weights: Callable[..., Any] | None = None
    under_autocast: Callable[[Arguments], Arguments] | None = None
    native_unsupported: Callable[..., str | None] | None = None

    def __post_init__(self) -> None:
        OPS[self.name] = self

    def __call__(self, backend: str | None, call: Arguments, return_weights: bool = False) -> Any:
        """Run a call with the requested or the best backend; its first argument is a tensor `[B, ...]`."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise tracing_error()
        first = next(iter(call.values()))
        device = first.device
        if return_weights:
            if call["sequences"].bounds is not None:
                raise ValueError(
                    f"{self.name} does not return weights with cu_seqlens; omit return_weights or cu_seqlens"
                )
            run: Any = self.with_weights
        else:
            chosen = self.choose(backend, device, call)
            if chosen == "triton" and self.under_autocast is not None and is_autocast(device.type):
                call = self.under_autocast(call)
            if chosen != "native" and not torch.compiler.is_compiling() and first.shape[0] == 0:
                chosen = "reference"  # fast paths divide by the batch size
            run = self.backends[chosen]
        if not is_autocast(device.type):
            return run(**call)
        with without_autocast(device.type):
            return run(**call)

    def choose(self, backend: str | None, device: torch.device, call: Arguments | None = None) -> str:
        """Return the backend of `decide`; log once why a CUDA call does not use Triton."""
        chosen, reason = self.decide(backend, device, call)
        if device.type == "cuda" and reason.startswith(_FALLBACK) and not torch.compiler.is_compiling():
            message = f"{self.name} runs on {chosen!r}: {reason}"
            if message not in _warned:
                _warned.add(message)
                logger.warning(message)
        return chosen

    def decide(self, backend: str | None, device: torch.device, call: Arguments | None = None) -> tuple[str, str]:
        """Return the name of the backend and the reason for its selection; without a call, for any call.

        Raises:
            ValueError: if the backend was specified by name and does not support the call.
        """
        if backend is not None:
            requested, source = _checked(backend, f"{self.name}'s argument backend"), "its argument"
        elif _override is not None:
            requested, source = _override, "use_backend"
        else:
            requested, source = _default, "LUNA_MEGA_BACKEND"
        if requested == "native" and self.native_unsupported is None:
            if backend is not None:
                raise ValueError(f"{self.name} has no backend 'native'; choose 'torch' or 'auto'")
            requested = "auto"  # the setting applies to all ops
        if requested == "auto":
            # Interpreted Triton kernels are for tests only, so they must be selected by name.
            if device.type == "cuda":
                against = self.against("triton", device, call)
                if mode() == EXPORTED:
                    against = "exported programs must not depend on this package"
                return ("triton", "automatic choice") if against is None else ("torch", _FALLBACK + against)
            if self.native_unsupported is None or device.type != "cpu":
                return "torch", f"{_FALLBACK}the tensors are on {device.type}"
            against = self.against("native", device, call)
            return ("native", "automatic choice") if against is None else ("torch", against)
        if requested in ("native", "triton") and (against := self.against(requested, device, call)) is not None:
            raise ValueError(f"{self.name} cannot run on {requested!r}: {against}; choose 'torch' or 'auto'")
        return requested, f"chosen by {source}"

    def against(self, backend: str, device: torch.device, call: Arguments | None) -> str | None:
        """Return the reason why `"native"` or `"triton"` cannot compute a call on `device`, or None if it can."""
        if backend == "native":
            if device.type != "cpu":
                return f"the tensors are on {device.type}"
            assert self.native_unsupported is not None
            return self.native_unsupported(**call or {})
        if (reason := _unavailable_reason(device)) is not None:
            return reason
        if mode() == TRANSFORMED:
            return "transforms of torch.func and forward mode require operators of PyTorch"
        return None if call is None else self.unsupported(**call)


_FALLBACK = "no Triton kernel: "
_warned: set[str] = set()


def _unavailable_reason(device: torch.device) -> str | None:
    """Return the reason why Triton kernels cannot run on `device`, or None if they can."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed; run `pip install triton` (Linux)"
    if device.type == "cuda" and torch.version.hip is None:
        return _old_device(device)
    if triton.knobs.runtime.interpret:
        return None
    kind = "a ROCm device" if device.type == "cuda" else device.type
    return f"the tensors are on {kind}; the kernels need CUDA, or TRITON_INTERPRET=1 set before the first kernel runs"


# Marks the result as constant for Dynamo. `torch.compiler.assume_constant_result` does the same, but imports the
# compiler (one second, 70 MB).
_unavailable_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _old_device(device: torch.device) -> str | None:
    """Return the reason why a CUDA device is missing or too old for the kernels, or None if it is supported."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"
