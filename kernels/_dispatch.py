"""Which backend runs an op: argument, then `use_backend`, then `LUNA_MEGA_BACKEND`, then automatic choice."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

NAMES = ("auto", "reference", "torch", "triton")


def _checked(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source} is {name!r}, which is not a backend; choose one of {', '.join(NAMES)}")
    return name


# Read once: a process-wide default, which torch.compile can guard on.
_default = _checked(os.environ.get("LUNA_MEGA_BACKEND", "auto"), "the environment variable LUNA_MEGA_BACKEND")
_override: str | None = None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op inside the block with backend `name` (one of `NAMES`), unless a call names its own."""
    global _override
    previous, _override = _override, _checked(name, "use_backend()'s argument")
    try:
        yield
    finally:
        _override = previous


def select(
    op: str,
    backends: Mapping[str, Callable],
    argument: str | None,
    device: torch.device,
    unsupported: str | None = None,
) -> str:
    """The name of the backend that runs `op` on `device`, whose implementations are `backends`.

    `unsupported`: why the Triton kernels cannot take the arguments of this call, None where they can. Raises
    `ValueError` where a backend was asked for by name that cannot run the call.
    """
    return decide(op, backends, argument, device, unsupported)[0]


def decide(op, backends, argument, device, unsupported=None) -> tuple[str, str]:
    """`select`, and the reason for the choice."""
    if argument is not None:
        wanted, source = _checked(argument, f"{op}'s argument backend"), "its argument"
    elif _override is not None:
        wanted, source = _override, "use_backend"
    else:
        wanted, source = _default, "LUNA_MEGA_BACKEND"
    if wanted == "auto":
        # Interpreted kernels are for tests: only their name chooses them.
        against = f"the tensors are on {device.type}" if device.type != "cuda" else _why_not(device) or unsupported
        if torch.compiler.is_exporting():
            against = "an exported program must not need this package"
        return ("triton", "automatic choice") if against is None else ("torch", f"no Triton kernel: {against}")
    if wanted not in backends:
        raise ValueError(f"{op} has no {wanted!r} backend; choose one of {', '.join(backends)} or 'auto'")
    if wanted == "triton" and (against := _why_not(device) or unsupported) is not None:
        raise ValueError(f"{op} cannot run on 'triton': {against}; choose 'torch' or 'auto'")
    return wanted, f"chosen by {source}"


@torch.compiler.assume_constant_result
def _why_not(device: torch.device) -> str | None:
    """Why no Triton kernel runs on `device`; None where they do."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed; pip install 'luna-mega[triton]' on Linux"
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"
    if triton.knobs.runtime.interpret:
        return None
    where = "a ROCm device" if device.type == "cuda" else device.type
    return f"the tensors are on {where}; the kernels need CUDA, or TRITON_INTERPRET=1 before the first of them runs"


FLOAT32_PRECISIONS = ("tf32x3", "ieee")
_float32_precision = "tf32x3"


@contextmanager
def use_float32_precision(name: str) -> Iterator[None]:
    """How Triton kernels multiply float32 matrices inside the block.

    `"tf32x3"`, the default: on tensor cores, in three passes, accurate to about 1e-6; `"ieee"`: as float32, slower.
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
    return _float32_precision


def without_autocast(device: str) -> AbstractContextManager:
    """Inside, ops on this type of device keep the dtypes they are given."""
    # The meta device has no autocast to switch off.
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
