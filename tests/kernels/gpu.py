"""Checks of the kernels on a GPU, for `make gpu` and `test_gpu.py`. They need only torch and Triton.

Without a GPU, the kernels are interpreted with few tokens, and a function that would be captured in a CUDA graph is
called again.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch.utils.checkpoint import checkpoint

from luna_mega.kernels import api
from luna_mega.kernels.common.comparison import ROUNDING, row_error
from tests.kernels import calls

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
NAMES = [name for name, _ in calls.calls(1, not GPU)]
TRAINED = [name for name in NAMES if not name.split(" ")[0].endswith("_step")]
OPS = tuple(dict.fromkeys(name.split(" ")[0] for name in TRAINED))
# The first call of each op.
ONE = [next(name for name in TRAINED if name.split(" ")[0] == op) for op in OPS]
# dtype -> precision of products of float32 matrices.
MODES = {"float32 ieee": (torch.float32, "ieee")}
if GPU:
    MODES["float32 tf32x3"] = (torch.float32, "tf32x3")
    MODES |= {"bfloat16": (torch.bfloat16, "tf32x3"), "float16": (torch.float16, "tf32x3")}
# The boundaries of chunks (64) and of the segments of programs (256), and a length with many chunks and segments.
LENGTHS = (1, 63, 64, 65, 256, 257, 1000, 4096) if GPU else (1, 16, 17, 33)
LONG = 4096 if GPU else 20
DTYPE = torch.bfloat16 if GPU else torch.float32


def make(name: str, n: int) -> calls.Call:
    return dict(calls.calls(n, not GPU))[name]()


def run(name: str, n: int, mode: str | None = None) -> dict[str, torch.Tensor]:
    """Return outputs and gradients by name: of the Triton kernels, or of the reference in float64 if `mode` is None."""
    if mode is None:
        return calls.results(make(name, n), DEVICE, torch.float64, "reference")
    dtype, precision = MODES[mode]
    with api.use_float32_precision(precision):
        return calls.results(make(name, n), DEVICE, dtype, "triton")


def check(actual: dict, expected: dict, dtype: torch.dtype, n: int = LONG, about: str = "") -> None:
    """Compare tensors row by row.

    With one token, many gradients vanish, so errors are absolute for values below 1.
    """
    for name, theirs in expected.items():
        assert actual[name].shape == theirs.shape
        error = row_error(actual[name], theirs, 1.0 if n == 1 else 1e-3)
        assert error <= ROUNDING[dtype], f"{about}{name}: relative error {error:.1e}"


def step_of(name: str, n: int = LONG, wrap: Callable = lambda function: function):
    """Return the leaves of a call, and a function that computes its outputs and gradients with the Triton kernels."""
    call = make(name, n)
    wide = torch.promote_types(DTYPE, torch.float32)
    leaves = {name: x.to(DEVICE, wide if name in calls.WIDE else DTYPE) for name, x in call.leaves.items()}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    forward, seeds = wrap(lambda: call.run(backend="triton", **leaves)), []

    def step() -> list[torch.Tensor]:
        outputs = forward()
        seeds[:] = seeds or [torch.randn_like(x) for x in outputs]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds)
        return [x.detach() for x in (*outputs, *gradients)]

    return list(leaves.values()), step


def record(step: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Capture a function in a CUDA graph; return a function that replays the graph, and the tensors that it writes."""
    if not GPU:
        results = [x.clone() for x in step()]
        return lambda: [x.copy_(y) for x, y in zip(results, step(), strict=True)], results
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def outputs_and_gradients(name: str, mode: str | None = None, length: int | None = None) -> None:
    """Check one mode (None: all) at one length (None: all)."""
    for n in LENGTHS if length is None else (length,):
        expected = run(name, n)
        for mode_ in MODES if mode is None else (mode,):
            check(run(name, n, mode_), expected, MODES[mode_][0], n, f"{mode_}, n = {n}, ")


def two_runs_have_the_same_bits(name: str) -> None:
    first, second = (run(name, LONG, "bfloat16" if GPU else "float32 ieee") for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def recomputed_training_step(name: str) -> None:
    results = []
    for wrap in (lambda function: function, lambda function: lambda: checkpoint(function, use_reentrant=False)):
        torch.manual_seed(0)
        results.append(step_of(name, wrap=wrap)[1]())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def memory_is_linear_and_is_freed(name: str) -> None:
    peaks, kept = [], None
    for n in (8192, 8192, 16384, 32768):  # the first run allocates workspaces that are not freed
        _, step = step_of(name, n)
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - start) / 2**20)
        del step, _
        kept = torch.cuda.memory_allocated() if kept is None else kept
    assert all(longer <= 2.2 * shorter + 8 for shorter, longer in pairwise(peaks[1:])), peaks
    assert torch.cuda.memory_allocated() - kept < 2**20


def training_step_in_a_cuda_graph(name: str) -> None:
    leaves, step = step_of(name)
    replay, captured = record(step)
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(0.5)
    replay()
    actual = [x.clone() for x in captured]
    assert all(torch.equal(a, b) for a, b in zip(actual, step(), strict=True))


def checks(names: list[str] = NAMES) -> Iterator[tuple[Callable[[str], None], str]]:
    """Yield (check, name of a call).

    Graphs come last, because a failed capture can make later calls fail.
    """
    linear = [name for name in ONE if "gated_attention" not in name] if GPU else []
    for check_, names_ in (
        (outputs_and_gradients, NAMES),
        (two_runs_have_the_same_bits, TRAINED),
        (recomputed_training_step, ONE),
        (memory_is_linear_and_is_freed, linear),
        (training_step_in_a_cuda_graph, ONE),
    ):
        yield from ((check_, name) for name in names_ if name in names)
