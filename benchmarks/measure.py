"""Time and peak memory of one `Work`, in a process of its own so that no measurement sees another's memory."""

import statistics
import time

import torch
from cases import CASES, Size


def measure(case_name: str, variant: str, size: Size, device: str, dtype: str, threads: int) -> dict[str, float]:
    """Median milliseconds of forward (no gradient) and of forward and backward, and peak megabytes of the latter."""
    if threads:
        torch.set_num_threads(threads)
    case = CASES[case_name]
    work = case.variants[variant](torch.device(device), getattr(torch, dtype), **size)
    seeds = [torch.randn_like(output) for output in _forward(work)]
    base = _reset_peak(device)
    _forward_backward(work, seeds)  # the first call, and the one whose memory counts
    peak = _peak(device) - base
    result = {"memory_mb": peak / 2**20}
    for name, function in (("forward_ms", lambda: _forward(work)), ("both_ms", lambda: _forward_backward(work, seeds))):
        times = [_milliseconds(function, device) for _ in range(case.repeats)]
        result[name], result[name.replace("_ms", "_min_ms")] = statistics.median(times), min(times)
    return result


@torch.no_grad()
def _forward(work):
    return work.forward()


def _forward_backward(work, seeds):
    return torch.autograd.grad(work.forward(), work.leaves, seeds, allow_unused=True)


def _milliseconds(function, device):
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return 1000 * (time.perf_counter() - start)


def _synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


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


def agree(case_name: str, size: Size, device: str) -> str | None:
    """Whether all variants of a case give the same outputs and gradients in float64; the first difference, or None."""
    case = CASES[case_name]
    results = {}
    for variant, make in case.variants.items():
        work = make(torch.device(device), torch.float64, **size)
        outputs = work.forward()
        gradients = torch.autograd.grad(sum(output.sin().sum() for output in outputs), work.leaves)
        results[variant] = [*outputs, *gradients]
    ours = results.pop(case.ours)
    for variant, theirs in results.items():
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not torch.allclose(a, b, rtol=1e-9, atol=1e-10):
                worst = (a - b).abs().max()
                return f"{case_name} {size}: tensor {index} of {case.ours} and {variant} differ by {worst:.1e}"
    return None
