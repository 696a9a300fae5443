"""`assign_rows` and `segment_pack`: the reference against loops, the backends against the reference in float64."""

import math

import pytest
import torch
from torch.library import opcheck

from luna_mega.kernels.api import assign_rows, luna_unpack, segment_pack
from luna_mega.kernels.segment_pack import reference
from tests.kernels.backends import TRITON, on_triton

SIZES = [(1, 1), (1, 4), (6, 8), (8, 8), (9, 6), (50, 8), (200, 32), (300, 1)]  # (tokens, rows)
MASKS = ["none", "some", "all of one row"]
SCALES = [0.0, 0.5, 3.0, 40.0]  # standard deviations of the scores
DTYPES = {"reference": torch.float64, "torch": torch.float64, "triton": torch.float32}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of 4 tokens and 16 features."""
    from luna_mega.kernels.segment_pack import triton_kernels

    monkeypatch.setattr(triton_kernels, "BLOCK_T", 4)
    monkeypatch.setattr(triton_kernels, "LARGEST_D", 16)


def make_inputs(length, masking="some", scale=1.0, batch=3, width=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    states = torch.randn(batch, length, width, generator=generator, dtype=torch.float64)
    score = scale * torch.randn(batch, length, generator=generator, dtype=torch.float64)
    mask = None
    if masking != "none":
        mask = torch.rand(batch, length, generator=generator) < 0.7
        mask[:, 0] = True
        if masking == "all of one row":
            mask[-1] = False
    return states.to(dtype), score.to(torch.promote_types(dtype, torch.float32)), mask


def run(states, score, row, mask, rows, device="cpu", function=segment_pack, **options):
    """Return the outputs, and the gradients of a fixed random projection of them."""
    states, score = (x.detach().to(device).requires_grad_() for x in (states, score))
    row, mask = row.to(device), None if mask is None else mask.to(device)
    packed, entropy, filled = function(states, score, row, mask, rows, **options)
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (packed, entropy))
    gradients = torch.autograd.grad((packed, entropy), (states, score), tuple(weights))
    return [x.detach().cpu() for x in (packed, entropy, filled, *gradients)]


def test_reference_is_a_mean_by_softmax():
    states, score, mask = make_inputs(9)
    row = reference.assign_rows(score, mask, 4)
    packed, entropy, filled = reference.segment_pack(states, score, row, mask, 5)
    for b in range(3):
        for r in range(5):
            inside = [t for t in range(9) if mask[b, t] and row[b, t] == r]
            total = sum(math.exp(score[b, t]) for t in inside)
            weights = [math.exp(score[b, t]) / total for t in inside]
            expected = sum((w * states[b, t] for w, t in zip(weights, inside, strict=True)), torch.zeros(7).double())
            torch.testing.assert_close(packed[b, r], expected, rtol=1e-12, atol=1e-12)
            assert entropy[b, r].item() == pytest.approx(-sum(w * math.log(w) for w in weights), abs=1e-12)
            assert filled[b, r] == bool(inside)


def test_reference_costs_are_water_filling():
    """Costs equal those found by bisection: they sum to the rows, and a token of cost 1 has a separate row."""
    score = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)).mul(2).double()
    weight = score.exp()[0]
    low, high = 0.0, 1e6
    for _ in range(200):
        factor = (low + high) / 2
        low, high = (factor, high) if (factor * weight).clamp(max=1).sum() < 8 else (low, factor)
    cost = (factor * weight).clamp(max=1)
    expected = (cost.cumsum(0) - cost / 2).long()
    assert torch.equal(reference.assign_rows(score, torch.ones(1, 40, dtype=torch.bool), 8)[0], expected)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("length, rows", SIZES)
def test_assign_rows(length, rows, masking, scale):
    _, score, mask = make_inputs(length, masking, scale)
    row, kept = assign_rows(score, mask, rows), torch.ones_like(score).bool() if mask is None else mask
    expected = reference.assign_rows(score.float(), kept, rows)
    # Scores of size 40 have many equal costs, and float32 rounding decides ties.
    assert (row != expected)[kept].sum() <= (2 if scale == 40.0 else 0) and (row - expected)[kept].abs().max() <= 1
    assert row.dtype == torch.int64 and not row.requires_grad
    assert (row.diff() >= 0).all() and (row >= 0).all() and (row < rows).all()
    for own, keep in zip(row, kept, strict=True):
        assert own[keep].unique().numel() == min(rows, int(keep.sum()))


def test_equal_scores_give_even_rows():
    row = assign_rows(torch.zeros(1, 12), None, 4)
    assert row.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]]


@pytest.mark.parametrize("length, rows", [(9, 6), (50, 8), (200, 32)])
@pytest.mark.parametrize("scale", SCALES)
def test_rows_do_not_depend_on_padding_gaps_and_batch(length, rows, scale):
    _, score, _ = make_inputs(length, scale=scale, dtype=torch.float32)
    together = assign_rows(score, None, rows)
    for index in range(3):
        assert torch.equal(assign_rows(score[index : index + 1], None, rows)[0], together[index])
    mask = torch.rand(3, 2 * length, generator=torch.Generator().manual_seed(2)).argsort(dim=1) < length
    gapped = torch.full((3, 2 * length), 99.0).masked_scatter(mask, score)
    assert torch.equal(assign_rows(gapped, mask, rows)[mask].view(3, length), together)


@pytest.mark.parametrize(
    "backend, length, rows, width, dtype",
    [("torch", *size, 7, dtype) for size in SIZES for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    + [
        on_triton(*size, dtype, slow=dtype != torch.float32)
        for size in ((1, 1, 1), (3, 5, 16), (17, 3, 7), (40, 8, 33))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ],
    ids=str,
)
@pytest.mark.parametrize("masking", MASKS)
def test_forward_and_gradients(device, backend, length, rows, width, dtype, masking):
    states, score, mask = make_inputs(length, masking, scale=2.0, width=width, dtype=dtype)
    row = assign_rows(score, mask, rows)
    expected = run(states.double(), score.double(), row, mask, rows, backend="reference")
    actual, again = (run(states, score, row, mask, rows, device, backend=backend) for _ in range(2))
    assert actual[0].dtype == dtype and actual[1].dtype == torch.promote_types(dtype, torch.float32)
    for a, b, c in zip(actual, expected, again, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(a, c)


def test_gradients_equal_finite_differences():
    states, score, mask = make_inputs(9)
    row = assign_rows(score, mask, 4)

    def pack(states, score):
        return segment_pack(states, score, row, mask, 4, backend="torch")[:2]

    assert torch.autograd.gradcheck(pack, (states.requires_grad_(), score.requires_grad_()))


@pytest.mark.parametrize("backend", ["reference", "torch", TRITON])
def test_masked_tokens_have_no_effect(device, backend):
    states, score, mask = make_inputs(20, "all of one row", dtype=DTYPES[backend])
    row = assign_rows(score, mask, 4)
    expected = run(states, score, row, mask, 4, device, backend=backend)
    content = math.nan if backend == "triton" else 50.0
    hidden = states.masked_fill(~mask[..., None], math.nan), score.masked_fill(~mask, content)
    actual = run(*hidden, row, mask, 4, device, backend=backend)
    assert all(map(torch.equal, actual, expected))
    assert not actual[2][-1].any() and (actual[0][-1] == 0).all() and (actual[1][-1] == 0).all()
    assert (actual[3][~mask] == 0).all() and (actual[4][~mask] == 0).all()


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("backend", ["torch", TRITON])
def test_gradients_of_one_output(device, backend, output):
    states, score, mask = make_inputs(20, dtype=DTYPES[backend])
    row, gradients = assign_rows(score, mask, 4), []
    for chosen, place in (("reference", "cpu"), (backend, device)):
        leaves = [x.to(place).requires_grad_() for x in (states.clone(), score.clone())]
        results = segment_pack(*leaves, row.to(place), mask.to(place), 4, backend=chosen)
        made = torch.autograd.grad(results[output].sin().sum(), leaves, materialize_grads=True)
        gradients.append([x.cpu() for x in made])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch", TRITON])
def test_padding_free(device, backend, masked):
    """Row assignments, results and gradients equal those of separate calls; one sequence is empty."""
    bounds, rows = [0, 9, 10, 10, 24 if backend == "triton" else 40, 44], 6
    bounds = bounds[:-1] if backend == "triton" else bounds
    states, score, mask = make_inputs(bounds[-1], "some", batch=1, dtype=DTYPES[backend])
    mask, cu_seqlens = mask if masked else None, torch.tensor(bounds, dtype=torch.int32)
    row = assign_rows(score, mask, rows, cu_seqlens=cu_seqlens)

    def separate(*tensors):
        *tensors, mask, rows = tensors
        parts = []
        for part in map(slice, bounds[:-1], bounds[1:]):
            own, kept = [x[:, part] for x in tensors], None if mask is None else mask[:, part]
            if part.start == part.stop:
                shapes = ((1, rows, states.shape[2]), (1, rows))
                parts.append((*(tensors[0].new_zeros(shape) for shape in shapes), torch.zeros(1, rows).bool()))
                continue
            expected_row = assign_rows(own[1].detach(), kept, rows)
            assert torch.equal(*(x if kept is None else x[kept] for x in (own[2], expected_row)))
            parts.append(segment_pack(*own, kept, rows, backend="reference"))
        return map(torch.cat, zip(*parts, strict=True))

    expected = run(states.double(), score.double(), row, mask, rows, function=separate)
    actual = run(states, score, row, mask, rows, device, backend=backend, cu_seqlens=cu_seqlens.to(device))
    tolerance = 1e-5 if backend == "triton" else 1e-7
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def test_entropy_makes_attention_exact_if_tokens_differ_by_their_scores():
    """If keys differ only in the score, attention to 5 rows equals attention to 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    states = torch.cat([score[..., None], torch.randn(2, 40, 6, generator=generator, dtype=torch.float64)], dim=-1)
    row = assign_rows(score, None, 5)
    packed, entropy, filled = segment_pack(states, score, row, None, 5)
    query = torch.randn(2, 3, 1, 7, generator=generator, dtype=torch.float64)

    def key(states):  # q . k / sqrt(7) is 2 + score
        own = torch.cat([states[..., :1], torch.ones_like(states[..., :1])], dim=-1)
        return torch.nn.functional.pad(own, (0, 5))[:, :, None]

    query = torch.nn.functional.pad(torch.tensor([1.0, 2.0], dtype=torch.float64) * math.sqrt(7), (0, 5)).expand_as(
        query
    )
    full = luna_unpack(query, key(states), states[:, :, None])
    short = luna_unpack(query, key(packed), packed[:, :, None], filled, bias=entropy)
    torch.testing.assert_close(short, full)


@pytest.mark.parametrize(
    "backend, tied, size",
    [(backend, tied, 8) for backend in ("reference", "torch") for tied in (False, True)]
    + [on_triton(True, size, slow=False) for size in (8, 127)],
)
def test_unpack_with_bias(device, backend, tied, size):
    generator, dtype = torch.Generator().manual_seed(0), DTYPES[backend]
    heads = 1 if backend == "triton" else 3
    leaves = [torch.randn(2, n, heads, size, generator=generator, dtype=dtype) for n in ((7, 5) if tied else (7, 5, 5))]
    leaves = [*leaves, torch.randn(2, 5, generator=generator, dtype=dtype)]
    query, *keys, bias = leaves = [x.to(device).requires_grad_() for x in leaves]
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2], device=device)
    logits = torch.einsum("bthk,blhk->bhtl", query, keys[0]) / math.sqrt(size) + bias[:, None, None]
    weights = logits.masked_fill(~mask[:, None, None], -math.inf).softmax(dim=-1)
    expected = torch.einsum("bhtl,blhk->bthk", weights, keys[-1])
    actual = luna_unpack(query, keys[0], keys[-1], mask, bias=bias, backend=backend)
    tolerance = 1e-5 if backend == "triton" else 1e-7
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    gradients = (torch.autograd.grad(x.sin().sum(), leaves, retain_graph=True) for x in (actual, expected))
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)
    both = luna_unpack(query, keys[0], keys[-1], mask, bias=bias, return_weights=True)
    torch.testing.assert_close(both, (expected, weights), rtol=tolerance, atol=tolerance)


@pytest.mark.triton
@pytest.mark.parametrize("masked", [False, True])
def test_registration(device, masked):
    states, score, mask = make_inputs(9, "some", dtype=torch.float32)
    flat = states.flatten(0, 1).to(device).requires_grad_(), score.flatten().to(device).requires_grad_()
    kept, starts = mask.flatten().to(device) if masked else None, torch.tensor([0, 4, 4, 9, 18, 27], device=device)
    # the call registers the operator
    run(states, score, assign_rows(score, mask, 4), mask, 4, device, backend="triton")
    opcheck(torch.ops.luna_mega.segment_pack_triton, (*flat, kept, starts))


@pytest.mark.triton
def test_float64_is_not_supported_on_triton(device):
    states, score, _ = make_inputs(5, "none")
    row = assign_rows(score, None, 2)
    with pytest.raises(ValueError, match="segment_pack cannot run on 'triton': states are float64; choose 'torch'"):
        run(states, score, row, None, 2, backend="triton")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, s, r: assign_rows(s, None, 0), "assign_rows: rows must be positive, got 0"),
        (lambda x, s, r: assign_rows(x, None, 2), "assign_rows needs score .batch, length., got .2, 5, 3."),
        (lambda x, s, r: assign_rows(s, s > 9, 2, cu_seqlens=torch.tensor([0, 4])), "assign_rows needs .* cu_seqlens"),
        (lambda x, s, r: segment_pack(x, s, r.int(), None, 2), "int64 row .* got .2, 5, 3., .2, 5. and torch.int32"),
        (lambda x, s, r: segment_pack(x, s[:1], r, None, 2), "segment_pack needs states .* got .2, 5, 3., .1, 5."),
        (lambda x, s, r: segment_pack(x, s, r, s, 2), "segment_pack needs a bool mask of shape .2, 5."),
        (lambda x, s, r: segment_pack(x, s, r + 2, None, 2), "segment_pack: row must be from 0 to 1, got 2 to 2"),
        (
            lambda x, s, r: luna_unpack(*[x[..., None]] * 3, bias=s[:1]),
            "luna_unpack needs bias of shape .2, 5., got .1, 5.",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 5, 3), torch.randn(2, 5), torch.zeros(2, 5, dtype=torch.long))
