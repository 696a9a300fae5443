"""`assign_rows` and `segment_pack`: the reference against loops, the torch backend against the reference in float64."""

import math

import pytest
import torch

from luna_mega.kernels.api import assign_rows, luna_unpack, segment_pack
from luna_mega.kernels.segment_pack import reference

SIZES = [(1, 1), (1, 4), (6, 8), (8, 8), (9, 6), (50, 8), (200, 32), (300, 1)]  # tokens, rows
MASKS = ["none", "some", "all of one row"]
SCALES = [0.0, 0.5, 3.0, 40.0]  # of the scores


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


def run(states, score, row, mask, rows, device="cpu", **options):
    """Return the outputs, and the gradients of a fixed random projection."""
    states, score = (x.detach().to(device).requires_grad_() for x in (states, score))
    row, mask = row.to(device), None if mask is None else mask.to(device)
    packed, entropy, filled = segment_pack(states, score, row, mask, rows, **options)
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
    """By bisection: the costs sum to the rows, and a token of cost 1 has a separate row."""
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
    # Scores of size 40 have many equal costs; rounding of float32 decides on ties.
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("length, rows", SIZES)
def test_torch_backend(length, rows, masking, dtype):
    states, score, mask = make_inputs(length, masking, scale=2.0, dtype=dtype)
    row = assign_rows(score, mask, rows)
    expected = run(states.double(), score.double(), row, mask, rows, backend="reference")
    actual = run(states, score, row, mask, rows, backend="torch")
    again = run(states, score, row, mask, rows, backend="torch")
    assert actual[0].dtype == dtype and actual[1].dtype == torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for a, b, c in zip(actual, expected, again, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)
        assert torch.equal(a, c)


def test_gradients_equal_finite_differences():
    states, score, mask = make_inputs(9)
    row = assign_rows(score, mask, 4)

    def pack(states, score):
        return segment_pack(states, score, row, mask, 4, backend="torch")[:2]

    assert torch.autograd.gradcheck(pack, (states.requires_grad_(), score.requires_grad_()))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_masked_tokens_have_no_effect(backend):
    states, score, mask = make_inputs(20, "all of one row")
    row = assign_rows(score, mask, 4)
    expected = run(states, score, row, mask, 4, backend=backend)
    hidden = states.masked_fill(~mask[..., None], math.nan), score.masked_fill(~mask, 50.0)
    actual = run(*hidden, row, mask, 4, backend=backend)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not actual[2][-1].any() and (actual[0][-1] == 0).all() and (actual[1][-1] == 0).all()
    assert (actual[3][~mask] == 0).all() and (actual[4][~mask] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_padding_free(backend, masked):
    lengths, rows = [9, 1, 30, 4], 6
    singles = [make_inputs(length, "some" if masked else "none", batch=1) for length in lengths]
    states, score = (torch.cat([x[index] for x in singles], dim=1) for index in (0, 1))
    mask = torch.cat([x[2] for x in singles], dim=1) if masked else None
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    row = assign_rows(score, mask, rows, cu_seqlens=bounds)
    packed, entropy, filled, *gradients = run(states, score, row, mask, rows, backend=backend, cu_seqlens=bounds)
    start = 0
    for index, (own_states, own_score, own_mask) in enumerate(singles):
        own_row = assign_rows(own_score, own_mask, rows)
        end = start + lengths[index]
        kept = slice(None) if own_mask is None else own_mask[0]
        assert torch.equal(row[0, start:end][kept], own_row[0][kept])
        expected = segment_pack(own_states, own_score, own_row, own_mask, rows, backend=backend)
        for a, b in zip((packed, entropy, filled), expected, strict=True):
            torch.testing.assert_close(a[index], b[0])
        start = end
    assert [x.shape for x in gradients] == [states.shape, score.shape]


def test_entropy_makes_attention_exact_if_tokens_differ_by_their_scores():
    """Keys that differ only in one feature, which is the score: attention to 5 rows equals attention to 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    states = torch.cat([score[..., None], torch.randn(2, 40, 6, generator=generator, dtype=torch.float64)], dim=-1)
    row = assign_rows(score, None, 5)
    packed, entropy, filled = segment_pack(states, score, row, None, 5)
    query = torch.randn(2, 3, 1, 7, generator=generator, dtype=torch.float64)

    def key(states):  # q . k / sqrt(7) = 2 + score
        own = torch.cat([states[..., :1], torch.ones_like(states[..., :1])], dim=-1)
        return torch.nn.functional.pad(own, (0, 5))[:, :, None]

    query = torch.nn.functional.pad(torch.tensor([1.0, 2.0], dtype=torch.float64) * math.sqrt(7), (0, 5)).expand_as(
        query
    )
    full = luna_unpack(query, key(states), states[:, :, None])
    short = luna_unpack(query, key(packed), packed[:, :, None], filled, bias=entropy)
    torch.testing.assert_close(short, full)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("tied", [False, True])
def test_unpack_with_bias(backend, tied):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, 3, 8, generator=generator, dtype=torch.float64) for n in (7, 5, 5))
    bias, mask = (
        torch.randn(2, 5, generator=generator, dtype=torch.float64),
        torch.rand(2, 5, generator=generator) < 0.7,
    )
    value = key if tied else value
    leaves = [x.requires_grad_() for x in ((query, key, bias) if tied else (query, key, value, bias))]
    logits = torch.einsum("bthk,blhk->bhtl", query, key) / math.sqrt(8) + bias[:, None, None]
    weights = logits.masked_fill(~mask[:, None, None], -math.inf).softmax(dim=-1)
    expected = torch.einsum("bhtl,blhk->bthk", weights, value)
    actual = luna_unpack(query, key, value, mask, bias=bias, backend=backend)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)
    output, returned = luna_unpack(query, key, value, mask, bias=bias, return_weights=True)
    torch.testing.assert_close((output, returned), (expected, weights))


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
