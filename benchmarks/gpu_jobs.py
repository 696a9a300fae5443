"""The jobs of `gpu.py`: `gpu_jobs.py` runs a job `[name, argument, ...]` for each line of its input.

A job prints rows: a check with its result, or a measurement in milliseconds. If the installed transformers does not
support the models, jobs that need models are skipped, and the reason is printed.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from cases import CASES, MISSING, words
from measure import clock, passes

from luna_mega import compat
from tests.kernels import gpu

if MISSING is None:
    from tests.kernels import steps

Row = dict[str, object]
# Variant -> case, the most important ones first.
MODELS = {
    "luna_128": "encoders",
    "mega_chunk_128": "encoders",
    "roberta_sdpa": "encoders",
    "megalodon_512": "decoders",
    "llama_sdpa": "decoders",
    "mega_chunk_512": "decoders",
    "luna_32": "decoders",
    "modernbert_sdpa": "encoders",
}
PEERS = {"encoders": "roberta_sdpa", "decoders": "llama_sdpa"}
MODEL_SIZES = [{"n": 512, "b": 8}, {"n": 4096, "b": 16}]
CLOCK = argparse.Namespace(device=gpu.DEVICE.type, clock="wall")
TOY_MODEL = {"n": 64, "b": 1, "hidden_size": 64, "num_hidden_layers": 1}


def failure(error: Exception) -> str:
    """Return the result of a model that raised an error: skipped if transformers is not supported."""
    found = compat.installed("transformers")
    oldest, untested = map(compat.Version, compat.SUPPORTED["transformers"])
    if oldest <= found < untested:
        return f"failed: {words(error)}"
    return f"skipped: transformers {found} is not supported: {words(error)}"


def list_jobs(dry: bool = False) -> Iterator[Row]:
    """List all jobs: the checks in the order in which they begin, and the measurements."""
    if not gpu.GPU and not dry:
        raise SystemExit("PyTorch finds no GPU; --dry runs all parts on a CPU")
    versions = {name: str(compat.installed(name)) for name in ("torch", "triton", "transformers")}
    device = torch.cuda.get_device_name() if gpu.GPU else "CPU"
    yield {"part": "about", "device": device, "python": sys.version.split()[0], **versions}
    times, jobs = measurements(dry), check_jobs(gpu.ONE if dry else gpu.NAMES)
    jobs += [["step", name] for name in (steps.STEPS if MISSING is None else ["all"])]
    if not dry:
        made = {json.dumps(entry[1:4]): entry[1:4] for _, _, entries in times for entry in entries}
        jobs += [["compile", case, variant, {**size, "b": 2}] for case, variant, size in made.values()]
    yield {"part": "jobs", "checks": jobs, "times": times}


def measurements(dry: bool) -> list[list]:
    """Return the jobs that measure ops and models: `[part, name, [name, case, variant, size, fields of the row] ...]`.

    Ops are measured next to copies of their input and output, and models next to a model of equal size.
    """
    ops, models = [], []
    for case in (CASES[name] for name in gpu.OPS):
        for size in (case.check or case.sizes)[:1] if dry else case.gpu[:3]:
            names = {case.name: case.ours} | ({f"{case.name} copy": "copy"} if "copy" in case.variants else {})
            pairs = product(names.items(), ("forward", "both"))
            ops += [[name, case.name, variant, size, {"pass": key}] for (name, variant), key in pairs]
    for name, case in MODELS.items():
        keys = ("forward", "both") if case == "encoders" else ("both",)
        sizes, fields = [TOY_MODEL] if dry else MODEL_SIZES, [{"pass": key, "peer": PEERS[case]} for key in keys]
        models.append(["model", name, [[name, case, name, *entry] for entry in product(sizes, fields)]])
    return [["ops", "all", ops], *models]


def check_jobs(names: list[str]) -> list[list]:
    """Return a job for each check of a call, and for each dtype and length of its outputs and gradients."""
    jobs, slow = [], ("luna_causal_attention", "gated_attention")
    for check, name in gpu.checks(names):
        split = [*product(gpu.MODES, reversed(gpu.LENGTHS))] if check is gpu.outputs_and_gradients else [()]
        jobs += [["operator", name, check.__name__, *options] for options in split]
    # The jobs of a length find many kernels that those of other lengths have compiled. The most kernels come first.
    return sorted(jobs, key=lambda job: (len(job) < 5, -job[4] if job[4:] else 0, not job[1].startswith(slow)))


def compile_kernels(case: str, variant: str, size: dict) -> Iterator[Row]:
    """Compile kernels that are measured later; the measurement reports the errors."""
    try:
        for run in passes(CASES[case].make(variant, gpu.DEVICE, gpu.DTYPE, size)).values():
            run()
    except Exception as error:
        if "CUDA error" in str(error):
            raise SystemExit from error
    yield from ()


def check_operator(name: str, check: str, *options: Any) -> Iterator[Row]:
    """Run a check of a call of an operator."""
    row = _checked(lambda name: getattr(gpu, check)(name, *options), name, lambda error: f"failed: {words(error)}")
    about = f"{name.strip()}: {check.replace('_', ' ')}"
    yield {"part": "operator", "name": ", ".join((about, *map(str, options))), **row}


def check_step(name: str) -> Iterator[Row]:
    """Capture a step of a model in a CUDA graph and replay it."""
    yield {"part": "step", "name": name, **_checked(steps.check, name, failure)}


def _checked(check: Callable[[str], None], name: str, failed: Callable[[Exception], str]) -> Row:
    start = time.perf_counter()
    try:
        check(name)
        result = "ok"
    except Exception as error:  # it is reported, and the other checks run
        result = failed(error)
    return {"result": result, "seconds": time.perf_counter() - start}


def measure(part: str, _: str, entries: list[tuple]) -> Iterator[Row]:
    """Yield the milliseconds of each pass.

    All eager calls run first, because a failed capture of a CUDA graph can make later calls fail.
    """
    made, runs, last = [], {}, None
    for name, case, variant, size, about in entries:
        row = {"part": part, "name": name, "size": " ".join(f"{key}={value}" for key, value in size.items()), **about}
        try:
            if last != (case, variant, size):
                runs = passes(CASES[case].make(variant, gpu.DEVICE, gpu.DTYPE, size))
                last = (case, variant, size)
            run = runs[about["pass"]]
            row |= {"eager": 1000 * clock(run, CLOCK), "host": _host(run, 3)}
            made.append((row, run))
        except Exception as error:
            row |= {"result": failure(error)}
        yield row
    for row, run in made:
        torch.cuda.empty_cache()
        try:
            replay, results = gpu.record(lambda run=run: [x for x in run() if x is not None])
            yield row | {"graph": 1000 * clock(replay, CLOCK)}
            del replay, results
        except Exception as error:
            yield row | {"result": f"no CUDA graph: {words(error)}"}


def _host(run: Callable[[], object], repeats: int) -> float:
    """Return the median time in milliseconds until a call returns, while the GPU has no other work."""
    times = []
    for _ in range(repeats):
        if gpu.GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def dry_run() -> Iterator[Row]:
    """Run all jobs in this process."""
    gpu.LENGTHS = (17,)
    about, jobs = list_jobs(True)
    yield about
    for job in (*jobs["checks"], *jobs["times"]):
        yield from run(*job)


JOBS = {
    "list": list_jobs,
    "compile": compile_kernels,
    "operator": check_operator,
    "step": check_step,
    "ops": partial(measure, "ops"),
    "model": partial(measure, "model"),
    "dry": dry_run,
}


def run(name: str, *arguments: object) -> Iterator[Row]:
    """Yield the rows of a job."""
    if MISSING and name in ("step", "model"):
        yield {"part": name, "name": str(arguments[0]), "result": MISSING}
    else:
        yield from JOBS[name](*arguments)


def main() -> None:
    torch.zeros(1, device=gpu.DEVICE)
    print(json.dumps({"part": "ready"}), flush=True)
    for line in sys.stdin:
        for row in run(*json.loads(line)):
            print(json.dumps(row), flush=True)
            if row["part"] in ("operator", "step") and row["result"].startswith("failed") and gpu.GPU:
                os._exit(0)  # later calls may fail as well
        print(json.dumps({"part": "done"}), flush=True)


if __name__ == "__main__":
    main()
