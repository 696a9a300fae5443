"""Measure the time and the peak memory of one `Work`, and compare the variants of a case."""

import resource
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from cases import CASES, Case, Size, Work

if torch.cuda.is_available():
    from triton.testing import do_bench

LONG = 5_000.0  # milliseconds
# Relative, of the norm.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def measure(case_name: str, variant: str, size: Size, device: str, dtype: str, threads: int) -> dict[str, float | str]:
    """Return median milliseconds and peak megabytes of the passes of a case: forward (no gradient), backward, both.

    If a variant fails, for example because it is out of memory, `error` is the reason.
    """
    if threads:
        torch.set_num_threads(threads)
    case = CASES[case_name]
    try:
        work = case.make(variant, torch.device(device), getattr(torch, dtype), size)
        return _measure(work, case, device)
    except Exception as error:  # the table shows it, and the other variants are measured
        return {"error": str(error).partition("\n")[0][:100]}


def parameters(case_name: str) -> dict[str, int]:
    """Return the number of parameters of every variant that cost time."""
    case, device = CASES[case_name], torch.device("meta")
    with device:
        works = {name: case.make(name, device, torch.float32, case.sizes[0]) for name in case.variants}
    return {name: work.parameters for name, work in works.items()}


def limit_memory() -> None:
    """Limit the memory of this process to the free memory, so that it fails with an error and no other process does."""
    with open("/proc/meminfo", encoding="utf-8-sig") as file:
        free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    limit = _status("VmSize") + free
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def passes(work: Work) -> tuple[dict[str, Callable[[], object]], list[torch.Tensor]]:
    """Return the functions of a forward pass without gradient and of a training step, and the seeds of the latter."""
    seeds = []

    def step():
        outputs = work.forward()
        seeds[:] = seeds or [torch.randn_like(output) for output in outputs]
        return _gradients(outputs, work, seeds)

    return {"forward": partial(_forward, work), "both": step}, seeds


def _measure(work, case, device):
    functions, seeds = passes(work)
    result = {}
    for name in (name for name in functions if name in case.passes):
        result |= _pass(name, functions[name], case.repeats, device)
    if "both" in case.passes:
        result["both_mb"] -= sum(seed.nbytes for seed in seeds) / 2**20
    if "backward" in case.passes:
        outputs = work.forward()
        backward = partial(_gradients, outputs, work, seeds, retain_graph=True)
        result |= _pass("backward", backward, case.repeats, device)
    return result


def _pass(name, function, repeats, device):
    """Return the peak memory of the first call in MB, and the median and minimum time of later calls in ms.

    On a CPU, a call of more than 5 seconds is not repeated, and the time of the first call is returned.
    """
    base = reset_peak(device)
    first = _milliseconds(function)
    result = {f"{name}_mb": (peak(device) - base) / 2**20}
    if device == "cuda":  # between calls the cache is cleared
        median, least = do_bench(function, warmup=10, rep=60, quantiles=[0.5, 0.0])
    else:
        times = [_milliseconds(function) for _ in range(min(repeats, int(LONG / first)))] or [first]
        median, least = statistics.median(times), min(times)
    return {**result, f"{name}_ms": median, f"{name}_min_ms": least}


def take_turns(case: Case, variants: list[str], size: Size, dtype: str, rounds: int) -> dict[str, list[float]]:
    """Return the median milliseconds of each pass for `variants`, which alternate in this process on the CPU."""
    works = [case.make(variant, torch.device("cpu"), getattr(torch, dtype), size) for variant in variants]
    result, runs = {}, [passes(work)[0] for work in works]
    for name in (name for name in runs[0] if name in case.passes):
        times = [[1000 * clock(run[name]) for run in runs] for _ in range(rounds + 1)]
        result[name] = [statistics.median(values) for values in zip(*times[1:], strict=True)]  # the first warms up
    return result


@torch.no_grad()
def _forward(work):
    return work.forward()


def _gradients(outputs, work, seeds, retain_graph=False):
    return torch.autograd.grad(outputs, work.leaves, seeds, allow_unused=True, retain_graph=retain_graph)


def _milliseconds(function):
    return 1000 * clock(function)


def clock(run: Callable[[], object]) -> float:
    """Return the seconds of a call: processor time with one CPU thread, else wall time, on a GPU until it is idle."""
    on_gpu = torch.cuda.is_initialized()
    now = time.process_time if torch.get_num_threads() == 1 and not on_gpu else time.perf_counter
    start = now()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return now() - start


def reset_peak(device):
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    return _status("VmRSS")


def peak(device):
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(field):
    with open("/proc/self/status", encoding="utf-8-sig") as file:
        line = next(line for line in file if line.startswith(field))
    return 1024 * int(line.split()[1])


def agree(case_name: str, size: Size, device: str, dtype: str) -> str | None:
    """Compare our outputs and gradients with the baseline's in float64; return the first difference, or None.

    They agree to rounding in float64, and to the accuracy of the type in float32 and `dtype`.
    """
    case = CASES[case_name]
    exact = {variant: _results(case, variant, size, device, torch.float64) for variant in case.variants}
    expected = next(values for variant, values in exact.items() if variant != case.ours)
    ours = {torch.float64: exact[case.ours]}
    ours |= {kind: _results(case, case.ours, size, device, kind) for kind in {torch.float32, getattr(torch, dtype)}}
    for kind, values in ours.items():
        for index, (mine, theirs) in enumerate(zip(values, expected, strict=True)):
            error = ((mine - theirs).norm() / theirs.norm().clamp(min=1e-3)).item()
            if not error <= TOLERANCES[kind]:
                return f"{case_name} {size}: tensor {index} of {case.ours} in {kind} is off by {error:.1e}"
    return None


def _results(case, variant, size, device, dtype):
    """Return the outputs and gradients for inputs that all dtypes represent exactly."""
    work = case.make(variant, torch.device(device), torch.float64, size)
    with torch.no_grad():
        for leaf in work.leaves:
            leaf.copy_(leaf.to(torch.bfloat16))
    if dtype != torch.float64:
        narrow = case.make(variant, torch.device(device), dtype, size)
        with torch.no_grad():
            for mine, leaf in zip(narrow.leaves, work.leaves, strict=True):
                mine.copy_(leaf)
        work = narrow
    outputs = work.forward()
    seeds = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device, x.dtype) for x in outputs]
    seeds = [seed.to(torch.bfloat16).to(seed.dtype) for seed in seeds]
    return [x.detach().double() for x in (*outputs, *torch.autograd.grad(outputs, work.leaves, seeds))]
