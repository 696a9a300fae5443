"""The operators without the models, as a repository of the Kernel Hub and as a wheel (`make test-operators`).

The environment has torch, triton, kernels and pytest, but neither transformers nor luna_mega.
"""

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("transformers") or not importlib.util.find_spec("kernels"):
    pytest.skip("only in the environment of `make test-operators`", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

from kernels._rust import Digest, DigestAlgorithm

from kernels import get_kernel, get_local_kernel

ROOT = Path(__file__).resolve().parents[2]
# Without NumPy, which torch does not require either.
IMPORT = """
import re, sys, time
sys.modules["numpy"] = None
import torch
def peak():  # not `ru_maxrss`, which a new process inherits
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
memory, start = peak(), time.process_time()
import luna_mega_ops as ops
seconds, memory = time.process_time() - start, peak() - memory
print(seconds, memory / 1024, sep="/", end="/")
print(ops.damped_ema(torch.randn(1, 5, 4), *[torch.randn(4, 2) for _ in range(4)]).shape, end="/")
from luna_mega_ops.recurrence.native import library
print(library is not None)
"""


def write(folder, root=ROOT):
    subprocess.run([sys.executable, root / ".ci" / "operators.py", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="module")
def ops(folder):
    return get_local_kernel(folder)


def leaf(*shape):
    return (torch.randn(*shape) / 2).requires_grad_()


def calls(ops):
    """Return name -> (function of the backend, leaves)."""
    torch.manual_seed(0)
    x, rows, heads, scores = leaf(2, 21, 16), leaf(2, 4, 2, 8), leaf(2, 21, 2, 8), leaf(2, 21, 16)
    real, phase, weight = [leaf(16, 4) for _ in range(4)], leaf(16), leaf(16, 4, 2)
    scale, position, states = leaf(16), leaf(2, 16), leaf(2, 16, 4)
    pairs = leaf(2, 16, 4, 2)
    return {
        "luna_pack": (lambda b: ops.luna_pack(rows, heads, heads, backend=b), [rows, heads]),
        "luna_unpack": (lambda b: ops.luna_unpack(heads, rows, rows, backend=b), [rows, heads]),
        "luna_attention": (
            lambda b: ops.luna_attention(heads, rows, heads, heads, lambda y: (y, y), backend=b)[0], [rows, heads]
        ),
        "luna_causal_attention": (
            lambda b: ops.luna_causal_attention(heads, rows, heads, heads, heads, backend=b), [rows, heads]
        ),
        "gated_attention": (lambda b: ops.gated_attention(x, scores, scores, backend=b), [x, scores]),
        "damped_ema": (lambda b: ops.damped_ema(x, *real, backend=b), [x, *real]),
        "damped_ema_step": (lambda b: ops.damped_ema_step(position, states, *real, backend=b)[0], [position, states]),
        "complex_ema": (
            lambda b: ops.complex_ema(x, *real[:2], phase, weight, backend=b), [x, *real[:2], phase, weight]
        ),
        "complex_ema_step": (
            lambda b: ops.complex_ema_step(position, pairs, *real[:2], phase, weight, backend=b)[0], [position, pairs]
        ),
        "diagonal_ssm": (
            lambda b: ops.diagonal_ssm(x, -real[0].exp(), real[1], weight, phase, backend=b),
            [x, *real[:2], weight, phase],
        ),
        "diagonal_ssm_step": (
            lambda b: ops.diagonal_ssm_step(position, states, -real[0].exp(), None, real[1], backend=b)[0],
            [position, states, *real[:2]],
        ),
        "timestep_norm": (lambda b: ops.timestep_norm(x, 4, scale, scale, backend=b), [x, scale]),
    }  # fmt: skip


NAMES = [*calls(None)]


def outputs(ops, name, backend):
    """Return the output of a call and the gradients of its leaves."""
    function, leaves = calls(ops)[name]
    output = function(backend)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_every_operator_has_the_results_of_the_reference(ops, name, backend):
    for found, expected in zip(outputs(ops, name, backend), outputs(ops, name, "reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_neither_transformers_nor_luna_mega_is_imported(ops):
    assert {"transformers", "luna_mega"} & {name.partition(".")[0] for name in sys.modules} == set()
    assert ops.__name__.startswith("_luna_mega_cpu_") and ops.damped_ema.__module__.startswith(ops.__name__)
    assert "moving_average" in dir(getattr(torch.ops, ops.__name__))


def test_programs(ops):
    """A compiled and an exported program have the results of the call."""
    x, *parameters = leaf(2, 21, 16).detach(), *(leaf(16, 4) for _ in range(4))
    expected = ops.damped_ema(x, *parameters)
    compiled = torch.compile(ops.damped_ema, fullgraph=True)(x, *parameters)
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)

    class Average(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parameters_ = torch.nn.ParameterList(parameters)

        def forward(self, x):
            return ops.damped_ema(x, *self.parameters_)

    module = Average()
    assert copy.deepcopy(module)(x).equal(expected)
    exported = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(exported(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["MovingAverage", "ComplexMovingAverage", "DiagonalSSM"])
def test_layers(ops, name):
    """A layer has a state, can be copied, and its step continues a sequence."""
    make = getattr(ops.modules, name)
    layer, x = make(16, 4), torch.randn(2, 21, 16)
    expected = layer(x)
    assert copy.deepcopy(layer)(x).equal(expected)
    other = make(16, 4)
    other.load_state_dict(layer.state_dict())
    assert other(x).equal(expected)
    with torch.no_grad():
        _, state = layer(x[:, :20], return_state=True)
        torch.testing.assert_close(layer.step(x[:, 20], state)[0], expected[:, 20], rtol=1e-4, atol=1e-5)


def test_local_kernels(folder, ops, monkeypatch):
    """`get_kernel` loads a folder that LOCAL_KERNELS names, without a network."""
    monkeypatch.setenv("LOCAL_KERNELS", f"someone/luna-mega={folder}")
    assert get_kernel("someone/luna-mega", version=0).__name__ == ops.__name__


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return the folder of a build whose sources have another comment."""
    root = tmp_path_factory.mktemp("checkout")
    for part in (".ci", "kernels", "luna_mega"):
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", root)
    with (root / "kernels" / "varlen.py").open("a", encoding="utf-8") as file:
        file.write("#")
    return write(root / "output", root)


def metadata(folder, backend="cpu"):
    return json.loads((folder / "build" / f"torch-{backend}" / "metadata.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_digest_and_id(folder, changed, backend, tmp_path):
    """The digest is that of the files. Another byte in a file gives another id; the same files the same."""
    place, found = folder / "build" / f"torch-{backend}", metadata(folder, backend)
    assert found["digest"]["files"] == dict(Digest.hash_variant(DigestAlgorithm.SHA256, place).files)
    assert {Path(file).suffix for file in found["digest"]["files"]} == {".py"}  # no library: for all platforms
    assert len(found["digest"]["files"]) > 40 and found["backend"]["type"] == backend
    assert metadata(write(tmp_path), backend) == found
    assert metadata(changed, backend)["id"] != found["id"]


def test_two_builds_in_one_process(ops, changed):
    """Each build has its own modules and operators, and both compute."""
    other = get_local_kernel(changed)
    assert other.__name__ != ops.__name__ and other.damped_ema is not ops.damped_ema
    for found, expected in zip(outputs(other, "damped_ema", "torch"), outputs(ops, "damped_ema", "torch"), strict=True):
        assert found.equal(expected)


def test_wheel(folder, tmp_path):
    """The wheel has the C library and needs only torch; its import takes less than 0.6 seconds of processor time."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, folder / "wheel"], check=True)
    (wheel,) = tmp_path.glob("luna_mega_ops-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(2):  # the first import compiles the modules
        done = subprocess.run(
            [sys.executable, "-c", IMPORT],
            env=environment | {"PYTHONPATH": str(tmp_path / "site")},
            stdout=subprocess.PIPE,
            encoding="utf-8",
            check=True,
        )
    seconds, megabytes, *rest = done.stdout.split("/")
    assert float(seconds) < 0.6 and 1 < float(megabytes) < 100 and rest == ["torch.Size([1, 5, 4])", "True\n"]
