"""The choice of a backend and its reason, on machines with and without Triton and a GPU."""

import copy
import os
import subprocess
import sys

import pytest
import torch

from luna_mega.kernels import _dispatch, api
from luna_mega.kernels.recurrence import native
from tests.distributed.ranks import PATIENCE
from tests.kernels.backends import needs_library, on_native, on_triton
from tests.kernels.calls import OPERATORS, WIDE, Sizes
from tests.kernels.test_contract import ON_NATIVE

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(params=api.OPS)
def op(request):
    return request.param


def against(op, reason):
    """Return an op whose kernels do not support any call for this reason, or all calls if it is None."""
    made = copy.copy(api.OPS[op])
    object.__setattr__(made, "unsupported", lambda **_: reason)
    return made


def decide(op, argument=None, device=CUDA, unsupported=None):
    return against(op, unsupported).decide(argument, device, {})


@pytest.fixture
def gpu(monkeypatch):
    """Mock a GPU of compute capability 9.0 for the choice of a backend; yield a function that changes it."""
    pytest.importorskip("triton", reason="Triton is not installed")

    def set_capability(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capability))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        _dispatch._old_device.cache_clear()

    set_capability(9, 0)
    yield set_capability
    _dispatch._old_device.cache_clear()


def test_reasons_against_triton(op, gpu, monkeypatch):
    assert decide(op) == ("triton", "automatic choice")
    assert f"{op} runs on 'triton'" in api.explain(op, device="cuda")
    assert decide(op, "torch") == ("torch", "chosen by its argument")
    assert decide(op, unsupported="of no reason") == ("torch", "no Triton kernel: of no reason")
    with pytest.raises(ValueError, match=f"{op} cannot run on 'triton': of no reason; choose 'torch' or 'auto'"):
        decide(op, "triton", unsupported="of no reason")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        assert decide(op)[1].startswith("no Triton kernel: Triton is not installed; run `pip install triton`")
    gpu(7, 5)
    assert decide(op) == ("torch", "no Triton kernel: compute capability 7.5 is below 8.0")
    gpu(8, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "_is_compiling_flag", True)
        patch.setattr(torch.compiler, "_is_exporting_flag", True)
        assert decide(op)[0] == "torch"  # exported programs do not use Triton
    assert decide(op)[0] == "triton"
    gpu()
    assert api.explain(op, device="cuda") == f"{op} runs on 'torch': no Triton kernel: there is no CUDA device"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gpu(9, 4)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert "ROCm" in decide(op)[1]


AVERAGES = {name.partition(" ")[0] for name in ON_NATIVE}
FP32, FP64, CAUSAL = torch.float32, torch.float64, "luna_causal_attention"
TRUNCATED, BY_ROW = {"truncation": 5}, {"causal": False, "place": "offset, rows"}


NOT_ON_TRITON = [
    ("luna_unpack", {}, {}, FP64, "not torch.float64"),
    ("luna_pack", {}, {"size": 130}, FP32, "128, not 130"),
    (CAUSAL, {}, {"size": 129}, FP32, r"head sizes up to 128, not 129 \(query\) and 129 \(value\)"),
    (CAUSAL, {}, {"rows": 257}, torch.float16, "up to 256 rows of pack_query in torch.float16, not 257"),
    (CAUSAL, {}, {"rows": 129}, FP32, "up to 128 rows of pack_query in torch.float32, not 129"),
    (CAUSAL, {}, {}, FP64, "support float32, float16 and bfloat16, not torch.float64"),
    ("luna_causal_attention_step", {}, {"rows": 129}, FP32, "up to 128 rows"),
    ("damped_ema", {}, {}, FP64, "float64"),
    ("damped_ema", {}, {}, {"skip": FP64}, "the skip or a parameter is float64"),
    ("damped_ema_step", {}, {}, {"skip": FP64}, "the skip or a parameter is float64"),
    ("damped_ema", {}, {"states": 65}, FP32, "65 states per channel are more than 64"),
    ("damped_ema", TRUNCATED, {}, FP32, "truncation=5 is below the length 6; choose 'torch'"),
    ("diagonal_ssm real", {}, {"states": 65}, FP32, "65 states per channel are more than 64"),
    ("diagonal_ssm", {}, {"states": 33}, FP32, "33 states per channel are more than 32"),
    ("diagonal_ssm", {}, {}, FP64, "float64"),
    ("gated_attention", {}, {"size": 300}, FP32, "query and key have size 300"),
    ("gated_attention to other keys", BY_ROW, {}, FP32, "row_offset is combined with offset 3"),
    ("timestep_norm", {}, {}, FP64, "x or a parameter is float64"),
    ("gated_attention", {}, {}, FP64, "query and key are torch.float64; the kernels support"),
]
NOT_ON_NATIVE = [
    ("damped_ema", {}, {}, FP64, "x or a parameter is float64; choose 'torch' or 'auto'"),
    ("complex_ema_step", {}, {}, FP64, "x or a parameter is float64; choose 'torch' or 'auto'"),
    ("damped_ema", TRUNCATED, {}, FP32, "truncation=5 is below the length 6; choose 'torch' or 'auto'"),
]


@pytest.mark.parametrize(
    "backend, name, options, sizes, dtype, message",
    [*(on_triton(*row, slow=False) for row in NOT_ON_TRITON), *(on_native(*row) for row in NOT_ON_NATIVE)],
)
def test_calls_that_a_backend_does_not_support(backend, name, options, sizes, dtype, message, triton_device):
    """They raise an error if the backend is chosen by name; the automatic choice has the results of PyTorch."""
    call = OPERATORS[name].make(Sizes(1, 6, 1, **sizes), **options)
    device = triton_device if backend == "triton" else CPU
    if not isinstance(dtype, dict):
        dtype = dict.fromkeys(call.leaves, dtype) | dict.fromkeys(WIDE, torch.promote_types(dtype, FP32))
    leaves = {key: x.to(device, dtype.get(key, FP32)) for key, x in call.leaves.items()}
    with pytest.raises(ValueError, match=f"cannot run on '{backend}': .*{message}"):
        call.run(**leaves, backend=backend)
    torch.testing.assert_close(call.run(**leaves), call.run(**leaves, backend="torch"))


@needs_library
@pytest.mark.parametrize(("name", "dtype"), [("diagonal_ssm", FP32), ("damped_ema_step", torch.bfloat16)])
def test_the_automatic_choice_runs_the_library(name, dtype):
    call = OPERATORS[name].make(Sizes(1, 6, 1))
    leaves = {key: x.to(FP32 if key in WIDE else dtype) for key, x in call.leaves.items()}
    assert all(map(torch.equal, call.run(**leaves), call.run(**leaves, backend="native")))


def test_gpu_fallback_warns_once(op, gpu, monkeypatch, caplog):
    """A fallback warns once per reason, unless the caller chose the backend or the tensors are on another device."""
    monkeypatch.setattr(_dispatch, "_warned", set())
    for backend, device in ((None, "cpu"), ("torch", "cuda"), ("reference", "cuda")):
        against(op, "of one reason").choose(backend, torch.device(device), {})
    assert not caplog.records
    for reason in ("of one reason", "of one reason", "of another", None):
        assert against(op, reason).choose(None, CUDA, {}) == ("torch" if reason else "triton")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("luna_mega.kernels", f"{op} runs on 'torch': no Triton kernel: of one reason"),
        ("luna_mega.kernels", f"{op} runs on 'torch': no Triton kernel: of another"),
    ]


def test_order_of_choices(op, gpu, monkeypatch):
    monkeypatch.setattr(_dispatch, "_default", "reference")
    assert decide(op) == ("reference", "chosen by LUNA_MEGA_BACKEND")
    with api.use_backend("torch"):
        assert decide(op) == ("torch", "chosen by use_backend")
        assert decide(op, "triton") == ("triton", "chosen by its argument")


def test_cpu_without_the_library(op, monkeypatch):
    """Averages run on PyTorch, and `explain` says why."""
    monkeypatch.setattr(native, "library", None)
    monkeypatch.setattr(native, "_reason", "it was lost")
    reason = "no C library: it was lost" if op in AVERAGES else "no Triton kernel: the tensors are on cpu"
    assert api.explain(op, device="cpu") == f"{op} runs on 'torch': {reason}"
    with pytest.raises(ValueError, match=f"{op} cannot run on 'native': no C library" if op in AVERAGES else "has no"):
        api.explain(op, backend="native", device="cpu")


@needs_library
def test_cpu_with_the_library(op):
    expected = "native': automatic choice" if op in AVERAGES else "torch': no Triton kernel: the tensors are on cpu"
    assert api.explain(op, device="cpu") == f"{op} runs on '{expected}"
    with api.use_backend("native"):  # applies to all ops
        expected = expected.replace("automatic choice", "chosen by use_backend")
        assert api.explain(op, device="cpu") == f"{op} runs on '{expected}"
    wrong = (CPU, "has no backend 'native'; choose 'torch' or 'auto'")
    wrong = (CUDA, "cannot run on 'native': the tensors are on cuda; choose 'torch'") if op in AVERAGES else wrong
    with pytest.raises(ValueError, match=f"{op} {wrong[1]}"):
        decide(op, "native", wrong[0])


def test_a_library_that_cannot_be_loaded(tmp_path):
    """A file that is absent, damaged or another library is a reason to use PyTorch, not an error."""
    path = tmp_path / "_native.so"
    assert native.load(path) == (None, "it was not built; install a C compiler, and this package again")
    path.write_bytes(b"no library")
    assert native.load(path)[1].startswith("it cannot be loaded (")
    path.unlink()
    path.symlink_to(torch._C.__file__)
    assert native.load(path)[1].startswith("it cannot be loaded (")


def test_errors():
    with pytest.raises(ValueError, match="no float32 precision 'tf32'; choose one of tf32x3, ieee"):
        api.use_float32_precision("tf32").__enter__()
    with pytest.raises(ValueError, match="no op 'luna'; choose one of"):
        api.explain("luna")
    with pytest.raises(ValueError, match="'cuda', which is not a backend"):
        api.explain(backend="cuda")


EXPLAIN = "from luna_mega.kernels.api import explain; print(explain(backend={}, device='cpu'))"
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from luna_mega.kernels.api import explain, luna_pack
x = torch.randn(1, 4, 2, 16)
luna_pack(x, x, x)
print(explain(device="cuda"))
luna_pack(x, x, x, backend="triton")
"""
# Code, environment, a line of the output, and the last line of the errors.
PROCESSES = {
    "without Triton": (
        WITHOUT_TRITON, {}, "luna_attention runs on 'torch': no Triton kernel: Triton is not installed",
        "luna_pack cannot run on 'triton': Triton is not installed; run `pip install triton`"),
    "the interpreter must be chosen by name": (
        EXPLAIN.format(None), {"TRITON_INTERPRET": "1"},
        "luna_attention runs on 'torch': no Triton kernel: the tensors are on cpu", ""),
    "no interpreter": (
        EXPLAIN.format("'triton'"), {"TRITON_INTERPRET": "0"}, "",
        "the tensors are on cpu; the kernels need CUDA, or TRITON_INTERPRET=1"),
    "the environment's backend": (
        EXPLAIN.format(None), {"LUNA_MEGA_BACKEND": "reference"},
        "runs on 'reference': chosen by LUNA_MEGA_BACKEND", ""),
    "an unknown backend": (
        EXPLAIN.format(None), {"LUNA_MEGA_BACKEND": "fast"}, "",
        "LUNA_MEGA_BACKEND is 'fast', which is not a backend"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("code", "environment", "printed", "error"), PROCESSES.values(), ids=PROCESSES)
def test_processes(repo_root, triton_device, code, environment, printed, error):
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(repo_root)} | environment,
        capture_output=True, encoding="utf-8", timeout=PATIENCE,
    )  # fmt: skip
    assert printed in result.stdout and error in result.stderr
    assert bool(error) == (result.returncode != 0)
