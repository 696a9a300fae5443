"""Backends of tests, the sizes of their blocks, and instruction sets."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch

from luna_mega.kernels.recurrence import native

needs_library = pytest.mark.skipif(native.missing() is not None, reason=f"{native.missing()}")
NATIVE = pytest.param("native", marks=needs_library)
TRITON = pytest.param("triton", marks=pytest.mark.triton)

LEVELS = {"base": 0, "avx2": 1, "avx512": 2}
# Sizes of the blocks of the implementations, which are internal: small ones, and others.
BLOCKS = {
    "recurrence.torch_backend": {"MANY_POSITIONS": (0, 1 << 60), "BLOCK": (2, 2), "LEAST_CHANNELS": (1, 1)},
    "recurrence.formula": {"GROUP": (1, 4)},
    "luna_causal_attention.torch_backend": {"CHUNK": (8, 3), "BLOCK_TOKENS": (1, 1 << 60)},
    "gated_attention.torch_backend": {
        "BLOCK_QUERIES": (3, 256), "BLOCK_SCORES_CPU": (60, 1 << 60), "KEPT": (0.0, math.inf),
    },
    "timestep_norm.torch_passes": {"BLOCK": (80, 1 << 40)},
}  # fmt: skip
TRITON_BLOCKS = {
    "recurrence.triton_plan": {"SHORTEST_CHUNK": (8, 1 << 20)},
    "luna_causal_attention.triton_forward": {"MIN_SEGMENT": (16, 1 << 20)},
    "timestep_norm.triton_kernels": {"TILE": (32, 64), "TILES": (2, 1), "BLOCK_T": (8, 8)},
}


def shrink_blocks(patch: pytest.MonkeyPatch, blocks: str, triton: bool = False) -> None:
    """Set the sizes of blocks: "small", "other" or "default"."""
    if blocks == "default":
        return
    for name, sizes in (TRITON_BLOCKS if triton else BLOCKS).items():
        module = import_module(f"luna_mega.kernels.{name}")
        for constant, values in sizes.items():
            patch.setattr(module, constant, values[blocks == "other"])
    if triton:
        plan = import_module("luna_mega.kernels.recurrence.triton_plan")
        patch.setattr(plan, "CONFIGURATIONS", (plan.Configuration(1 << 20, 8),))


@contextmanager
def instructions(level: str) -> Iterator[None]:
    """Run the C library with one of `LEVELS`; skip the test if the processor does not have these instructions."""
    if native.library.moving_average_level(LEVELS[level]) != LEVELS[level]:
        native.library.moving_average_level(-1)
        pytest.skip("the processor does not have these instructions")
    try:
        yield
    finally:
        native.library.moving_average_level(-1)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that elements which no kernel writes are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).new_empty(2).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def on_triton(*values: object, slow: bool = True) -> object:
    """Return a test case whose first value is the backend "triton" and whose other values are `values`."""
    return pytest.param("triton", *values, marks=[pytest.mark.triton, *([pytest.mark.slow] if slow else [])])


def on_native(*values: object) -> object:
    """Return a test case whose first value is the backend "native" and whose other values are `values`."""
    return pytest.param("native", *values, marks=needs_library)
