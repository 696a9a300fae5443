"""The choice of a kernel's configuration: the one that was measured on this device, or the default.

`LUNA_MEGA_AUTOTUNE=1`, or a `tuning()` block, times all configurations of a kernel on the first call of every kind.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from luna_mega.kernels.common import triton_launch
from luna_mega.kernels.common.configurations import Kind, measured

# What a configuration raises that asks for more than the device has.
REFUSALS = (OutOfResources, PTXASError)
# A configuration takes the place of the default where it needs less than this share of the default's time.
GAIN = 0.97
# Relative, of the norm: the results of two configurations differ by rounding only.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Timing(NamedTuple):
    """The milliseconds of each configuration of a call, or the reason why it cannot be used; the default is first."""

    kind: Kind
    times: dict[Any, float | str]

    @property
    def fastest(self) -> Any:
        """Return the fastest configuration, the default where none gains much."""
        default = next(iter(self.times))
        times = {c: math.inf if isinstance(ms, str) else ms for c, ms in self.times.items()}
        best = min(times, key=times.get)
        return best if times[best] < GAIN * times[default] else default


_timed: dict[tuple, Any] = {}
_chosen: dict[tuple, Any] = {}
_tuning: list[Timing] | None = None


@contextmanager
def tuning() -> Iterator[list[Timing]]:
    """Yield a list, and time all configurations of every kind of call in the block: what is found is put on it."""
    global _tuning
    previous, _tuning = _tuning, []
    _timed.clear()
    try:
        yield _tuning
    finally:
        _tuning = previous


def choose(
    op: str,
    kernel: str,
    kind: Sequence,
    sizes: dict[str, int],
    configurations: Sequence,
    run: Callable[[Any], Any],
    device: torch.device,
) -> Any:
    """Return `run` of the configuration, one of `configurations`, the default first, that is chosen for a call.

    `kind` and `sizes` are what the speed depends on: values that must be equal (dtypes, options), and numbers, to the
    next power of two, of which the nearest measured ones count. `run` must have no effect but its result.
    """
    if triton_launch.is_recording():
        return triton_launch.record(configurations, run)
    if len(configurations) == 1:
        return run(configurations[0])
    sizes = {name: triton.next_power_of_2(max(size, 1)) for name, size in sizes.items()}
    place = (op, kernel, device, *kind, *sizes.values())
    timed = _tuning is not None or os.environ.get("LUNA_MEGA_AUTOTUNE") == "1" and device.type == "cuda"
    # Nothing can be timed while a CUDA graph is captured.
    if timed and place not in _timed and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        timing = Timing(_kind(op, kernel, kind, sizes), _times(configurations, run, device))
        _timed[place] = timing.fastest
        if _tuning is not None:
            _tuning.append(timing)
    if timed and place in _timed:
        return run(_timed[place])
    if place not in _chosen:
        _chosen[place] = measured(_kind(op, kernel, kind, sizes), device_name(device), configurations)
    return run(configurations[0] if _chosen[place] is None else _chosen[place])


def _kind(op, kernel, kind, sizes):
    words = " ".join(str(value).removeprefix("torch.") for value in kind)
    return Kind(op, kernel, words, sizes)


@cache
def device_name(device: torch.device) -> str:
    """Return the name of a device in the files of configurations."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton interpreter"


def _times(configurations, run, device):
    times, expected = {}, None
    for configuration in dict.fromkeys(configurations):
        try:
            result = _tensors(run(configuration))
            expected = result if expected is None else expected
            if (difference := _difference(result, expected)) is not None:
                times[configuration] = difference
            else:
                times[configuration] = _milliseconds(lambda c=configuration: run(c), device)
        except REFUSALS as error:
            times[configuration] = str(error)
    return times


def _tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [] if result is None else [tensor for part in result for tensor in _tensors(part)]


def _difference(result, expected):
    """Return in words how a result differs from that of the first configuration, None where it does not."""
    for index, (mine, theirs) in enumerate(zip(result, expected, strict=True)):
        tolerance = TOLERANCES.get(theirs.dtype)
        if tolerance is not None and theirs.numel():
            # The logarithm of a sum of nothing is -inf.
            mine, theirs = (torch.nan_to_num(x.float(), nan=math.nan, posinf=0.0, neginf=0.0) for x in (mine, theirs))
            error = ((mine - theirs).norm() / theirs.norm().clamp(min=1e-3)).item()
            if not error <= tolerance:
                return f"result {index} differs by {error:.1e} from that of the default configuration"
    return None


def _milliseconds(function, device):
    if device.type == "cuda":
        with torch.cuda.device(device):
            return triton.testing.do_bench(function, warmup=5, rep=20, return_mode="median")
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)
