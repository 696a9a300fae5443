"""Measurement of one `Work`, time and peak memory, and comparison of the variants of a case."""

import statistics
import time

import torch
from cases import CASES, Size

if torch.cuda.is_available():
    from triton.testing import do_bench

# Relative, of the norm.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def measure(case_name: str, variant: str, size: Size, device: str, dtype: str, threads: int) -> dict[str, float | str]:
    """Return median milliseconds and peak megabytes of forward (no gradient), backward, and both.

    Where a variant fails, for instance for lack of memory, `error` holds the reason.
    """
    if threads:
        torch.set_num_threads(threads)
    case = CASES[case_name]
    try:
        work = case.make(variant, torch.device(device), getattr(torch, dtype), size)
        return _measure(work, case.repeats, device)
    except Exception as error:  # the table shows it, and the other variants are measured
        return {"error": str(error).partition("\n")[0][:100]}


def _measure(work, repeats, device):
    base = _reset_peak(device)
    outputs = _forward(work)
    result = {"forward_mb": _peak(device) - base}
    seeds = [torch.randn_like(output) for output in outputs]
    del outputs
    base = _reset_peak(device)
    outputs = work.forward()
    _gradients(outputs, work, seeds)  # the first call, and the one whose memory counts
    result["both_mb"] = _peak(device) - base
    outputs = work.forward()
    base = _reset_peak(device)
    functions = {
        "forward": lambda: _forward(work),
        "backward": lambda: _gradients(outputs, work, seeds, retain_graph=True),
        "both": lambda: _gradients(work.forward(), work, seeds),
    }
    _gradients(outputs, work, seeds, retain_graph=True)
    result["backward_mb"] = _peak(device) - base
    result = {name: value / 2**20 for name, value in result.items()}
    for name, function in functions.items():
        result[f"{name}_ms"], result[f"{name}_min_ms"] = _time(function, repeats, device)
    return result


def _time(function, repeats, device):
    """Return the median and the minimum of the milliseconds of a call."""
    if device == "cuda":  # between calls the cache is cleared
        return tuple(do_bench(function, warmup=10, rep=60, quantiles=[0.5, 0.0]))
    times = [_milliseconds(function) for _ in range(repeats)]
    return statistics.median(times), min(times)


@torch.no_grad()
def _forward(work):
    return work.forward()


def _gradients(outputs, work, seeds, retain_graph=False):
    return torch.autograd.grad(outputs, work.leaves, seeds, allow_unused=True, retain_graph=retain_graph)


def _milliseconds(function):
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


def _reset_peak(device):
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def _peak(device):
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(field):
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return 1024 * int(line.split()[1])


def agree(case_name: str, size: Size, device: str, dtype: str) -> str | None:
    """Compare our outputs and gradients with those of the baseline in float64; return the first difference, or None.

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
    """Return outputs and gradients for inputs that every dtype can hold exactly."""
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
