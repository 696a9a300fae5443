"""What the Triton backends share: matrix products, launches, the choice of a configuration.

Imported by `triton_backend.py` files only, which are imported when one of their kernels is first needed: Triton decides
at that moment whether kernels are interpreted.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """a b + accumulator in float32, for a and b of one dtype; PRECISION counts where they are float32."""
    if INTERPRETED:  # the interpreter multiplies the bit patterns of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


class Launch(NamedTuple):
    """A kernel as it would have been launched."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


class Target(NamedTuple):
    """The device that configurations are chosen for."""

    capability: tuple[int, int] = (9, 0)
    processors: int = 132


_recorded: list[Launch] | None = None
_target = Target()


@contextmanager
def recording(target: Target):
    """Inside, launches for `target` are put on the list that this yields instead of running: for tensors on meta."""
    global _recorded, _target
    previous, _recorded, _target = (_recorded, _target), [], target
    try:
        yield _recorded
    finally:
        _recorded, _target = previous


def target(device: torch.device) -> Target:
    """Of the CUDA device; of an H100 where kernels are interpreted or recorded."""
    if device.type != "cuda":
        return _target
    return Target(
        torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count
    )


def launch(kernel, grid: tuple[int, ...], *arguments, num_warps: int, num_stages: int, **constants) -> None:
    """Run `kernel[grid](*arguments, **constants)` on the device of its first argument, a tensor.

    `arguments`: tensors, None, ints and floats in the order of the kernel's parameters; `constants`: its constexprs.
    """
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, arguments, constants, num_warps, num_stages))
    elif all(grid):
        device = arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            # Triton 3.10 turns fusion into multiply-adds off by default; without it the scans do twice the work.
            kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)


_fastest: dict[tuple, Any] = {}


def choose(key: tuple, configurations: Sequence, run: Callable[[Any], Any]) -> Any:
    """`run(configurations[0])`; with `LUNA_MEGA_AUTOTUNE=1`, on a GPU, `run` of the fastest one.

    They are timed when `key` (the kernel, and what its speed depends on) is seen first. `run` must have no effect but
    its result.
    """
    if INTERPRETED or _recorded is not None or len(configurations) == 1 or os.environ.get("LUNA_MEGA_AUTOTUNE") != "1":
        return run(configurations[0])
    if key not in _fastest:
        times = [triton.testing.do_bench(lambda c=c: run(c), warmup=5, rep=20) for c in configurations]
        _fastest[key] = configurations[times.index(min(times))]
    return run(_fastest[key])
