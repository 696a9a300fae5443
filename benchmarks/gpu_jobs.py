"""The jobs of `gpu.py`: `gpu_jobs.py '[name, argument, ...]'` runs a job for each line of its input.

A job prints rows: a check with its result, or a measurement in milliseconds. If the installed transformers does not
support the models, jobs that need models are skipped, and the reason is printed.
"""

import importlib
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

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


def compile_kernels(index: int, count: int, dry: bool) -> Iterator[Row]:
    """Compile a part of the kernels that later jobs launch. Those jobs report the errors."""
    if not gpu.GPU and not dry:
        raise SystemExit("PyTorch finds no GPU; --dry runs all parts on a CPU")
    if index == 0:
        versions = {name: str(compat.installed(name)) for name in ("torch", "triton", "transformers")}
        device = torch.cuda.get_device_name() if gpu.GPU else "CPU"
        yield {"part": "about", "device": device, "python": sys.version.split()[0], **versions}
        models = [["model", name, dry] for name in MODELS]
        jobs = [["operator", name, dry] for name in gpu.OPS]
        jobs += [["step", name] for name in (steps.STEPS if MISSING is None else ["all"])]
        yield {"part": "jobs", "checks": jobs, "times": [["ops", list(OPS), dry], *models]}
    work = [(gpu.run, name, n, mode) for mode in gpu.MODES for name in gpu.NAMES for n in (256, 257)]
    if MISSING is None:
        sizes = [(op, size) for op, count in OPS.items() for size in CASES[op].gpu[:count]]
        work += [(_call, op, "luna_mega", {**size, "b": 2}) for op, size in sizes]
        work += [(_call, case, name, {**size, "b": 2}) for name, case in MODELS.items() for size in MODEL_SIZES]
    for function, *arguments in work[index::count] if not dry else ():
        try:
            function(*arguments)
        except Exception as error:
            if "CUDA error" in str(error):
                return


def _call(case: str, variant: str, size: dict) -> None:
    for run in passes(CASES[case].make(variant, gpu.DEVICE, gpu.DTYPE, size))[0].values():
        run()


def check_operator(op: str, dry: bool) -> Iterator[Row]:
    """Run all checks of the calls of an operator."""
    gpu.LENGTHS = (17,) if dry else gpu.LENGTHS
    names = [name for name in gpu.NAMES if name.split(" ")[0].removesuffix("_step") == op]
    for check, name in gpu.checks(names[:1] if dry else names):
        about = f"{name.strip()}: {check.__name__.replace('_', ' ')}"
        row = _checked(check, name, lambda error: f"failed: {_words(error)}")
        yield {"part": "operator", "name": about, **row}
        if "CUDA error" in row["result"]:
            yield {"part": "operator", "name": op, "result": "failed: no further checks after the CUDA error"}
            return


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
    about, jobs = compile_kernels(0, 1, True)
    yield about
    for job in (*jobs["checks"], *jobs["times"]):
        yield from run(*job)


JOBS = {
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
    if sys.stdin.readline():
        for row in run(*json.loads(sys.argv[1])):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
