"""Triton kernels, interpreted without a GPU: every operator and layout, and what depends on how they are launched."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings, strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from luna_mega.kernels import _dispatch, api  # noqa: E402
from luna_mega.kernels.common import triton_launch  # noqa: E402
from tests.kernels.calls import OPERATORS, Sizes  # noqa: E402
from tests.kernels.comparisons import assert_same  # noqa: E402
from tests.kernels.contract import FEW_LENGTHS, Case, cases, check, check_parts  # noqa: E402
from tests.kernels.test_contract import EMPTY, STATEFUL, is_possible, matrix  # noqa: E402
from tests.marks import slow_but  # noqa: E402

pytestmark = pytest.mark.triton

GPU = torch.cuda.is_available()
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def of_triton() -> list:
    """Return the cases of the contract; the first one of each layout is fast, and one in bfloat16 of each operator."""
    rows, seen = [], {}
    for row in matrix("triton"):
        (case,) = row.values
        number = seen[case.operator, case.layout] = seen.get((case.operator, case.layout), 0) + 1
        dtype = {2: BFLOAT16 if case.layout == "dense" else FLOAT16}.get(number, FLOAT32)
        is_fast = number == 1 or dtype == BFLOAT16
        autocast = number == 1  # does not change results
        case = replace(case, dtype=dtype, places="contiguous" if number == 1 else "any", autocast=autocast)
        if is_fast and "causal" not in case.operator:
            lengths = tuple(min(length, 11) for length in case.lengths)
            case = replace(case, sizes=case.sizes._replace(length=11, heads=1), lengths=lengths)
        rows.append(pytest.param(case, id=row.id, marks=[] if is_fast else pytest.mark.slow))
    for name, row in OPERATORS.items():
        negated = Case(name, sizes=Sizes(2, 4, 2, 3, 4, 4, 3, 2, 5), stateful=row.stateful, places="negated")
        rows.append(pytest.param(replace(negated, dtype=FLOAT32), id=f"{name}, negated"))
    return rows + [pytest.param(replace(case, dtype=FLOAT32), id=name) for name, case in EMPTY.items()]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("case", of_triton())
def test_triton_forward_and_gradients(case, triton_device):
    check(case, "triton", triton_device)


STEPS = "luna_causal_attention", 1, (1, 1)


@pytest.mark.parametrize(
    ("operator", "number", "parts"), slow_but([STEPS], [STEPS, *((name, 2, (1, 5, 1, 1, 1)) for name in STATEFUL)])
)
def test_segments_and_steps(operator, number, parts, triton_device):
    """The number is that of sequences and of heads."""
    for stateful, layout in ((True, "mask"), (False, "dense")):
        sizes = Sizes(number, sum(parts), number, 3, 4, 6, 3, 2, 5)
        case = Case(operator, sizes=sizes, layout=layout, stateful=stateful, dtype=FLOAT32)
        check_parts(case, "triton", list(parts), triton_device)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("operator", OPERATORS)
@given(data=st.data())
@settings(max_examples=5)
def test_random_calls(operator, triton_device, data):
    possible = cases((operator,), FEW_LENGTHS, (FLOAT32,)).filter(lambda case: is_possible("triton", **case.options))
    check(data.draw(possible), "triton", triton_device)


SEGMENT, SCORES = "luna_causal_attention.triton_forward.MIN_SEGMENT", "gated_attention.triton_backward.SCORES"
TWO_KERNELS = dict.fromkeys(("gated_attention.triton_products.LONG", "gated_attention.triton_products.WIDE"), 60)
MASKED = partial(Case, layout="mask", dtype=FLOAT32)
CAUSAL = partial(MASKED, "luna_causal_attention", blocks="default", stateful=True)
FEW, WITH_STATE = Sizes(2, 11, channels=5, states=3), partial(Case, dtype=FLOAT32, stateful=True)
EMAS = "damped_ema", "complex_ema"
SMALLER = {"common.triton_launch._target": triton_launch.Target((8, 9), 58, 99 * 1024)}  # than an H100
# Case, sizes of blocks. Lengths and sizes are those at which kernels are launched in another way.
FAST = {
    "luna: splits of packing": (MASKED("luna_pack", sizes=Sizes(1, 130, 1, 10, 5)), {}),
    **{f"luna: heads of {size}, {len(blocks)}": (
        Case("luna_unpack", {"tied": True}, Sizes(1, 20, 1, size, 40), dtype=dtype), blocks)
        for size, dtype, blocks in ((80, FLOAT32, {}), (128, BFLOAT16, {}), (16, FLOAT16, SMALLER))},
    "causal: segments of short scans": (CAUSAL(sizes=Sizes(1, 17, 1, 5, 65), blocks="small", pack_masked=True), {}),
    **{f"causal: {rows} rows, {len(blocks)}": (CAUSAL(dtype=FLOAT16, sizes=Sizes(1, 40, 1, 48, rows)), blocks)
        for rows, blocks in ((48, {}), (48, SMALLER))},
    **{f"gated: {size} and {width} columns, {function} of {length}, chunk {chunk}": (
        MASKED("gated_attention", {"function": function, "chunk": chunk, "causal": causal},
               Sizes(1, length, size=size, width=width), dtype=dtype, blocks="default"), blocks)
        for size, width, dtype, blocks, function, causal, length, chunk in (
            (20, 70, FLOAT32, {SCORES: 4096}, "softmax", True, 70, None),
            (20, 70, FLOAT32, {SCORES: 4096}, "relu2", False, 70, 40),
            (20, 70, BFLOAT16, TWO_KERNELS, "laplace", True, 70, None),
            (130, 20, FLOAT32, SMALLER, "laplace", True, 33, None))},
    **{f"gated: {keys} keys": (
        MASKED("gated_attention to other keys", {"function": "laplace", "causal": False, "place": "rows"},
               Sizes(1, keys, size=20, width=20), dtype=FLOAT16), blocks)
        for keys, blocks in ((129, SMALLER), (257, {}))},
    # The states before the third chunk are the first ones that depend on the decay over a chunk.
    **{f"{op}: three chunks": (Case(op, sizes=Sizes(1, 19, channels=3, states=2), dtype=FLOAT32), {}) for op in EMAS},
    "gated: numbers of varlen keys": (
        Case("gated_attention", {"function": "relu2"}, Sizes(2, 11, width=5), "varlen", (11, 5), dtype=FLOAT32,
             seed=85), {}),  # has a mask, and all gradients
    "gated: divisors after left padding": (
        Case("gated_attention", {"function": "laplace", "causal": True}, Sizes(2, 11, width=5), "left", (0, 3),
             dtype=FLOAT32), {}),
}  # fmt: skip
LAUNCHES = {
    **{f"luna: {rows} rows, {keys} tokens, {dtype}": (MASKED(op, sizes=Sizes(2, keys, 2, 10, rows), dtype=dtype), {})
        for op, rows, keys in (("luna_pack", 16, 63), ("luna_pack", 1, 1), ("luna_pack", 65, 17))
        for dtype in (FLOAT32, FLOAT16)},
    "luna: splits of unpacking": (Case("luna_unpack", {"tied": True}, Sizes(2, 500, 1, 10, 5), dtype=FLOAT16), {}),
    "luna: large scores": (MASKED("luna_pack", sizes=Sizes(2, 200, 2, 10, 5), scale=128.0), {}),
    **{f"luna: heads of {size}": (Case("luna_unpack", {"tied": size == 64}, Sizes(1, 20, 2, size, 40), dtype=dtype), {})
        for size, dtype in ((1, FLOAT32), (16, BFLOAT16), (64, FLOAT16))},
    "causal: segments": (CAUSAL(sizes=Sizes(2, 140, 1, 5, 16)), {SEGMENT: 64}),
    "causal: segments in bfloat16": (CAUSAL(dtype=BFLOAT16, sizes=Sizes(2, 200, 1, 5, 16)), {SEGMENT: 64}),
    "causal: segments of scans": (CAUSAL(dtype=FLOAT16, sizes=Sizes(2, 140, 1, 5, 70)), {SEGMENT: 64}),
    "causal: one segment of several chunks": (CAUSAL(sizes=Sizes(2, 130, 1, 5, 4)), {SEGMENT: 1 << 20}),
    "causal: one segment in two scans": (CAUSAL(dtype=BFLOAT16, sizes=Sizes(2, 130, 1, 5, 70)), {SEGMENT: 1 << 20}),
    **{f"causal: heads of 128, {rows} rows": (
        CAUSAL(dtype=dtype, sizes=Sizes(2, 33, 1, 128, rows), pack_masked=True), {})
        for rows, dtype in ((64, FLOAT32), (256, BFLOAT16))},
    **{f"causal: smaller GPU, {rows} rows": (CAUSAL(dtype=FLOAT16, sizes=Sizes(2, 90, 1, 48, rows)), SMALLER)
        for rows in (16, 70)},
    "damped_ema: truncation of the length": (Case("damped_ema", {"truncation": 6}, Sizes(2, 6), dtype=FLOAT32), {}),
    **{f"{op}: slow decays": (WITH_STATE(op, sizes=Sizes(1, 500, channels=3, states=4), decays="slow"), {})
        for op in EMAS},
    **{f"{op}: one chunk, skip {skip}": (
        MASKED(op, sizes=FEW, stateful=True, omitted=() if skip else ("skip",)),
        {"recurrence.triton_plan.SHORTEST_CHUNK": 1 << 20})
        for op in (*EMAS, "diagonal_ssm real") for skip in (True, False)},
    **{f"{op}: default configuration": (MASKED(op, sizes=FEW, blocks="default"), {})
        for op in ("complex_ema", "diagonal_ssm")},
    **{f"{op}: {channels} channels, {states} states": (
        WITH_STATE(op, sizes=Sizes(1, 10, channels=channels, states=states)), {})
        for op, channels, states in ((EMAS[0], 37, 9), (EMAS[0], 10, 40), (EMAS[1], 37, 9), (EMAS[1], 10, 32))},
    **{f"{op}: extreme decays": (WITH_STATE(op, sizes=Sizes(2, 10, channels=5, states=9), decays="extreme"), {})
        for op in (*EMAS, "diagonal_ssm")},
    **{f"{op}: result {read} is used": (
        MASKED(op, sizes=Sizes(2, 10, channels=5, states=3), stateful=True, seed=read), {})
        for op in EMAS for read in (0, 1)},
    "norm: 70 groups": (MASKED("timestep_norm_step", sizes=Sizes(4, 1, channels=140, groups=70), stateful=True), {}),
    **{f"norm: {groups} groups of {width}": (
        MASKED("timestep_norm", sizes=Sizes(2, length, channels=groups * width, groups=groups), stateful=True), {})
        for length, groups, width in ((1, 1, 1), (3, 5, 1), (7, 1, 48), (13, 3, 7), (19, 2, 16))},
    **{f"gated: {name} {function}, chunk {chunk}": (
        MASKED("gated_attention", {"function": function, "chunk": chunk, "causal": causal},
               Sizes(batch, length, size=20, width=70), dtype=dtype, blocks="default"), {SCORES: 80_000} | more)
        for name, dtype, more, function, causal, batch, length, chunk in (
            ("blocks of", FLOAT32, {}, "softmax", False, 1, 300, None),
            ("blocks of", FLOAT32, {}, "laplace", True, 1, 500, None),
            ("blocks of", FLOAT32, {}, "softmax", True, 2, 300, 140),
            ("blocks of", FLOAT32, {}, "relu2", False, 2, 300, 140),
            ("two kernels for", BFLOAT16, TWO_KERNELS, "laplace", True, 1, 300, None),
            ("two kernels for", BFLOAT16, TWO_KERNELS, "relu2", False, 2, 200, 140))},
    **{f"gated: scores of {scale}": (
        Case("gated_attention", {"function": "laplace", "causal": True}, Sizes(1, 500, size=20, width=37),
             dtype=FLOAT16, scale=scale), {})
        for scale in (2.0**-6, 2.0**5)},
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(FAST, FAST | LAUNCHES))
def test_launches(name, triton_device, monkeypatch):
    case, blocks = (FAST | LAUNCHES)[name]
    if blocks:  # instead of those of the contract
        monkeypatch.setattr("tests.kernels.contract.shrink_blocks", lambda *_: None)
    for name, value in blocks.items():
        module, _, constant = name.rpartition(".")
        monkeypatch.setattr(import_module(f"luna_mega.kernels.{module}"), constant, value)
    check(case, "triton", triton_device)


def launches_of(operator: str, sizes: Sizes, device: torch.device, precision: str = "tf32x3") -> list:
    """Return the launches of a training step, whose backward pass has the default precision, and of a call."""
    row = OPERATORS[operator]
    call = row.make(sizes, **({"stateful": True} if row.stateful and "ema_step" not in operator else {}))
    leaves = {key: x.float().to(device).requires_grad_() for key, x in call.leaves.items()}
    with triton_launch.recording(triton_launch.Target()) as launches:
        with api.use_float32_precision(precision):
            outputs = call.run(**leaves, backend="triton")
            with torch.no_grad():
                call.run(**leaves, backend="triton")
        torch.autograd.grad(sum(x.sum() for x in outputs), list(leaves.values()), allow_unused=True)
    return launches


@pytest.mark.parametrize("operator", OPERATORS)
def test_grids_of_many_sequences(operator, triton_device):
    """Only the first axis of a grid can have more than 65,535 programs."""
    sizes = Sizes(65_544, 2, size=2, rows=2, channels=2, states=1, width=2)
    launches = launches_of(operator, sizes, triton_device)
    assert bool(launches) == (operator != "diagonal_ssm_step real")  # has no kernel
    for launch in launches:
        assert max(launch.grid[1:], default=1) < 65_536, (launch.kernel.__name__, launch.grid)


@pytest.mark.parametrize("precision", _dispatch.FLOAT32_PRECISIONS)
@pytest.mark.parametrize("operator", [name for name in OPERATORS if name.startswith(("luna", "gated"))])
def test_float32_precision_of_kernels(operator, precision, triton_device):
    """The precision is passed to the kernels, also in a backward pass outside of the context manager."""
    launches = launches_of(operator, Sizes(2, 5, width=8), triton_device, precision)
    assert {x.constants["PRECISION"] for x in launches if "PRECISION" in x.constants} == {precision}


@pytest.mark.slow
def test_large_gradients_in_float16(triton_device):
    """Score gradients may overflow float16 before they are divided by sqrt(K)."""
    query, key = (torch.rand(1, 4, 1, 64, device=triton_device) for _ in range(2))
    value = 30.0 * torch.randn(1, 4, 1, 64, device=triton_device).sign()
    gradient, results = (10.0 * value[:, :1]).expand(1, 4, 1, 64), []
    for dtype, backend in ((FLOAT16, "triton"), (torch.float64, "reference")):
        leaves = [x.half().to(dtype).requires_grad_() for x in (query, key, value)]
        output = api.luna_pack(*leaves, backend=backend)
        results.append([output, *torch.autograd.grad(output, leaves, gradient.to(dtype))])
    products = torch.einsum("bthk,bmhk->btm", gradient.double(), value.double())
    assert 0.2 * (products - products.mean(-1, keepdim=True)).max() > 65504 > max(x.abs().max() for x in results[1])
    assert_same(*results, 5e-3)


@pytest.mark.slow
def test_autocast_multiplies_in_the_dtype_of_the_value(triton_device):
    """Under autocast, products use the dtype of the value, although learned scales make query and key float32."""
    query, key = (torch.randn(2, 40, 16, device=triton_device, requires_grad=True) for _ in range(2))
    value = torch.randn(2, 40, 24, device=triton_device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast(triton_device.type, dtype=torch.bfloat16):
        output = api.gated_attention(query, key, value, backend="triton")
    narrow = api.gated_attention(query.bfloat16(), key.bfloat16(), value, backend="triton")
    assert output.dtype == torch.bfloat16 and output.equal(narrow)
    assert not output.equal(api.gated_attention(query, key, value, backend="triton"))
    output.float().square().sum().backward()
    assert query.grad.dtype == torch.float32 and query.grad.isfinite().all()
