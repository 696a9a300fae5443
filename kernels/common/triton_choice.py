"""Select a kernel's configuration: the default for the shapes and the shared memory, or the fastest one.

With `LUNA_MEGA_AUTOTUNE=1`, Triton's autotuner benchmarks all configurations on the first call of each kind on a GPU,
and stores the times in Triton's disk cache.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from . import triton_launch
from .comparison import ROUNDING, row_error
from .triton_launch import next_power_of_2

_instead: Callable[..., Any] | None = None


@contextmanager
def choosing(instead: Callable[..., Any]) -> Iterator[None]:
    """Use `instead(kernel, key, configurations, run)` for every selection inside the block."""
    global _instead
    previous, _instead = _instead, instead
    try:
        yield
    finally:
        _instead = previous


def choose(
    kernel: Any,
    kind: Sequence[Any],
    sizes: dict[str, int],
    configurations: Sequence[Any],
    run: Callable[[Any], Any],
    device: torch.device,
) -> Any:
    """Return the result of `run` with one of `configurations`, named tuples of integers with the default first.

    `kernel` is the kernel that takes most of the time. The speed depends on `kind`, values such as dtypes and options
    that must be equal (False: an option that is not used), and on `sizes`, which are rounded up to the next power of
    two. `run` must have no side effects.
    """
    tuned = os.environ.get("LUNA_MEGA_AUTOTUNE") == "1" and device.type == "cuda" and not triton_launch.is_recording()
    tuned = tuned and not torch.are_deterministic_algorithms_enabled()
    if _instead is None and not tuned:
        return run(configurations[0])
    sizes = {name: next_power_of_2(max(size, 1)) for name, size in sizes.items()}
    words = (*(value for value in kind if value is not False), *(f"{name}={size}" for name, size in sizes.items()))
    key = " ".join(str(word).removeprefix("torch.") for word in words)
    configurations = tuple(dict.fromkeys(configurations))
    if _instead is not None:
        return _instead(kernel, key, configurations, run)
    if len(configurations) == 1:
        return run(configurations[0])
    return _tuner(kernel, configurations)(run, key, device)


@cache
def _tuner(kernel: Any, configurations: tuple[Any, ...]) -> "_Tuner":
    return _Tuner(kernel, configurations)


class _Tuner:
    """Wrap the launches of one kind of call as a kernel that Triton's autotuner runs with each configuration."""

    def __init__(self, kernel: Any, configurations: tuple[Any, ...]) -> None:
        self.fn, self.default = kernel, configurations[0]
        self.benchmarked: list[Any] | None = None
        self.expected: list[Tensor] | None = None
        self.autotuner = Autotuner(
            self,
            ["call", "key"],
            [triton.Config(configuration._asdict()) for configuration in configurations],
            ["key"],
            reset_to_zero=None,
            restore_value=None,
            do_bench=self.bench,
            cache_results=True,
        )

    def __call__(self, call: Callable[..., Any], key: str, device: torch.device) -> Any:
        """Return the result of `call` with the fastest configuration."""
        key = f"{key} on {torch.cuda.get_device_name(device)}"
        # Benchmarking is not possible during CUDA graph capture.
        if (key,) not in self.autotuner.cache and torch.cuda.is_current_stream_capturing():
            return call(self.default)
        with torch.cuda.device(device):
            result = self.autotuner.run(call, key)
        self.expected = None
        return result

    def run(self, call: Callable[..., Any], key: str, **options: Any) -> Any:
        """Return the result of a call; `options` are the fields of a configuration and Triton launch options."""
        kind = type(self.default)
        result = call(kind(**{name: options[name] for name in kind._fields}))
        if self.benchmarked is not None:
            self.benchmarked.append(result)
        return result

    def bench(self, launch: Callable[..., Any], quantiles: Sequence[float]) -> list[float]:
        """Return the time of a configuration in ms, infinite if its result differs from the first configuration's."""
        results: list[Any] = []
        self.benchmarked = results
        try:
            launch()
            (result,) = map(tensors, results)
        finally:
            self.benchmarked = None
        self.expected = result if self.expected is None else self.expected
        if difference(result, self.expected) is not None:
            return [math.inf] * len(quantiles)
        return triton.testing.do_bench(launch, warmup=5, rep=20, quantiles=quantiles)


def tensors(result: Any) -> list[Tensor]:
    """Return all tensors in nested tuples and lists of tensors and None."""
    if isinstance(result, Tensor):
        return [result]
    return [] if result is None else [tensor for part in result for tensor in tensors(part)]


def difference(result: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Return a description of how a result differs from the first configuration's, or None if it does not."""
    for index, (mine, theirs) in enumerate(zip(result, expected, strict=True)):
        if theirs.dtype in ROUNDING and not (error := row_error(mine, theirs, 1e-6)) <= ROUNDING[theirs.dtype]:
            return f"result {index} differs by {error:.1e} from the default configuration's"
    return None
