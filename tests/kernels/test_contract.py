"""Every operator equals its definition: a fixed matrix of backends and layouts, and random calls."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from luna_mega.kernels import api
from luna_mega.kernels.common.comparison import ROUNDING, row_error
from luna_mega.kernels.recurrence import native
from tests.distributed.ranks import PATIENCE
from tests.kernels.backends import LEVELS, NATIVE, needs_library, on_native, on_triton
from tests.kernels.calls import OPERATORS, WIDE, Sizes
from tests.kernels.comparisons import assert_same
from tests.kernels.contract import Case, Inputs, cases, check, check_parts, results

ON_NATIVE = [name for name in OPERATORS if "ema" in name or "ssm" in name]
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
SIZES = Sizes(2, 17, 2, 3, 4, 6, 3, 2, 5)


def matrix(backend: str) -> list:
    """Return a case of each layout of each operator; the options and the other fields take turns."""
    rows = []
    for name, row in OPERATORS.items():
        if backend.startswith("native") and name not in ON_NATIVE:
            continue
        several = [dict(zip(row.choices, values, strict=True)) for values in itertools.product(*row.choices.values())]
        several = [x for x in several if is_possible(backend, **x)]
        count = max(len(several), len(row.layouts) * 2)
        for index in range(count):
            layout, options = row.layouts[index % len(row.layouts)], several[index % len(several)]
            one_way = options.get("directions", 1) == 1 and not options.get("truncation")
            if layout == "lengths" and not one_way:
                layout = "mask"
            lengths = {"varlen": (17, 0, 5), "lengths": (17, 6), "left": (0, 3)}.get(layout, ())
            sizes = SIZES._replace(batch=len(lengths) or 2)
            stateful = row.stateful and one_way and index % 3 != 2
            case = Case(name, options, sizes, layout, lengths, stateful, garbage=layout == "mask" and index % 2 == 0,
                        pack_masked=bool(row.options) and index % 2 == 0, seed=None)  # fmt: skip
            rows.append(pytest.param(case, id=f"{name}-{layout}-{'-'.join(map(str, options.values()))}-{index}"))
    return rows


def is_possible(backend: str, directions=1, shift=False, truncation=None, **_) -> bool:
    """Return whether a backend supports the options of an operator."""
    return (directions == 2 or not shift) and not (truncation and backend.partition(" ")[0] in ("native", "triton"))


# Calls without sequences, or without positions.
EMPTY = {
    **{f"{name}, no sequence": Case(name, sizes=Sizes(0, 5, 2, 3, 4), stateful=row.stateful)
        for name, row in OPERATORS.items()},
    **{f"{name}, length 0": Case(name, sizes=Sizes(2, 0, 2, 3, 4))
        for name, row in OPERATORS.items() if not row.stateful and "step" not in name},
}  # fmt: skip


def test_every_operator_has_a_row():
    assert {name.partition(" ")[0] for name in OPERATORS} == api.OPS.keys()


@pytest.mark.parametrize("case", [*matrix("torch"), *(pytest.param(case, id=name) for name, case in EMPTY.items())])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_matrix(case, backend):
    check(case, backend)


@needs_library
@pytest.mark.parametrize("case", matrix("native"))
@pytest.mark.parametrize("level", LEVELS)
def test_matrix_of_the_library(case, level):
    check(replace(case, dtype=torch.float32), f"native {level}")


LOW = [("torch", dtype, name) for dtype in DTYPES[2:] for name in OPERATORS]
LOW += [pytest.param("native", dtype, name, marks=needs_library) for dtype in DTYPES[2:] for name in ON_NATIVE]


@pytest.mark.parametrize("backend, dtype, operator", LOW)
def test_low_precision(backend, dtype, operator):
    """Errors in half precision are at most twice those of the reference in the same dtype."""
    sizes = SIZES._replace(length=66, size=8, rows=5, width=10)
    layout = "mask" if "mask" in OPERATORS[operator].layouts else "dense"
    check(Case(operator, sizes=sizes, layout=layout, dtype=dtype), backend)


@pytest.mark.parametrize("operator", OPERATORS)
@given(data=st.data())
def test_random_calls(operator, data):
    """Any call of an operator equals its definition on PyTorch, and in float64 on the reference."""
    backend = data.draw(st.sampled_from(["torch", "torch", "reference"]))
    check(data.draw(cases((operator,), dtypes=DTYPES[: 1 + (backend == "torch")])), backend)


CHANNELS, NUMBERS_OF_STATES = (3, 1, 8, 15, 16, 17, 31, 40), (2, 1, 3, 4, 5, 7, 8, 13, 16, 33)


@needs_library
@pytest.mark.parametrize("operator", ON_NATIVE)
@given(data=st.data())
def test_random_calls_of_the_library(operator, data):
    """Channels and states fill the registers of the processor, or not."""
    level, channels, states = (data.draw(st.sampled_from(x)) for x in (list(LEVELS)[::-1], CHANNELS, NUMBERS_OF_STATES))
    possible = cases((operator,), dtypes=(torch.float32, torch.float32, torch.bfloat16))
    case = data.draw(possible.filter(lambda case: is_possible("native", **case.options)))
    check(replace(case, sizes=case.sizes._replace(channels=channels, states=states)), f"native {level}")


STATEFUL = [name for name, row in OPERATORS.items() if row.stateful and "_step" not in name]


@st.composite
def sequences(draw, operator, backend, **fixed):
    """Draw a case with a state, and the lengths of its parts."""
    case = draw(cases((operator,), layouts=("dense", "mask"), **fixed))
    options = case.options | ({"directions": 1} if "directions" in case.options else {})
    options.pop("shift", None)
    options |= {"truncation": None} if backend in ("native", "triton") and "truncation" in options else {}
    sizes = case.sizes._replace(batch=max(case.sizes.batch, 1))
    stateful = case.stateful and not options.get("truncation")
    case = replace(case, options=options, sizes=sizes, stateful=stateful, garbage=False)
    cuts = draw(st.sets(st.integers(1, sizes.length), max_size=6)) - {sizes.length}
    bounds = [0, *sorted(cuts), sizes.length]
    return case, [end - start for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("operator", STATEFUL)
@given(data=st.data())
def test_segments_and_steps_are_one_call(operator, data):
    backends = ["torch", "reference", *(["native"] if operator in ON_NATIVE and native.missing() is None else [])]
    backend = data.draw(st.sampled_from(backends))
    dtypes = {"native": DTYPES[1:2], "torch": DTYPES[:2], "reference": DTYPES[:1]}[backend]
    case, parts = data.draw(sequences(operator, backend, dtypes=dtypes))
    check_parts(case, backend, parts)


@pytest.mark.slow
@pytest.mark.parametrize("operator", STATEFUL)
def test_thousands_of_steps(operator):
    """After 3,000 steps, errors are those of float32; also after a million positions, except for causal attention."""
    batch, bound = (2, 1e-6) if "causal" in operator else (3, 5e-6)
    case = Case(operator, sizes=SIZES._replace(batch=batch, length=3000), stateful=True, dtype=torch.float32)
    check_parts(case, "torch", [1] * 3000, bound=bound)


# Dtypes of some tensors; the others are float32.
MIXED = [
    *((name, {"x": dtype}) for name in (*ON_NATIVE, "timestep_norm", "timestep_norm_step") for dtype in (
        torch.float64, torch.bfloat16,
    )),
    ("gated_attention", {"value": torch.bfloat16, "bias": torch.float64}),
    ("luna_causal_attention", {"key_mean": torch.float64, "value_mean": torch.float64}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "operator", "dtypes"),
    [(backend, *row) for backend in ("reference", "torch") for row in MIXED]
    + [on_triton(*row, slow=False) for row in MIXED if row[1].get("x") != torch.float64],
)
def test_mixed_dtypes(backend, operator, dtypes, triton_device):
    """The output has the dtype of x or of the value, gradients have those of their tensors; float64 is exact."""
    inputs = Inputs(Case(operator, sizes=SIZES, stateful=OPERATORS[operator].stateful))
    exact, dtype = torch.float64 in dtypes.values() and "x" in dtypes, [*dtypes.values()][0]
    device = triton_device if backend == "triton" else torch.device("cpu")
    leaves = {key: x.to(device, dtypes.get(key, torch.float32)) for key, x in inputs.leaves.items()}
    found = results(inputs, lambda **x: inputs.run(backend, **x), leaves)
    right = results(inputs, lambda **x: inputs.loop(**x), inputs.leaves)
    count = len(found) - len(leaves)
    assert found[0].dtype == (torch.float32 if "causal" in operator else dtype)
    assert [x.dtype for x in found[count:]] == [x.dtype for x in leaves.values()]
    if exact:
        assert {x.dtype for x in found[:count]} == {dtype}
        assert_same(found[:count], right[:count])
    else:
        assert_same(found, right, 1e-5 if "causal" in operator else 1.5e-2)


LENGTH, MEAN = 9_000, 12.0
MASK = torch.arange(LENGTH)[None] >= 7
AVERAGES = ["damped_ema", "complex_ema", "diagonal_ssm"]
ATTENTION = ["luna_pack", "gated_attention", "gated_attention_step"]  # the causal reference stores the sums of each row
ROWS = [("torch", name, {}) for name in (*AVERAGES, *ATTENTION, "luna_causal_attention", "timestep_norm")]
ROWS += [("reference", name, {}) for name in ATTENTION] + [("torch", "luna_pack", {"dropout": 1e-9})]
ROWS += [pytest.param(*NATIVE.values, name, {}, marks=NATIVE.marks) for name in AVERAGES]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("backend", "operator", "options"), ROWS)
def test_sums_over_many_positions(backend, operator, options, dtype):
    """Sums over 9,000 positions with a mean of 12 in 16 bits are accurate. They exceed the range of float16."""
    call = OPERATORS[operator].make(Sizes(1, LENGTH, 1, 8, 4, 4, 16, 2, 8))
    leaves = {key: x + MEAN if key in ("x", "context", "key", "value") else x for key, x in call.leaves.items()}
    # Scores are small, so that all positions have about the same weight.
    leaves |= {key: leaves[key] / 9 for key in ("rows", "query") if key in leaves and "causal" not in operator}
    if operator == "gated_attention":
        leaves["query"] = leaves["query"][:, :3]
    leaves = {key: x.to(torch.float32 if key in WIDE else dtype) for key, x in leaves.items()}
    options = options | ({} if "_step" in operator else {"mask": MASK})
    exact = call.run(**{key: x.double() for key, x in leaves.items()}, **options, backend="torch")
    for actual, expected in zip(call.run(**leaves, **options, backend=backend), exact, strict=True):
        if actual is not None:
            assert row_error(actual, expected) <= ROUNDING[dtype] / 4


# Prints by how many KiB a training step raises the peak of the memory.
PEAK = """
import re, sys, torch
from luna_mega.kernels import api
torch.set_num_threads(1)
def peak():  # not `ru_maxrss`, which a new process inherits
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
start, name, length = peak(), sys.argv[1], int(sys.argv[2])
x, heads, rows = torch.randn(4, length, 128), torch.randn(1, length, 4, 32), torch.randn(1, 64, 4, 32)
of = [-torch.rand(128, 16), torch.randn(128, 16), torch.randn(128, 16, 2)]
leaves = {"diagonal_ssm": [x, *of], "luna_pack": [rows, heads, heads], "gated_attention": [x[:1], x[:1], x[:1]]}
leaves["luna_causal_attention"] = [heads, rows, heads, heads, heads]
leaves = [x.requires_grad_() for x in leaves[name]]
getattr(api, name)(*leaves, backend=sys.argv[3]).sum().backward()
print(peak() - start)
"""
LINEAR = ["diagonal_ssm", "luna_pack", "gated_attention", "luna_causal_attention"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak of memory")
@pytest.mark.parametrize(("backend", "operator"), [*(("torch", name) for name in LINEAR), on_native("diagonal_ssm")])
def test_memory_is_linear(repo_root, backend, operator):
    """A training step with 16,384 positions takes at most twice the memory of one with 8,192, including its inputs."""
    peaks = []
    for length in (8192, 16384):
        command = [sys.executable, "-c", PEAK, operator, str(length), backend]
        # glibc would raise the threshold after the first tensor, and keep freed tensors.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        peaks.append(int(subprocess.check_output(command, cwd=repo_root, env=environment, timeout=PATIENCE)))
    assert 1 < peaks[0] and peaks[1] <= 2 * peaks[0], peaks
