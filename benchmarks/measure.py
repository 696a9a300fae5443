"""Measure time and peak memory of variants in turn, and check that they compute the same."""

import ctypes
import itertools
import os
import resource
import sys
import time
from argparse import Namespace
from collections.abc import Callable

import torch
from cases import Case, Size, Work
from report import Row

BUDGET = 1.5  # seconds of a variant at one size, after which it is repeated once at most
SHORT = 100.0  # milliseconds of a call that is repeated at once
# Relative, of the norm.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def passes(work: Work) -> dict[str, Callable[[], object]]:
    """Return the functions of a forward pass without gradients and of a training step, if there is one."""
    seeds: list[torch.Tensor] = []

    def both():
        outputs = work.forward()
        seeds[:] = seeds or [torch.randn_like(output) for output in outputs]
        return torch.autograd.grad(outputs, work.leaves, seeds, allow_unused=True)

    if work.train is not None:
        return {"both": work.train}
    return {"forward": torch.no_grad()(work.forward)} | ({"both": both} if work.leaves else {})


def measure(case: Case, size: Size, variants: list[str], options: Namespace, rates: dict[tuple, float]) -> list[Row]:
    """Return a row for each variant and number of threads, with the milliseconds and peak megabytes of its passes.

    Variants alternate in this process, and the minimum is returned. `rates` has the seconds per token of each variant
    at the sizes before, and is updated. If a variant fails, for example because it is out of memory, the row has the
    reason in `error`. Variants of packages that are not installed have no row.
    """
    rows, runs, tokens = [], [], size.get("n", 1) * size.get("b", 1)
    for variant, threads in itertools.product(variants, options.threads):
        row = {"case": case.name, "size": size, "variant": variant, "threads": threads}
        rows.append(row)
        torch.set_num_threads(threads)
        try:
            if tokens * rates.get((variant, threads), 0.0) > options.time_limit:
                raise TimeoutError(f"more than {options.time_limit:g} s")
            work = case.make(variant, torch.device(options.device), getattr(torch, options.dtype), size)
            functions = passes(work)
            row |= {"elements": work.elements or work.leaves[0].numel()}
            row |= {"parameters": work.parameters} if work.parameters else {}
            for name, run in functions.items():
                row |= _first(name, run, options)
            runs.append((row, functions))
        except ImportError as error:
            print(f"{variant} is left out: {error}", file=sys.stderr)
            rows.remove(row)
        except Exception as error:  # the table shows it, and the other variants are measured
            row["error"] = (str(error) or repr(error)).partition("\n")[0][:100]
    spent = [0.0] * len(runs)
    for number in range(options.rounds):
        for index, (row, functions) in enumerate(runs):
            if number < 2 or spent[index] < BUDGET:
                torch.set_num_threads(row["threads"])
                for name, run in functions.items():
                    # After another variant, the caches do not contain the code of a short call.
                    for _ in range(3 if row[f"{name}_ms"] < SHORT else 1):
                        seconds = clock(run, options)
                        spent[index] += seconds
                        row[f"{name}_ms"] = round(min(row[f"{name}_ms"], 1000 * seconds), 4)
    for row, functions in runs:
        rates[row["variant"], row["threads"]] = sum(row[f"{name}_ms"] for name in functions) / 1000 / tokens
    return rows


def _first(name: str, run: Callable[[], object], options: Namespace) -> Row:
    """Return the time of the first call, and the peak memory of the second one, or of the first if it is slow."""
    for _ in range(2):
        base = _reset_peak(options.device)
        seconds = clock(run, options)
        memory = _peak(options.device)
        if seconds > BUDGET / 2 or not options.rounds:
            break
    # Other allocators keep freed memory, which the peak above the base does not include.
    known = options.device == "cuda" or "malloc" not in os.environ.get("LD_PRELOAD", "")
    return {f"{name}_ms": 1000 * seconds} | ({f"{name}_mb": round((memory - base) / 2**20, 2)} if known else {})


def clock(run: Callable[[], object], options: Namespace) -> float:
    """Return the seconds of a call: processor time or wall time; on a GPU, the median of several calls."""
    if options.device == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=10, rep=60, return_mode="median") / 1000  # clears the cache between calls
    now = time.process_time if options.clock == "cpu" else time.perf_counter
    start = now()
    run()
    return now() - start


def limit_memory() -> None:
    """Limit the memory of this process to the free memory, so that it fails with an error and no other process does."""
    with open("/proc/meminfo", encoding="utf-8-sig") as file:
        free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    limit = _status("VmSize") + free
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _reset_peak(device: str) -> int:
    """Return the memory in use, from which the peak is counted."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps freed memory
        trim(0)
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    return _status("VmRSS")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="utf-8-sig") as file:
        line = next(line for line in file if line.startswith(field))
    return 1024 * int(line.split()[1])


def agree(case: Case, size: Size, device: str, dtype: str) -> str | None:
    """Compare outputs and gradients of all variants with the reference in float64; return the first difference.

    Variants that this machine does not support are not compared.
    """
    expected = _results(case, "reference", size, device, torch.float64)
    for variant in case.variants:
        for kind in {torch.float32, getattr(torch, dtype)} if variant != "copy" else ():
            try:
                values = _results(case, variant, size, device, kind)
            except Exception:
                if variant == case.ours:
                    raise
                continue
            for index, (mine, theirs) in enumerate(zip(values, expected, strict=True)):
                error = ((mine - theirs).norm() / theirs.norm().clamp(min=1e-3)).item()
                if not error <= TOLERANCES[kind]:
                    return f"{case.name} {size}: tensor {index} of {variant} in {kind} is off by {error:.1e}"
    return None


def _results(case: Case, variant: str, size: Size, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the outputs and gradients, for inputs and seeds that all dtypes represent exactly."""
    work = case.make(variant, torch.device(device), dtype, size)
    outputs, generator = work.forward(), torch.Generator().manual_seed(1)
    seeds = [torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in outputs]
    return [x.detach().double() for x in (*outputs, *torch.autograd.grad(outputs, work.leaves, seeds))]
