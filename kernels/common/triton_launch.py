"""Launch Triton kernels for all ops: tensor layout, tile sizes, recorded launches.

Only `triton_*.py` files import this file. Ops import those lazily, because Triton decides at import time whether
kernels are interpreted.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, TypeVarTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

Ts = TypeVarTuple("Ts")
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def contiguous(*tensors: *Ts) -> tuple[*Ts]:
    """Return the tensors, copied if they are not contiguous or PyTorch negates them when it reads them."""
    return tuple(x.resolve_neg().contiguous() if isinstance(x, Tensor) else x for x in tensors)  # type: ignore[return-value]


def rows_contiguous(*tensors: *Ts) -> tuple[*Ts]:
    """Return the tensors, copied if the last dimension is not contiguous."""
    copies = (x.contiguous() if isinstance(x, Tensor) and x.stride(-1) != 1 else x for x in tensors)
    return tuple(copies)  # type: ignore[return-value]


def strides(*tensors: Tensor | None, number: int) -> tuple[int, ...]:
    """Return the first `number` strides of every tensor, 0 for None."""
    return tuple(s for x in tensors for s in ((0,) * number if x is None else x.stride()[:number]))


def cdiv(size: int, block: int) -> int:
    """Return the quotient, rounded up. On the host, `triton.cdiv` takes fifty times as long."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def block_of(size: int, largest: int | None = None) -> int:
    """Return the tile size: the next power of two, at least 16 as matrix products require, at most `largest`."""
    block = max(16, next_power_of_2(size))
    return block if largest is None else min(block, largest)


def random_seed(dropout: float, device: torch.device) -> Tensor | None:
    """Return the dropout seed of a call, which its backward pass uses again; None without dropout."""
    return torch.randint(2**63 - 1, (1,), device=device) if dropout > 0.0 else None


class Launch(NamedTuple):
    """A kernel and the arguments of a recorded launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    options: dict[str, int]


class Target(NamedTuple):
    """The device properties that determine configurations."""

    capability: tuple[int, int] = (9, 0)
    processors: int = 132
    shared_memory: int = 227 * 1024  # bytes available to one block

    @property
    def large(self) -> bool:
        """Return whether the large tiles of an H100 fit; compute capability 12.0 has less shared memory."""
        return self.shared_memory >= 227 * 1024


_recorded: list[Launch] | None = None
_target = Target()


@contextmanager
def recording(target: Target) -> Iterator[list[Launch]]:
    """Record launches for `target` in the yielded list instead of running them; for meta tensors."""
    global _recorded, _target
    previous, (_recorded, _target) = (_recorded, _target), ([], target)
    try:
        yield _recorded
    finally:
        _recorded, _target = previous


def is_recording() -> bool:
    """Return whether launches are being recorded."""
    return _recorded is not None


def target(device: torch.device) -> Target:
    """Return the device to configure for: the CUDA device, or an H100 for interpreted kernels."""
    return _target if device.type != "cuda" else _properties(device)


@cache
def _properties(device: torch.device) -> Target:
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Target(capability, properties.multi_processor_count, shared_memory)


def processors(device: torch.device, sequences: int) -> int:
    """Return the number of multiprocessors that the programs of a call with `sequences` sequences should fill.

    With `torch.use_deterministic_algorithms`, every sequence is divided as if it were the only one on an H100. Then the
    division, and therefore the rounding, depends neither on the batch size nor on the device.
    """
    if torch.are_deterministic_algorithms_enabled():
        return Target().processors * max(sequences, 1)
    return target(device).processors


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, num_stages: int, registers: int | None = None,
    **constants: Any,
) -> None:  # fmt: skip
    """Run `kernel[grid](*arguments, **constants)` on the device of its first argument, a tensor.

    `arguments` are tensors, None, ints and floats in the order of the kernel's parameters, `constants` its constexprs.
    `registers` limits the registers of a thread.
    """
    # Triton 3.10 disables fused multiply-add by default; the scans would then need twice the instructions.
    options = {"enable_fp_fusion": True} | ({} if registers is None else {"maxnreg": registers})
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, arguments, constants, num_warps, num_stages, options))
    elif all(grid):
        device = arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages, **options)
