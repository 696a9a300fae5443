"""Triton kernels of `luna_attention` against the reference in float64: native on a GPU, interpreted without one."""

import pytest
import torch

from luna_mega.kernels.luna_attention import op, reference
from tests.kernels.backends import graded
from tests.kernels.test_luna_attention import check, doubled, exact, make_inputs, run

pytestmark = pytest.mark.triton

LENGTHS = [(1, 1), (2, 16), (16, 63), (17, 64), (63, 65), (65, 2)]  # (queries, keys); blocks have 16, 32 or 64 entries
DTYPES = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def attend(query, key, value, mask=None, dropout=0.0, **varlen):
    """Run the kernels for sizes for which the package selects another backend."""
    from luna_mega.kernels.luna_attention import triton_ops

    return triton_ops.attend(query, key, value, mask, query.shape[-1] ** -0.5, dropout, **varlen)


def make_leaves(device, dtype, queries, keys, tied, batch=2, heads=2, size=10):
    """Return the tensors, and a mask whose last row is fully masked."""
    return make_inputs(queries, keys, "all of one row", dtype, batch, heads, size, tied, device)


@pytest.fixture
def launches(monkeypatch, device):
    """Return a list to which every launch appends (kernel, grid, constants)."""
    from luna_mega.kernels.common import triton_launch

    seen, launch = [], triton_launch.launch

    def record(kernel, grid, *arguments, **constants):
        seen.append((kernel.fn.__name__, grid, constants))
        launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(triton_launch, "launch", record)
    return seen


@pytest.mark.covering(1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries, keys", graded([(2, 16), (17, 64), (65, 2)], [(63, 65)], LENGTHS))
def test_forward_and_gradients(device, queries, keys, dtype, tied):
    leaves, mask = make_leaves(device, dtype, queries, keys, tied)
    actual = run(attend, leaves, mask)
    check(actual, run(exact, doubled(leaves), mask), DTYPES[dtype])
    assert all((x[-1] == 0).all() for x in actual)
    assert all(x.dtype == dtype for x in actual)


@pytest.mark.slow
@pytest.mark.parametrize("queries, keys", [(5, 500), (500, 5)])
@pytest.mark.parametrize("dtype, tied", [(torch.float32, False), (torch.float16, True)], ids=str)
def test_splits(device, launches, queries, keys, dtype, tied):
    """The longer side is split into partial results, and two runs give the same sums."""
    leaves, mask = make_leaves(device, dtype, queries, keys, tied, heads=1)
    actual = run(attend, leaves, mask)
    check(actual, run(exact, doubled(leaves), mask), DTYPES[dtype])
    splits = {name: grid[1] for name, grid, _ in launches if len(grid) == 2}
    cut = {name for name, number in splits.items() if number > 1}
    assert cut == ({"_forward_kernel", "_query_kernel"} if keys > queries else {"_key_kernel"})
    assert ("_merge_kernel" in [name for name, *_ in launches]) == (keys > queries)
    assert all(torch.equal(a, b) for a, b in zip(actual, run(attend, leaves, mask), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 16, 64, 80, 128])
def test_head_sizes_without_mask(device, size, dtype):
    leaves, _ = make_leaves(device, dtype, 20, 40, size == 64, batch=1, size=size)
    check(run(attend, leaves), run(exact, doubled(leaves)), DTYPES[dtype])


@pytest.mark.slow
def test_large_scores(device):
    """The maximum is subtracted in every split: scores exceed 500, and exp(500) overflows float32."""
    leaves, _ = make_leaves(device, torch.float32, 5, 200, False, batch=1)
    leaves[0] = leaves[0].detach().mul(200).requires_grad_()
    scores = torch.einsum("bthk,bmhk->bhtm", leaves[0], leaves[1]) * 10**-0.5
    assert scores.amax(-1).min() > 100 and scores.max() > 500
    check(run(attend, leaves), run(exact, doubled(leaves)), 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("processors, most", [(8, 4), (132, 62), (10**6, 1 << 30)])
def test_number_of_splits(device, processors, most, monkeypatch):
    """The number of splits is limited to two programs per processor and one split per four blocks; it is at least 1."""
    from luna_mega.kernels.luna_attention import triton_forward

    monkeypatch.setattr(triton_forward.triton_launch, "processors", lambda *_: processors)
    query, key = torch.empty(2, 16, 2, 64), torch.empty(2, 500, 2, 64)
    call = triton_forward.AttentionCall(query, key, key, None, None, None, None, 0, 0.125, 0.0, "ieee")
    assert call.splits(16, 16, 64 * 100, 64) == min(most, 2 * processors // 4, 25)
    assert call.splits(16, 16, 0, 64) == call.splits(0, 16, 64, 64) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_dropout(device, dtype, tied):
    """Unit vectors as values show the dropped weights; from these follow other outputs and all gradients."""
    queries, keys, rate = 70, 64, 0.3
    leaves, _ = make_leaves(device, dtype, queries, keys, tied, batch=1, size=keys)
    mask = torch.arange(keys, device=device)[None] != 5
    units = torch.eye(keys, device=device, dtype=dtype)[None, :, None].expand(1, -1, 2, -1)
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

    def dropped(query, key, value):
        weights = reference.attend(query, key, value, mask, keys**-0.5)[1] * alive / (1 - rate)
        return torch.einsum("bhtm,bmhk->bthk", weights, value)

    torch.manual_seed(5)
    actual = run(attend, leaves, mask, rate)
    check(actual, run(dropped, doubled(leaves)), DTYPES[dtype])
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(actual, run(attend, leaves, mask, rate), strict=True))
    torch.manual_seed(6)
    assert not torch.equal(actual[0], attend(leaves[0], leaves[1], leaves[-1], mask, rate))


def write_offsets(OUT, queries, heads, stride):
    head = place(OUT, queries, queries, heads, 1, False, False)[1]  # noqa: F821
    tl.store(OUT + tl.program_id(0), head * stride)  # noqa: F821


@pytest.mark.slow
def test_offsets_of_heads_have_64_bits(device, monkeypatch):
    """Offsets of heads that are 2**30 elements apart do not overflow."""
    import triton

    from luna_mega.kernels.luna_attention.triton_forward import place

    monkeypatch.setitem(globals(), "place", place)
    monkeypatch.setitem(globals(), "tl", triton.language)
    out = torch.zeros(4, dtype=torch.int64, device=device)
    triton.jit(write_offsets)[(4,)](out, 8, 4, 2**30)
    assert out.tolist() == [head * 2**30 for head in range(4)]


@pytest.mark.slow
def test_large_gradients_in_float16(device):
    """Score gradients may overflow float16 before they are divided by sqrt(K)."""
    query, key = (torch.rand(1, 4, 1, 64, device=device) for _ in range(2))
    value = 30.0 * torch.randn(1, 4, 1, 64, device=device).sign()
    gradient = (10.0 * value[:, :1]).expand(1, 4, 1, 64).half()
    leaves = [x.half().requires_grad_() for x in (query, key, value)]
    wide = doubled(leaves)
    expected = torch.autograd.grad(exact(*wide), wide, gradient.double())
    products = torch.einsum("bthk,bmhk->btm", gradient.double(), value.double())
    assert 0.2 * (products - products.mean(-1, keepdim=True)).max() > 65504 > max(x.abs().max() for x in expected)
    actual = torch.autograd.grad(attend(*leaves), leaves, gradient)
    check(actual, expected, 5e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_memory")
def test_calls_that_use_pytorch_attention():
    class On:
        """A mock of a CUDA tensor for the choice of a backend."""

        def __init__(self, length, dtype=torch.bfloat16, size=64, device="cuda"):
            self.shape, self.dtype, self.device = (8, length, 12, size), dtype, torch.device(device)

    few, many, context = On(64), On(128), On(4096)
    assert not op._sdpa_is_best(many, context, On(4096), None)  # the backward pass of SDPA is not deterministic
    torch.use_deterministic_algorithms(False)
    assert op._sdpa_is_best(many, context, On(4096), None)
    assert op._sdpa_is_best(context, few, few, None) and op._sdpa_is_best(On(1), few, few, None)
    assert not op._sdpa_is_best(many, context, context, None)
    assert not op._sdpa_is_best(few, context, On(4096), None)
    assert not op._sdpa_is_best(context, few, few, "a mask")
    for other in (On(4096, torch.float32), On(4096, size=60), On(4096, device="cpu")):
        assert not op._sdpa_is_best(other, few, few, None)
