"""The jobs of `gpu.py`: `gpu_jobs.py` runs a job `[name, argument, ...]` for each line of its input.

A job prints rows: a check with its result, or a measurement in milliseconds. If the installed transformers does not
support the models, jobs that need models are skipped, and the reason is printed.
"""

import importlib
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def import_package() -> str | None:
    """Import the package, or if its models cannot be imported only the kernels; return why."""
    try:
        importlib.import_module("luna_mega")
    except Exception as error:  # whatever an unsupported transformers raises
        package = types.ModuleType("luna_mega")
        package.__path__ = [str(ROOT), str(ROOT / "luna_mega")]
        sys.modules["luna_mega"] = package
        return f"skipped: the models cannot be imported: {_words(error)}"
    return None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]


MISSING = import_package()

import torch  # noqa: E402

from luna_mega import compat  # noqa: E402
from tests.kernels import gpu  # noqa: E402

if MISSING is None:
    import floors
    from cases import CASES
    from measure import passes

    from tests.kernels import steps

Row = dict[str, object]
# Case of cases.py -> the number of its sizes on a GPU that are measured, the first ones.
OPS = {
    "luna_attention": 2,
    "luna_causal_attention": 2,
    "damped_ema": 3,
    "complex_ema": 1,
    "diagonal_ssm": 3,
    "timestep_norm": 1,
    "gated_attention": 4,
}
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
MODEL_SIZES = [{"n": 512, "b": 8}, {"n": 4096, "b": 16}]
TOY_MODEL = {"n": 64, "b": 1, "hidden_size": 64, "num_hidden_layers": 1}


def failure(error: Exception) -> str:
    """Return the result of a model that raised an error: skipped if transformers is not supported."""
    found = compat.installed("transformers")
    oldest, untested = map(compat.Version, compat.SUPPORTED["transformers"])
    if oldest <= found < untested:
        return f"failed: {_words(error)}"
    return f"skipped: transformers {found} is not supported: {_words(error)}"


def list_jobs(dry: bool = False) -> Iterator[Row]:
    """List all jobs: the checks in the order in which they begin, and the measurements."""
    if not gpu.GPU and not dry:
        raise SystemExit("PyTorch finds no GPU; --dry runs all parts on a CPU")
    versions = {name: str(compat.installed(name)) for name in ("torch", "triton", "transformers")}
    device = torch.cuda.get_device_name() if gpu.GPU else "CPU"
    yield {"part": "about", "device": device, "python": sys.version.split()[0], **versions}
    jobs = check_jobs(gpu.ONE if dry else gpu.NAMES)
    jobs += [["step", name] for name in (steps.STEPS if MISSING is None else ["all"])]
    if MISSING is None and not dry:
        sizes = [[op, "luna_mega", size] for op, count in OPS.items() for size in CASES[op].gpu[:count]]
        sizes += [[case, name, size] for name, case in MODELS.items() for size in MODEL_SIZES]
        jobs += [["compile", case, variant, {**size, "b": 2}] for case, variant, size in sizes]
    models = [["model", name, dry] for name in MODELS]
    yield {"part": "jobs", "checks": jobs, "times": [["ops", list(OPS), dry], *models]}


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
        for run in passes(CASES[case].make(variant, gpu.DEVICE, gpu.DTYPE, size))[0].values():
            run()
    except Exception as error:
        if "CUDA error" in str(error):
            raise SystemExit from error
    yield from ()


def check_operator(name: str, check: str, *options: Any) -> Iterator[Row]:
    """Run a check of a call of an operator."""
    row = _checked(lambda name: getattr(gpu, check)(name, *options), name, lambda error: f"failed: {_words(error)}")
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


def time_operators(names: list[str], dry: bool) -> Iterator[Row]:
    """Measure operators and compare them with their floors."""
    dtype = str(gpu.DTYPE).removeprefix("torch.")
    rates = floors.Rates(1e10, 1e10, 1e10, None) if dry else floors.rates(gpu.DEVICE.type, dtype)
    yield {"part": "about", "rates": vars(rates)}
    entries = []
    for case in (CASES[name] for name in names):
        for size in (case.parity or case.sizes)[:1] if dry else case.gpu[: OPS[case.name]]:
            forward, backward = (rates.milliseconds(x) for x in case.floor(gpu.DTYPE.itemsize, **size))
            found = {"forward": {"floor": forward}, "both": {"floor": forward + backward}}
            entries.append((case.name, case.name, case.ours, size, found))
    yield from _time("ops", entries)


def time_model(variant: str, dry: bool) -> Iterator[Row]:
    """Measure a training step of a model, and inference of an encoder."""
    case = MODELS[variant]
    peer = {"peer": {"encoders": "roberta_sdpa", "decoders": "llama_sdpa"}[case]}
    found = {"forward": peer, "both": peer} if case == "encoders" else {"both": peer}
    sizes = [TOY_MODEL] if dry else MODEL_SIZES
    yield from _time("model", [(variant, case, variant, size, found) for size in sizes])


def _time(part: str, entries: list[tuple]) -> Iterator[Row]:
    """Yield the milliseconds of each pass.

    All eager calls run first, because a failed capture of a CUDA graph can make later calls fail.
    """
    made = []
    for name, case, variant, size, found in entries:
        runs, label = None, " ".join(f"{key}={value}" for key, value in size.items())
        for key, more in found.items():
            row = {"part": part, "name": name, "size": label, "pass": key, **more}
            try:
                runs = runs or passes(CASES[case].make(variant, gpu.DEVICE, gpu.DTYPE, size))[0]
                row |= {"eager": _median(runs[key]), "host": _host(runs[key], 3)}
                made.append((row, runs[key]))
            except Exception as error:
                row |= {"result": failure(error)}
            yield row
    for row, run in made:
        torch.cuda.empty_cache()
        try:
            replay, results = gpu.record(lambda run=run: [x for x in run() if x is not None])
            yield row | {"graph": _median(replay)}
            del replay, results
        except Exception as error:
            yield row | {"result": f"no CUDA graph: {_words(error)}"}


def _median(run: Callable[[], object]) -> float:
    if not gpu.GPU:
        return _host(run, 1)
    from triton.testing import do_bench

    return do_bench(run, warmup=10, rep=50, return_mode="median")  # it clears the cache between calls


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
    "ops": time_operators,
    "model": time_model,
    "dry": dry_run,
}


def run(name: str, *arguments: object) -> Iterator[Row]:
    """Yield the rows of a job."""
    if MISSING and name in ("step", "ops", "model"):
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
