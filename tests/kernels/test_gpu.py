"""The checks of `make gpu` as tests (`pytest -m gpu`), with compiled training steps and compute-sanitizer.

Without a GPU, the kernels are interpreted with few tokens.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from luna_mega.kernels import api  # noqa: E402
from tests.kernels import calls, gpu  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.skipif(not gpu.GPU, reason="no GPU: the PyTorch operators are the default")
@pytest.mark.parametrize("op", gpu.OPS)
def test_the_default_backend_is_triton(op):
    assert "'triton'" in api.explain(op, device=gpu.DEVICE)


@pytest.mark.parametrize(
    "check, name",
    [
        pytest.param(check, name, marks=[] if gpu.GPU or name in gpu.ONE else pytest.mark.exhaustive)
        for check, name in gpu.checks()
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_check(check, name):
    check(name)


@pytest.mark.parametrize("name", gpu.ONE)
def test_compiled_training_step(name):
    backend = "inductor" if gpu.GPU else "aot_eager"
    _, eager = gpu.step_of(name)
    torch.manual_seed(0)
    expected = eager()
    _, step = gpu.step_of(name, wrap=lambda function: torch.compile(function, fullgraph=True, backend=backend))
    torch.manual_seed(0)
    actual = step()
    gpu.check(*(dict(enumerate(tensors)) for tensors in (actual, expected)), gpu.DTYPE)


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None or not gpu.GPU, reason="compute-sanitizer or a GPU is missing"
)
def test_compute_sanitizer():
    """No kernel reads or writes memory outside of its tensors."""
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, calls.__file__]
    # With one allocation per tensor, an address outside of a tensor does not belong to another tensor.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
