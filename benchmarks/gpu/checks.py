"""Checks of the kernels where they run: parity, bits, compiled steps, CUDA graphs, compilation ahead of the tuning."""

import math
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import transformers
import triton
from cases import CASES
from gpu.calls import calls, results
from measure import TOLERANCES
from torch.utils.checkpoint import checkpoint

import luna_mega
from luna_mega.kernels import api
from luna_mega.kernels.common import triton_choice, triton_launch

OPS = ("luna_attention", "luna_causal_attention", "damped_ema", "gated_attention")
# dtype -> how float32 matrices are multiplied.
MODES = {
    "float32 tf32x3": (torch.float32, "tf32x3"),
    "bfloat16": (torch.bfloat16, "tf32x3"),
    "float16": (torch.float16, "tf32x3"),
    "float32 ieee": (torch.float32, "ieee"),
}
# Sizes of the registry's calls that an interpreter has the time for.
TOY = {
    "luna_attention": {"l": 16, "n": 20, "heads": 1, "head_size": 16},
    "luna_causal_attention": {"l": 16, "n": 20, "heads": 1, "head_size": 16},
    "damped_ema": {"b": 1, "n": 20, "directions": 1, "d": 32},
    "gated_attention": {"n": 32, "function": "laplace", "chunk": 16, "shared": 16, "values": 32},
}


class Setting(NamedTuple):
    """Place where the report runs, and whether at toy sizes, interpreted."""

    device: torch.device
    toy: bool
    output: str


Cases = Iterator[tuple[str, Callable[[], list[dict]]]]


def device(setting: Setting) -> Cases:
    """Tell the machine and its versions; every op must choose its Triton kernels on a GPU."""

    def tell():
        versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
        versions |= {"transformers": transformers.__version__, "luna_mega": luna_mega.__version__}
        row = {"device": "Triton interpreter", "versions": versions}
        if setting.device.type == "cuda":
            properties = torch.cuda.get_device_properties(setting.device)
            row["device"] = properties.name
            versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
            row |= {
                "capability": f"{properties.major}.{properties.minor}",
                "processors": properties.multi_processor_count,
                "memory_gb": round(properties.total_memory / 2**30, 1),
                "shared_memory_kb": properties.shared_memory_per_block_optin / 1024,
            }
        return [row]

    def chosen(op):
        told = api.explain(op, device=setting.device)
        return [{"told": told, "ok": setting.toy or "'triton'" in told}]

    yield "versions", tell
    for op in OPS:
        yield f"backend of {op}", partial(chosen, op)


def parity(setting: Setting) -> Cases:
    """Compare outputs and gradients of every call with the reference in float64, at a handful of lengths."""
    lengths = (20,) if setting.toy else (1, 63, 200, 1000)
    names = [name for name, _ in calls(1, setting.toy)]
    for number, mode in enumerate(MODES):
        for name in names[number % 3 :: 3] if setting.toy else names:
            yield f"{name}, {mode}", partial(_compare, setting, name, mode, lengths)


def _compare(setting, name, mode, lengths):
    dtype, precision = MODES[mode]
    worst, at = 0.0, ""
    for n in lengths:
        call = dict(calls(n, setting.toy))[name]()
        expected = results(call, setting.device, torch.float64, "reference")
        with api.use_float32_precision(precision):
            actual = results(call, setting.device, dtype, "triton")
        for tensor, theirs in expected.items():
            # Of one token many gradients vanish: their error is compared with gradients of size 1.
            least = math.sqrt(theirs.numel()) if n == 1 else 1e-3
            error = _relative(actual[tensor], theirs, least)
            if error > worst:
                worst, at = error, f"n = {n}, {tensor}"
    return [{"error": worst, "at": at, "tolerance": TOLERANCES[dtype], "ok": worst <= TOLERANCES[dtype]}]


def _relative(actual, expected, least=1e-3):
    error = ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=least)).item()
    return math.inf if math.isnan(error) else error


def bits(setting: Setting) -> Cases:
    """Run large shapes twice: the same bits, with deterministic mode off; and compare them with PyTorch's operators."""
    for dtype in (torch.bfloat16, torch.float32)[: 1 + (not setting.toy)]:
        for op in OPS:
            case = CASES[op]
            for size in [TOY[op]] if setting.toy else case.gpu[:: len(case.gpu) - 1]:
                yield f"{op} {_of(size)} {_word(dtype)}", partial(_twice, setting, case, size, dtype)


def _twice(setting, case, size, dtype):
    with api.use_backend("triton"):
        work = case.make(case.ours, setting.device, dtype, size)
        step = _step(work)
        first, second = step(), step()
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    del second
    wide = case.make(case.ours, setting.device, torch.float32, size)
    with torch.no_grad():
        for leaf, narrow in zip(wide.leaves, work.leaves, strict=True):
            leaf.copy_(narrow)
    with api.use_backend("torch"):
        expected = _step(wide)()
    error = max(_relative(a, b) for a, b in zip(first, expected, strict=True))
    # In float32, PyTorch's operators round as much as the kernels do.
    tolerance = max(TOLERANCES[dtype], 1e-3)
    return [{"same_bits": same, "error": error, "tolerance": tolerance, "ok": same and error <= tolerance}]


def _step(work):
    """Return a function that computes outputs and gradients of a `Work`."""
    seeds = []

    def step():
        outputs = work.forward()
        if not seeds:
            generator = torch.Generator().manual_seed(1)
            seeds.extend(torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs)
        gradients = torch.autograd.grad(outputs, work.leaves, seeds, allow_unused=True)
        return [x.detach() for x in (*outputs, *gradients) if x is not None]

    return step


def compiled(setting: Setting) -> Cases:
    """Train one compiled step of each op, and one that is recomputed with dropout."""
    compiler = "aot_eager" if setting.toy else "inductor"
    for op in OPS:
        size = TOY[op] if setting.toy else CASES[op].gpu[0] | {"b": 2}
        for dtype in (torch.float32,) if setting.toy else (torch.bfloat16, torch.float32):
            yield f"{op} by {compiler}, {_word(dtype)}", partial(_compiled, setting, op, size, dtype, compiler)
        if op != "damped_ema" and not (setting.toy and op == "luna_causal_attention"):
            yield f"{op} recomputed with dropout", partial(_recomputed, setting, op, size)


def _compiled(setting, op, size, dtype, compiler):
    work = CASES[op].make(CASES[op].ours, setting.device, dtype, size)
    with api.use_backend("triton"):
        expected = _step(work)()
        compiled = torch.compile(work.forward, fullgraph=True, dynamic=False, backend=compiler)
        actual = _step(type(work)(compiled, work.leaves))()
    error = max(_relative(a, b) for a, b in zip(actual, expected, strict=True))
    return [{"error": error, "tolerance": TOLERANCES[dtype], "ok": error <= TOLERANCES[dtype]}]


def _recomputed(setting, op, size):
    case, dropping = CASES[op], partial(getattr(api, op), dropout=0.1)
    make = case.variants[case.ours].func
    work = make(dropping, setting.device, torch.bfloat16 if not setting.toy else torch.float32, **size)
    again = type(work)(lambda: checkpoint(work.forward, use_reentrant=False), work.leaves)
    seen = []
    with api.use_backend("triton"):
        for each in (work, again):
            step = _step(each)
            torch.manual_seed(3)
            seen.append(step())
    return [{"ok": all(torch.equal(a, b) for a, b in zip(*seen, strict=True))}]


def graph(setting: Setting) -> Cases:
    """Capture a step of each op in a CUDA graph after warm-up; replayed for new values, it gives the same bits."""
    for op in OPS:
        size = TOY[op] if setting.toy else CASES[op].gpu[0] | {"b": 2}
        yield op, partial(_captured, setting, op, size)


def _captured(setting, op, size):
    dtype = torch.float32 if setting.toy else torch.bfloat16
    work = CASES[op].make(CASES[op].ours, setting.device, dtype, size)
    with api.use_backend("triton"):
        step = _step(work)
        replay = capture(step, setting.device)
        with torch.no_grad():
            for leaf in work.leaves:
                leaf.mul_(-0.5)
        actual, expected = [x.clone() for x in replay()], step()
    return [{"ok": all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))}]


def capture(step: Callable, device: torch.device) -> Callable:
    """Return a function that replays `step` from a CUDA graph and returns its results; on a CPU, `step` itself."""
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    def replay():
        graph.replay()
        return captured

    return replay


def shown_sizes(op: str) -> list[dict]:
    """Return those of the registry's sizes that there is time for: the first three and the last one."""
    return [*CASES[op].gpu[:3], CASES[op].gpu[-1]]


def tuned_sizes(setting: Setting) -> Iterator[tuple[str, str, torch.dtype, dict]]:
    """Yield (name, op, dtype, size) of the calls for which configurations are timed."""
    for dtype in (torch.bfloat16,) if setting.toy else (torch.bfloat16, torch.float32):
        for op in OPS:
            for size in [TOY[op]] if setting.toy else shown_sizes(op)[: 2 if dtype == torch.float32 else None]:
                yield f"{op} {_of(size)} {_word(dtype)}", op, dtype, size


def candidates(setting: Setting) -> Cases:
    """Compile the configurations that are timed afterwards, in several processes, into Triton's cache."""
    for name, op, dtype, size in tuned_sizes(setting):
        yield name, partial(_compile_all, setting, op, dtype, size)


def _compile_all(setting, op, dtype, size):
    batch = {"b": min(size["b"], 2)} if "b" in size else {}
    work = CASES[op].make(CASES[op].ours, setting.device, dtype, size | batch)
    recording = triton_launch.recording(triton_launch.target(setting.device))
    with api.use_backend("triton"), recording as all_, triton_choice.choosing(_run_all):
        _step(work)()
    refused = []
    for launch in () if setting.toy else all_:
        try:
            launch.kernel.warmup(
                *launch.arguments, grid=launch.grid, **launch.constants,
                num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True,
            )  # fmt: skip
        except triton_choice.REFUSALS as error:  # the tuning tells it of the configuration
            refused.append(f"{launch.kernel.fn.__name__}: {error}")
    return [{"launches": len(all_), "refused": refused}]


def _run_all(kernel, key, configurations, run):
    """Return the result of the first configuration, after running the others."""
    return [run(configuration) for configuration in configurations][0]


def _of(size):
    return " ".join(f"{name}={value}" for name, value in size.items())


def _word(dtype):
    return str(dtype).removeprefix("torch.")
