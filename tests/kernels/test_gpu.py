"""Tests of the kernels on a GPU: `make gpu`, or `PYTHONPATH=. python3 -m pytest -m gpu`.

Without a GPU the kernels are interpreted, with few tokens.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from luna_mega.kernels import api
from luna_mega.kernels.common.comparison import ROUNDING, row_error
from tests.kernels import calls

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
OPS = ("luna_attention", "luna_causal_attention", "damped_ema", "complex_ema", "timestep_norm", "gated_attention")
NAMES = [name for name, _ in calls.calls(1, not GPU)]
TRAINED = [name for name in NAMES if not name.split(" ")[0].endswith("_step")]
# One call of each op.
ONE = [next(name for name in TRAINED if name.split(" ")[0] == op) for op in OPS]
# dtype -> multiplication of float32 matrices.
MODES = {
    "float32 tf32x3": (torch.float32, "tf32x3"),
    "float32 ieee": (torch.float32, "ieee"),
    "bfloat16": (torch.bfloat16, "tf32x3"),
    "float16": (torch.float16, "tf32x3"),
}
# The borders of chunks (64) and of the segments of programs (256), and a length with many of both.
LENGTHS = (1, 63, 64, 65, 256, 257, 1000, 4096) if GPU else (1, 16, 17, 33)
LONG = 4096 if GPU else 20


def make(name: str, n: int) -> calls.Call:
    return dict(calls.calls(n, not GPU))[name]()


def run(name: str, n: int, dtype: torch.dtype, backend: str = "triton") -> dict[str, torch.Tensor]:
    """Return outputs and gradients by name."""
    return calls.results(make(name, n), DEVICE, dtype, backend)


def check(actual: dict, expected: dict, dtype: torch.dtype, n: int = LONG) -> None:
    """Compare tensors row by row. For one token many gradients vanish, so their errors are compared with 1."""
    for name, theirs in expected.items():
        assert actual[name].shape == theirs.shape
        error = row_error(actual[name], theirs, 1.0 if n == 1 else 1e-3)
        assert error <= ROUNDING[dtype], f"{name}: relative error {error:.1e}"


def step_of(name: str, n: int, dtype: torch.dtype, wrap: Callable = lambda function: function, **options):
    """Return the leaves of a call, and a function that computes its outputs and gradients with the Triton kernels."""
    call = make(name, n)
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {name: x.to(DEVICE, wide if name in calls.WIDE else dtype) for name, x in call.leaves.items()}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    forward, seeds = wrap(lambda: call.run(backend="triton", **leaves, **options)), []

    def step() -> list[torch.Tensor]:
        outputs = forward()
        seeds[:] = seeds or [torch.randn_like(x) for x in outputs]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds)
        return [x.detach() for x in (*outputs, *gradients)]

    return list(leaves.values()), step


@pytest.mark.skipif(not GPU, reason="no GPU: the PyTorch operators are the default")
@pytest.mark.parametrize("op", OPS)
def test_the_default_backend_is_triton(op):
    assert "'triton'" in api.explain(op, device=DEVICE)


@pytest.mark.parametrize("mode", MODES if GPU else ["float32 ieee"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients(name, mode):
    dtype, precision = MODES[mode]
    for n in LENGTHS:
        with api.use_float32_precision(precision):
            actual = run(name, n, dtype)
        check(actual, run(name, n, torch.float64, "reference"), dtype, n)


@pytest.mark.parametrize("name", TRAINED)
def test_two_runs_have_the_same_bits(name):
    first, second = (run(name, LONG, torch.bfloat16 if GPU else torch.float32) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ONE)
def test_compiled_training_step(name):
    dtype, backend = (torch.bfloat16, "inductor") if GPU else (torch.float32, "aot_eager")
    _, eager = step_of(name, LONG, dtype)
    torch.manual_seed(0)
    expected = eager()
    _, step = step_of(name, LONG, dtype, lambda function: torch.compile(function, fullgraph=True, backend=backend))
    torch.manual_seed(0)
    actual = step()
    named = [dict(enumerate(tensors)) for tensors in (actual, expected)]
    check(*named, dtype)


@pytest.mark.parametrize("name", ONE)
def test_recomputed_training_step(name):
    dtype = torch.bfloat16 if GPU else torch.float32
    results = []
    for wrap in (lambda function: function, lambda function: lambda: checkpoint(function, use_reentrant=False)):
        torch.manual_seed(0)
        results.append(step_of(name, LONG, dtype, wrap)[1]())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", ONE)
def test_training_step_in_a_cuda_graph(name):
    leaves, step = step_of(name, LONG, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(0.5)
    graph.replay()
    actual = [x.clone() for x in captured]
    assert all(torch.equal(a, b) for a, b in zip(actual, step(), strict=True))


@pytest.mark.skipif(not GPU, reason="memory is measured on a GPU")
@pytest.mark.parametrize("name", [name for name in ONE if "gated_attention" not in name])
def test_memory_is_linear_and_is_freed(name):
    peaks, kept = [], None
    for n in (8192, 8192, 16384, 32768):  # the first run allocates workspaces that remain
        _, step = step_of(name, n, torch.bfloat16)
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - start) / 2**20)
        del step, _
        kept = torch.cuda.memory_allocated() if kept is None else kept
    assert all(longer <= 2.2 * shorter + 8 for shorter, longer in pairwise(peaks[1:])), peaks
    assert torch.cuda.memory_allocated() - kept < 2**20


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None or not GPU, reason="compute-sanitizer or a GPU is missing"
)
def test_compute_sanitizer():
    """No kernel reads or writes outside its tensors."""
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, calls.__file__]
    # With one allocation per tensor, an address outside of a tensor belongs to no other.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
