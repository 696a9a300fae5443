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


def select(op: str, backends: Mapping[str, Callable], argument: str | None = None) -> str:
    """The name of the backend that runs `op`, whose implementations are `backends`.

    Raises `ValueError` where a backend was asked for by name and the op does not have it.
    """
    if argument is not None:
        wanted = _checked(argument, f"{op}'s argument backend")
    else:
        wanted = _default if _override is None else _override
    if wanted == "auto":
        return "torch"
    if wanted not in backends:
        raise ValueError(
            f"{op} has no {wanted!r} backend in this version; choose one of {', '.join(backends)} or 'auto'"
        )
    return wanted


def without_autocast(device: str) -> AbstractContextManager:
    """Inside, ops on this type of device keep the dtypes they are given."""
    # The meta device has no autocast to switch off.
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
