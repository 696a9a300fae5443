"""Triton kernels, interpreted without a GPU: every operator and layout, and what depends on how they are launched."""

import itertools
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from luna_mega.kernels import _dispatch, api
from luna_mega.kernels.gated_attention import reference as gated_reference
from luna_mega.kernels.luna_attention import op as luna_op, reference as luna_reference
from luna_mega.kernels.luna_causal_attention import reference as causal_reference
from tests.kernels.backends import poisoned_memory
from tests.kernels.calls import CALLS, OPERATORS, Sizes
from tests.kernels.comparisons import assert_same, relative_error
from tests.kernels.contract import FEW_LENGTHS, Case, cases, check, check_parts
from tests.kernels.test_contract import STATEFUL, is_possible, matrix
from tests.marks import slow_but

pytestmark = pytest.mark.triton

GPU = torch.cuda.is_available()
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
FUNCTIONS = list(gated_reference.FUNCTIONS)


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
        if is_fast and "causal" not in case.operator:  # two chunks are enough
            lengths = tuple(min(length, 11) for length in case.lengths)
            case = replace(case, sizes=case.sizes._replace(length=11, heads=1), lengths=lengths)
        rows.append(pytest.param(case, id=row.id, marks=[] if is_fast else pytest.mark.slow))
    return rows


@pytest.mark.parametrize("case", of_triton())
def test_triton_forward_and_gradients(case, triton_device):
    check(case, "triton", triton_device)


@pytest.mark.slow
@pytest.mark.parametrize("operator", STATEFUL)
def test_segments_and_steps(operator, triton_device):
    for stateful, layout in ((True, "mask"), (False, "dense")):
        case = Case(operator, sizes=Sizes(2, 9, 2, 3, 4, 6, 3, 2, 5), layout=layout, stateful=stateful, dtype=FLOAT32)
        check_parts(case, "triton", [1, 5, 1, 1, 1], triton_device)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("operator", OPERATORS)
@given(data=st.data())
@settings(max_examples=5)
def test_random_calls(operator, triton_device, data):
    possible = cases((operator,), FEW_LENGTHS, (FLOAT32,)).filter(lambda case: is_possible("triton", **case.options))
    check(data.draw(possible), "triton", triton_device)


LUNA, SEGMENT = {"layout": "mask", "dtype": FLOAT32}, "luna_causal_attention.triton_forward.MIN_SEGMENT"
CAUSAL = LUNA | {"operator": "luna_causal_attention", "blocks": "default", "stateful": True}
SCORES = {"gated_attention.triton_backward.SCORES": 80_000}
ONE_CHUNK = {"moving_average.triton_plan.SHORTEST_CHUNK": 1 << 20}
# Case, sizes of blocks. Lengths and sizes are those at which kernels are launched in another way.
LAUNCHES = {
    **{f"luna: {queries} rows, {keys} tokens, {dtype}": (
        Case(op, sizes=Sizes(2, keys, 2, 10, queries), layout=LUNA["layout"], dtype=dtype), {})
        for op, queries, keys in (("luna_pack", 16, 63), ("luna_pack", 1, 1), ("luna_pack", 65, 17))
        for dtype in (FLOAT32, FLOAT16)},
    **{f"luna: heads of {size}": (Case("luna_unpack", {"tied": size == 64}, Sizes(1, 20, 2, size, 40), dtype=dtype), {})
        for size, dtype in ((1, FLOAT32), (16, BFLOAT16), (64, FLOAT16), (80, FLOAT32), (128, BFLOAT16))},
    "causal: segments": (Case(**CAUSAL, sizes=Sizes(2, 140, 1, 5, 16)), {SEGMENT: 64}),
    "causal: segments in bfloat16": (
        Case(**CAUSAL | {"dtype": BFLOAT16}, sizes=Sizes(2, 200, 1, 5, 16)), {SEGMENT: 64}),
    "causal: segments of scans": (Case(**CAUSAL | {"dtype": FLOAT16}, sizes=Sizes(2, 140, 1, 5, 70)), {SEGMENT: 64}),
    "causal: one segment of several chunks": (Case(**CAUSAL, sizes=Sizes(2, 130, 1, 5, 4)), {SEGMENT: 1 << 20}),
    "causal: one segment in two scans": (
        Case(**CAUSAL | {"dtype": BFLOAT16}, sizes=Sizes(2, 130, 1, 5, 70)), {SEGMENT: 1 << 20}),
    "causal: heads of 128, 64 rows": (Case(**CAUSAL, sizes=Sizes(2, 33, 1, 128, 64), pack_masked=True), {}),
    "causal: heads of 128, 256 rows": (
        Case(**CAUSAL | {"dtype": BFLOAT16}, sizes=Sizes(2, 33, 1, 128, 256), pack_masked=True), {}),
    **{f"{op}: one chunk, skip {skip}": (
        Case(op, sizes=Sizes(2, 11, channels=5, states=3), layout="mask", dtype=FLOAT32, stateful=True,
             omitted=() if skip else ("skip",)), ONE_CHUNK)
        for op in ("damped_ema", "complex_ema", "diagonal_ssm real") for skip in (True, False)},
    **{f"{op}: default configuration": (
        Case(op, sizes=Sizes(2, 11, channels=5, states=3), layout="mask", dtype=FLOAT32, blocks="default"), {})
        for op in ("complex_ema", "diagonal_ssm")},
    **{f"{op}: {channels} channels, {states} states": (
        Case(op, sizes=Sizes(1, 10, channels=channels, states=states), dtype=FLOAT32, stateful=True), {})
        for op, channels, states in (
            ("damped_ema", 37, 9), ("damped_ema", 10, 40), ("complex_ema", 37, 9), ("complex_ema", 10, 32))},
    **{f"{op}: extreme decays": (
        Case(op, sizes=Sizes(2, 10, channels=5, states=9), dtype=FLOAT32, stateful=True, decays="extreme"), {})
        for op in ("damped_ema", "complex_ema", "diagonal_ssm")},
    **{f"{op}: result {read} is used": (
        Case(op, sizes=Sizes(2, 10, channels=5, states=3), layout="mask", dtype=FLOAT32, stateful=True, seed=read), {})
        for op in ("damped_ema", "complex_ema") for read in (0, 1)},
    "norm: 70 groups": (Case("timestep_norm_step", sizes=Sizes(4, 1, channels=140, groups=70), layout="mask",
                             dtype=FLOAT32, stateful=True), {}),
    **{f"norm: {groups} groups of {width}": (
        Case("timestep_norm", sizes=Sizes(2, length, channels=groups * width, groups=groups), layout="mask",
             dtype=FLOAT32, stateful=True), {})
        for length, groups, width in ((1, 1, 1), (3, 5, 1), (7, 1, 48), (13, 3, 7), (19, 2, 16))},
    **{f"gated: blocks of {function}, chunk {chunk}": (
        Case("gated_attention", {"function": function, "chunk": chunk, "causal": causal},
             Sizes(batch, length, size=20, width=70), "mask", dtype=FLOAT32, blocks="default"), SCORES)
        for function, causal, batch, length, chunk in (
            ("softmax", False, 1, 300, None), ("laplace", True, 1, 500, None), ("softmax", True, 2, 300, 140),
            ("relu2", False, 2, 300, 140))},
    **{f"gated: two kernels for {function}": (
        Case("gated_attention", {"function": function, "chunk": chunk, "causal": causal},
             Sizes(batch, length, size=20, width=70), "mask", dtype=BFLOAT16, blocks="default"),
        SCORES | dict.fromkeys(("gated_attention.triton_products.LONG", "gated_attention.triton_products.WIDE"), 60))
        for function, causal, batch, length, chunk in (
            ("laplace", True, 1, 300, None), ("relu2", False, 2, 200, 140))},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("case", "blocks"), LAUNCHES.values(), ids=LAUNCHES)
def test_launches(case, blocks, triton_device, monkeypatch):
    if blocks:  # instead of those of the contract
        monkeypatch.setattr("tests.kernels.contract.shrink_blocks", lambda *_: None)
    for name, value in blocks.items():
        module, _, constant = name.rpartition(".")
        monkeypatch.setattr(import_module(f"luna_mega.kernels.{module}"), constant, value)
    check(case, "triton", triton_device)


# Two varlen sequences have tokens, and truncation is not on Triton.
NAMES = [name for name in CALLS if not any(word in name for word in ("padding_free", "size=128", "truncated", "first"))]
EDGES = {"no sequence": (0, 5, 2), "length 0": (2, 0, 2), "nothing": (0, 0, 1), "one head": (1, 5, 1)}
# Calls with some of the options of another call.
SOME = [name for name in NAMES if f"{name.removesuffix(' masked').removesuffix(' stateful')} masked, stateful" in NAMES]
DISTINCT = [name for name in NAMES if name not in SOME]


def make(name, batch, length, heads):
    return CALLS[name](Sizes(batch, length, heads, rows=4, channels=8, states=2, width=8))


def run(call, backend, device):
    """Return the results and all gradients of a call, or the message if it raises a `ValueError`."""
    leaves = {key: x.float().to(device).requires_grad_() for key, x in call.leaves.items()}
    try:
        outputs = call.run(**leaves, backend=backend)
    except ValueError as error:
        return str(error)
    total = sum(x.double().sin().sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(total, [*leaves.values()], allow_unused=True)]


def test_every_op_is_covered():
    assert {name.partition(" ")[0] for name in NAMES} == api.OPS.keys()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize(("name", "edge"), list(itertools.product(DISTINCT, EDGES)))
def test_edges(name, edge, triton_device):
    call = make(name, *EDGES[edge])
    expected, actual = (run(call, chosen, triton_device) for chosen in ("reference", "triton"))
    if isinstance(expected, str):
        assert actual == expected and "of length 1 or more" in expected
        return
    assert edge != "no sequence" or len(expected[0]) == 0
    for got, right in zip(actual, expected, strict=True):
        if right is None:
            assert got is None or not got.any()
        else:
            torch.testing.assert_close(got, right, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", slow_but([name for name in NAMES if "rows=80" not in name], NAMES))
def test_grids_of_many_sequences(name, triton_device):
    """Only the first axis of a grid can have more than 65,535 programs."""
    from luna_mega.kernels.common import triton_launch

    call = CALLS[name](Sizes(65_544, 2, size=2, rows=2, channels=2, states=1, width=2))
    with triton_launch.recording(triton_launch.Target()) as launches:
        run(call, "triton", triton_device)
        with torch.no_grad():
            call.run(**{key: x.float().to(triton_device) for key, x in call.leaves.items()}, backend="triton")
    assert bool(launches) == (name != "diagonal_ssm_step real")  # has no kernel
    for launch in launches:
        assert max(launch.grid[1:], default=1) < 65_536, (launch.kernel.__name__, launch.grid)


@pytest.mark.parametrize("precision", _dispatch.FLOAT32_PRECISIONS)
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("luna", "gated"))])
def test_float32_precision_of_kernels(name, precision, triton_device):
    """The precision is passed to the kernels, also in a backward pass outside of the context manager."""
    from luna_mega.kernels.common import triton_launch

    call = make(name, 2, 5, 1)

    def within(**leaves):
        with api.use_float32_precision(precision):
            return call.run(**leaves)

    with triton_launch.recording(triton_launch.Target()) as launches:
        run(call._replace(run=within), "triton", triton_device)
    told = {launch.constants["PRECISION"] for launch in launches if "PRECISION" in launch.constants}
    assert told == {precision}


def randoms(device: torch.device, *shapes: tuple[int, ...], dtype: torch.dtype = FLOAT32) -> list[Tensor]:
    """Return leaves with random numbers, which are the same for every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def trained(function, leaves, weight=None, /, **options) -> list[Tensor]:
    """Return the output, and the gradients of a fixed random projection of it."""
    output = function(*leaves, **options)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(output.shape, generator=generator) if weight is None else weight
    return [output.detach(), *torch.autograd.grad(output, leaves, weight.to(output))]


def doubled(leaves) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in leaves]


@pytest.fixture
def launched(monkeypatch):
    """Return a list to which every launch appends (kernel, grid)."""
    from luna_mega.kernels.common import triton_launch

    seen, launch = [], triton_launch.launch

    def record(kernel, grid, *arguments, **constants):
        seen.append((kernel.fn.__name__, grid))
        launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(triton_launch, "launch", record)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype", "tied"), [("luna_pack", FLOAT32, False), ("luna_unpack", FLOAT16, True)])
def test_splits_of_luna_attention(op, dtype, tied, triton_device, launched):
    """The longer side is split into partial results."""
    layout = "mask" if op == "luna_pack" else "dense"
    check(Case(op, {"tied": tied}, Sizes(2, 500, 1, 10, 5), layout, dtype=dtype), "triton", triton_device)
    cut = {name for name, grid in launched if len(grid) == 2 and grid[1] > 1}
    assert cut == ({"_forward_kernel", "_query_kernel"} if op == "luna_pack" else {"_key_kernel"})
    assert ("_merge_kernel" in [name for name, _ in launched]) == (op == "luna_pack")


def attend(query, key, value, mask=None, dropout=0.0):
    """Run the kernels of Luna attention for sizes for which the package selects another backend."""
    from luna_mega.kernels.luna_attention import triton_ops

    return triton_ops.attend(query, key, value, mask, query.shape[-1] ** -0.5, dropout)


def exact_attention(query, key, value, mask=None):
    return luna_reference.attend(query, key, value, mask, query.shape[-1] ** -0.5)[0]


@pytest.mark.slow
def test_large_scores(triton_device):
    """The maximum is subtracted in every split: scores exceed 500, and exp(500) overflows float32."""
    leaves = randoms(triton_device, (1, 5, 2, 10), (1, 200, 2, 10), (1, 200, 2, 10))
    leaves[0] = leaves[0].detach().mul(200).requires_grad_()
    scores = torch.einsum("bthk,bmhk->bhtm", leaves[0], leaves[1]) * 10**-0.5
    assert scores.amax(-1).min() > 100 and scores.max() > 500
    assert_same(trained(attend, leaves), trained(exact_attention, doubled(leaves)), 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_dropout_of_luna_attention(triton_device, dtype, tied):
    """Unit vectors as values show the dropped weights; from these follow other outputs and all gradients."""
    queries, keys, rate = 70, 64, 0.3
    leaves = randoms(triton_device, (1, queries, 2, keys), *[(1, keys, 2, keys)] * (2 - tied), dtype=dtype)
    mask = torch.arange(keys, device=triton_device)[None] != 5
    units = torch.eye(keys, device=triton_device, dtype=dtype)[None, :, None].expand(1, -1, 2, -1)
    torch.manual_seed(5)
    weights = attend(leaves[0], leaves[1], units, mask, rate).double().permute(0, 2, 1, 3)
    alive = weights != 0
    seen = alive[..., mask[0]].double()
    assert abs(seen.mean() - (1 - rate)) < 4 * (rate * (1 - rate) / seen.numel()) ** 0.5
    # The means of rows and columns vary like means of independent draws, so dropped weights are independent.
    for dim, length in ((-1, seen.shape[-1]), (-2, queries)):
        spread = seen.mean(dim).std() / (rate * (1 - rate) / length) ** 0.5
        assert 0.8 < spread < 1.2, (dim, spread)
    assert not torch.equal(alive[0, 0], alive[0, 1])

    def dropped(query, key, *value):
        weights = luna_reference.attend(query, key, (key, *value)[-1], mask, keys**-0.5)[1] * alive / (1 - rate)
        return torch.einsum("bhtm,bmhk->bthk", weights, (key, *value)[-1])

    def seeded(query, key, *value):
        torch.manual_seed(5)
        return attend(query, key, (key, *value)[-1], mask, rate)

    actual = trained(seeded, leaves)
    assert_same(actual, trained(dropped, doubled(leaves)), {FLOAT32: 2e-5, BFLOAT16: 1e-2}[dtype])
    assert all(torch.equal(a, b) for a, b in zip(actual, trained(seeded, leaves), strict=True))
    torch.manual_seed(6)
    assert not torch.equal(actual[0], attend(leaves[0], leaves[1], leaves[-1], mask, rate))


@pytest.mark.slow
def test_large_gradients_in_float16(triton_device):
    """Score gradients may overflow float16 before they are divided by sqrt(K)."""
    query, key = (torch.rand(1, 4, 1, 64, device=triton_device) for _ in range(2))
    value = 30.0 * torch.randn(1, 4, 1, 64, device=triton_device).sign()
    gradient = (10.0 * value[:, :1]).expand(1, 4, 1, 64).half()
    leaves = [x.half().requires_grad_() for x in (query, key, value)]
    expected = trained(exact_attention, doubled(leaves), gradient)
    products = torch.einsum("bthk,bmhk->btm", gradient.double(), value.double())
    assert 0.2 * (products - products.mean(-1, keepdim=True)).max() > 65504 > max(x.abs().max() for x in expected)
    assert_same(trained(attend, leaves, gradient), expected, 5e-3)


@pytest.mark.slow
def test_calls_that_use_pytorch_attention():
    class On:
        """A mock of a CUDA tensor for the choice of a backend."""

        def __init__(self, length, dtype=torch.bfloat16, size=64, device="cuda"):
            self.shape, self.dtype, self.device = (8, length, 12, size), dtype, torch.device(device)

    few, many, context = On(64), On(128), On(4096)
    with poisoned_memory():
        assert not luna_op._sdpa_is_best(many, context, On(4096), None)  # its backward pass is not deterministic
    assert luna_op._sdpa_is_best(many, context, On(4096), None)
    assert luna_op._sdpa_is_best(context, few, few, None) and luna_op._sdpa_is_best(On(1), few, few, None)
    assert not luna_op._sdpa_is_best(many, context, context, None)
    assert not luna_op._sdpa_is_best(few, context, On(4096), None)
    assert not luna_op._sdpa_is_best(context, few, few, "a mask")
    for other in (On(4096, torch.float32), On(4096, size=60), On(4096, device="cpu")):
        assert not luna_op._sdpa_is_best(other, few, few, None)


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="looks at the target of interpreted kernels")
@pytest.mark.parametrize("rows", [16, 48, 70])
def test_configurations_of_sm_80(monkeypatch, triton_device, rows):
    from luna_mega.kernels.common import triton_launch

    monkeypatch.setattr(triton_launch, "_target", triton_launch.Target((8, 0), 108))
    check(Case(**CAUSAL | {"dtype": FLOAT16}, sizes=Sizes(2, 90, 1, 48, rows)), "triton", triton_device)


@pytest.mark.slow
@pytest.mark.parametrize("activation", causal_reference.ACTIVATIONS)
def test_activations_in_both_tails(triton_device, activation):
    """Activations are exact for large and small scores.

    If all values are 1, the mean value after one token is the pack weight.
    """
    numbers = [-90.0, -80.0, -40.0, -9.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 9.0, 29.0, 58.0, 100.0, 1e4]
    scores = torch.tensor(numbers).view(1, -1, 1, 1)
    one = torch.ones(1, 1, 1, 1)
    right = causal_reference.activate(scores.double().flatten(), activation)
    tolerance = 1e-6 * scores.flatten().abs().clamp(min=1.0) * right
    for length in (1, 2):
        tokens = [one.expand(1, length, 1, 1).to(triton_device)] * 3
        options = {"activation": activation, "return_state": True, "backend": "triton"}
        _, state = api.luna_causal_attention(tokens[0], scores.to(triton_device), *tokens, **options)
        assert ((state.value_mean.flatten().cpu() - right).abs() <= tolerance).all()


@pytest.mark.slow
@pytest.mark.parametrize("length, rows", [(1, 24), (40, 24), (20, 100)])
def test_dropout_of_causal_attention(monkeypatch, triton_device, length, rows):
    """Outputs and gradients equal those of the reference with the same dropped weights, also with two segments."""
    from luna_mega.kernels.luna_causal_attention import triton_forward

    monkeypatch.setattr(triton_forward, "MIN_SEGMENT", 32)

    def call(tokens, key_mean, value_mean, count, backend="triton", **options):
        torch.manual_seed(5)
        state = api.LunaCausalState(key_mean, value_mean, torch.full((2,), count, device=key_mean.device))
        options |= {"dropout": 0.5, "state": state, "return_state": True, "backend": backend}
        output, state = api.luna_causal_attention(*tokens, **options)
        return output, state.key_mean, state.value_mean

    def tokens(*last):
        return torch.ones(2, length, 2, *last, device=triton_device)

    # If the values are an identity, their mean is the pack weights. If the mean is an identity, the output is the
    # unpack weights.
    ones, no_mean = tokens(1), torch.zeros(2, 2, 1, rows, device=triton_device)
    identity = torch.eye(length, device=triton_device)[None, :, None].expand(2, -1, 2, -1)
    flat = [ones, torch.zeros(2, rows, 2, 1, device=triton_device), ones, ones]
    values = torch.zeros(2, 2, rows, length, device=triton_device)
    packed = call([*flat, identity], no_mean, values, 0)[2].mT * length
    mean = torch.eye(rows, device=triton_device).expand(2, 2, -1, -1)
    unpacked = call([*flat, tokens(rows)], no_mean, mean, 1 << 40)[0].transpose(1, 2) * rows
    factors = [x.double().round() for x in (packed, unpacked)]
    for factor in factors:
        assert set(factor.unique().tolist()) == {0.0, 2.0}
        assert abs((factor == 0).double().mean() - 0.5) < 5 * math.sqrt(0.25 / factor.numel())
    assert not torch.equal(*factors)

    mask = torch.arange(length, device=triton_device) >= torch.tensor([[0], [length // 3]], device=triton_device)
    shapes = [(2, length, 2, 5), (2, rows, 2, 5), *[(2, length, 2, 5)] * 2, (2, length, 2, 6)]
    leaves = randoms(triton_device, *shapes, (2, 2, 5, rows), (2, 2, rows, 6))

    def train(leaves, backend):
        outputs = call(leaves[:5], *leaves[5:], 7, backend, mask=mask)
        return [*outputs, *torch.autograd.grad(sum(x.sin().sum() for x in outputs), leaves)]

    actual, left = train(leaves, "triton"), list(factors)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "dropout", lambda x, *_, **__: x * left.pop(0))
        assert_same(actual, train(doubled(leaves), "reference"), 1e-5)
    assert not left


TOLERANCE = {FLOAT32: 2e-5, FLOAT16: 2e-3, BFLOAT16: 1.5e-2}


def gated_inputs(device, queries, keys=None, size=20, width=37, batch=2, dtype=FLOAT32):
    keys = keys or queries
    leaves = randoms(device, (batch, queries, size), (batch, keys, size), (batch, keys, width), (2 * 100 - 1,))
    return [x.detach().to(dtype).requires_grad_() for x in leaves]


def check_gated(inputs, tolerance=None, kept=None, **options):
    """Compare results (at the positions `kept`), and their gradients, with the reference in float64."""
    weight = torch.randn(*inputs[0].shape[:2], inputs[2].shape[2], generator=torch.Generator().manual_seed(1))
    kept = torch.ones(weight.shape[:2], dtype=torch.bool) if kept is None else kept.cpu()
    weight *= kept[..., None]
    results = trained(api.gated_attention, inputs, weight, backend="triton", **options)
    exact = trained(api.gated_attention, doubled(inputs), weight, backend="reference", **options)
    results[0], exact[0] = results[0].cpu()[kept], exact[0].cpu()[kept]
    for x, result, right in zip([inputs[2], *inputs], results, exact, strict=True):
        assert result.dtype == x.dtype and result.shape == right.shape
        assert relative_error(result, right) <= (tolerance or TOLERANCE[x.dtype])
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("length", "chunk"), [(300, None), (200, 140)])
def test_forward_of_two_kernels(length, chunk, triton_device, monkeypatch):
    """For long chunks and wide values, the forward pass with two kernels equals that with one, also with dropout."""
    from luna_mega.kernels.common import triton_choice
    from luna_mega.kernels.gated_attention import triton_products

    kernels = []

    def last(kernel, key, configurations, run):
        kernels.append(configurations[-1])
        return run(configurations[-1])

    for name in ("LONG", "WIDE"):
        monkeypatch.setattr(triton_products, name, 60)
    query, key, value, _ = gated_inputs(triton_device, length, batch=1, width=70, dtype=BFLOAT16)
    options = {"function": "laplace", "chunk_size": chunk, "dropout": 0.3, "backend": "triton"}
    torch.manual_seed(0)
    two = api.gated_attention(query, key, value, **options)
    with triton_choice.choosing(last):
        torch.manual_seed(0)
        one = api.gated_attention(query, key, value, **options)
    assert triton_products.Kernels(1) in kernels
    torch.testing.assert_close(two, one, rtol=1e-2, atol=1e-2 * one.abs().max().item())


@pytest.mark.slow
def test_small_numbers_in_float16(triton_device):
    """Causal queries with divisors in the hundreds neither underflow nor overflow float16."""
    for size in (0.02, 50.0):
        inputs = gated_inputs(triton_device, 500, dtype=FLOAT16, batch=1)[:3]
        with torch.no_grad():
            inputs[0] *= size
        check_gated(inputs, tolerance=4e-3, function="laplace", causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_mixed_dtypes_and_wide_bias(triton_device, function):
    query, key, value, bias = gated_inputs(triton_device, 40)
    inputs = [query, key, value.detach().bfloat16().requires_grad_(), bias.detach().double().requires_grad_()]
    check_gated(inputs, tolerance=1.5e-2, function=function, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, causal, chunk",
    [("softmax", True, 16), ("laplace", True, None), ("laplace", True, 16), ("relu2", False, 16)],
)
def test_positions_count_from_the_first_token(triton_device, function, causal, chunk):
    """With left padding, chunks start at the first token, also in a call with only the last queries."""
    inputs, start = gated_inputs(triton_device, 40), torch.tensor([-5, -19], device=triton_device)
    mask = torch.arange(40, device=triton_device) + start[:, None] >= 0
    rest = [inputs[0][:, 30:], *(x[:, 8:] for x in inputs[1:3]), inputs[3]]
    rest = [x.detach().requires_grad_() for x in rest]
    options = {"function": function, "causal": causal, "chunk_size": chunk}
    check_gated(rest, kept=mask[:, 30:], mask=mask[:, 8:], start=start + 8, offset=22, **options)


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_offsets_and_other_keys_than_queries(triton_device, function):
    for causal, queries, keys, offset in ((True, 1, 20, 19), (True, 5, 30, 7), (False, 7, 4, 0), (False, 4, 90, 9)):
        mask = torch.arange(keys, device=triton_device) % 3 != torch.tensor([[1], [0]], device=triton_device)
        inputs = gated_inputs(triton_device, queries, keys)
        check_gated(inputs, function=function, causal=causal, offset=offset, mask=mask)
    inputs, row_offset = gated_inputs(triton_device, 20, 33), torch.tensor([4, -3], device=triton_device)
    mask = torch.arange(33, device=triton_device) >= row_offset[:, None]
    kept = torch.arange(20, device=triton_device) >= -row_offset[:, None]
    check_gated(inputs, kept=kept, function=function, mask=mask, row_offset=row_offset)
    with pytest.raises(ValueError, match="row_offset is combined with offset 2; the kernels support only offset 0"):
        options = {"mask": mask, "row_offset": row_offset, "offset": 2, "backend": "triton"}
        api.gated_attention(*inputs, function=function, **options)


@pytest.mark.slow
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_dropout_of_gated_attention(triton_device, function, varlen):
    """An identity as the value shows the dropped weights; from these follow other outputs and all gradients."""
    length, rate = 72, 0.3
    inputs = gated_inputs(triton_device, length, batch=1 if varlen else 2)
    options = {"function": function, "chunk_size": 24}
    cu_seqlens = {"cu_seqlens": torch.tensor([0, 48, 72], device=triton_device)} if varlen else {}
    on_triton = {**options, **cu_seqlens, "dropout": rate, "backend": "triton"}
    identity = torch.eye(length, device=triton_device).expand(len(inputs[0]), -1, -1)

    def seeded(*tensors):
        torch.manual_seed(5)
        return api.gated_attention(*tensors, **on_triton)

    query, key, value, bias = doubled(inputs)
    complete = api.gated_attention(query, key, identity.double(), bias, backend="reference", **options)
    shown = seeded(*inputs[:2], identity, inputs[3]).detach().double()
    multiplier = (shown > 0.5 * complete) / (1.0 - rate)
    dropped = complete * multiplier
    torch.testing.assert_close(shown, dropped.detach(), rtol=1e-4, atol=1e-5)
    gone = multiplier[complete > 1e-3] == 0
    assert abs(gone.double().mean() - rate) < 0.05
    assert not torch.equal(multiplier[0, :24, :24], multiplier[0, 24:48, 24:48])
    output, expected = seeded(*inputs), dropped @ value
    weight = torch.randn(output.shape, device=triton_device)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)
    exact = torch.autograd.grad(expected, (query, key, value, bias), weight.double())
    for result, right in zip(torch.autograd.grad(output, inputs, weight), exact, strict=True):
        assert relative_error(result, right) <= 2e-5
    assert not torch.equal(api.gated_attention(*inputs, **on_triton), output)


@pytest.mark.slow
def test_ieee(triton_device):
    with api.use_float32_precision("ieee"):
        check_gated(gated_inputs(triton_device, 63), tolerance=2e-6, function="laplace", chunk_size=16)


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


@pytest.mark.slow
def test_wide_states_of_causal_attention(triton_device):
    """A float64 state has gradients in float64, and the results are float32."""
    leaves = OPERATORS["luna_causal_attention"].make(Sizes(2, 20, 1, 5, 4), stateful=True)
    tensors = {key: x.float().to(triton_device) for key, x in leaves.leaves.items()}
    tensors |= {key: x.double().requires_grad_() for key, x in tensors.items() if "mean" in key}
    outputs = leaves.run(**tensors, backend="triton")
    gradients = torch.autograd.grad(outputs[0].sum(), [tensors["key_mean"], tensors["value_mean"]])
    assert all(x.dtype == FLOAT32 for x in outputs) and all(x.dtype == torch.float64 for x in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["damped_ema", "complex_ema"])
def test_long_averages(operator, triton_device):
    """For slow decays, errors over 500 positions are at most 2e-6 of the largest value, with complete turns 4e-6.

    The gradient of the projection has 2e-5: rounding the phase to float32 rotates states that persist.
    """
    call = OPERATORS[operator].make(Sizes(1, 500, channels=3, states=4), stateful=True)
    slow = {"input_logit": torch.linspace(-12.0, -1.0, 12).view(3, 4), "damping_logit": torch.full((3, 4), 0.5)}
    turning = {"phase_logit": torch.tensor([0.0, 1.5, 1e4])} if operator == "complex_ema" else {}
    leaves = {key: (slow | turning).get(key, x).double() for key, x in call.leaves.items()}
    results = []
    for backend, dtype, device in (("reference", torch.float64, "cpu"), ("triton", FLOAT32, triton_device)):
        given = {key: x.float().to(device, dtype).requires_grad_() for key, x in leaves.items()}
        outputs = call.run(**given, backend=backend)
        total = sum(x.double().sum() for x in outputs)
        results.append([*outputs, *torch.autograd.grad(total, list(given.values()))])
    for index, (right, found) in enumerate(zip(*results, strict=True)):
        bound = 2e-6 if not turning else 2e-5 if index >= 5 else 4e-6
        assert (found.cpu() - right).abs().max() <= bound * right.abs().max(), index


@pytest.mark.slow
def test_truncation_at_the_length_is_none(triton_device):
    leaves = OPERATORS["damped_ema"].make(Sizes(2, 6)).leaves
    leaves = {key: x.float().to(triton_device) for key, x in leaves.items()}
    results = [api.damped_ema(**leaves, truncation=number, backend="triton") for number in (6, None)]
    assert torch.equal(*results)
