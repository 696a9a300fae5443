"""`gated_attention`: offsets, left padding, other keys than queries, rounding, stored scores, dropout."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from luna_mega.kernels.api import gated_attention, gated_attention_step
from luna_mega.kernels.gated_attention import reference, torch_backend
from tests.kernels import loops
from tests.kernels.comparisons import assert_same

FUNCTIONS = reference.FUNCTIONS
CHUNK = 8


def make_mask(masking, batch, length, chunk=CHUNK):
    if masking == "none":
        return None
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(length)) < 0.7
    mask[:, 0] = True
    if masking == "chunk and row":
        mask[0, chunk : 2 * chunk] = False
        mask[-1] = False
    return mask


def make_inputs(queries, keys=None, dtype=torch.float64, batch=2, size=6, width=10, positions=None):
    generator = torch.Generator().manual_seed(queries)
    keys = queries if keys is None else keys
    shapes = (batch, queries, size), (batch, keys, size), (batch, keys, width), (2 * (positions or keys) - 1,)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[3] *= 0.5
    return [x.to(dtype).requires_grad_() for x in tensors]


def run(inputs, **options):
    """Return the output, and the gradients of a fixed random projection of it."""
    output = gated_attention(*inputs, **options)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, inputs, weight.to(output))]


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    """Also run the test with small blocks, which end in the middle of chunks, sequences and batches."""
    if request.param == "many blocks":
        monkeypatch.setattr(torch_backend, "BLOCK_ROWS", 3)
        monkeypatch.setattr(torch_backend, "BLOCK_SCORES_CPU", 60)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_float32_inside(backend):
    """Sums are float32 for inputs in half precision, for a value of another dtype, and under autocast."""
    query, value = torch.full((1, 1, 4), 5.0, dtype=torch.float16), torch.ones(1, 4096, 4, dtype=torch.float16)
    key = query.expand(1, 4096, 4)
    torch.testing.assert_close(gated_attention(query, key, value, backend=backend), torch.ones_like(query))
    inputs = make_inputs(19, dtype=torch.float32)
    expected = run(inputs, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(inputs, backend=backend)
    # The backward pass also runs under autocast, which autograd of plain operators does not support.
    for actual, right in list(zip(inside, expected, strict=True))[: 1 if backend == "reference" else None]:
        assert torch.equal(actual, right)
    mixed = gated_attention(*inputs[:2], inputs[2].bfloat16(), inputs[3], backend=backend)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), expected[0], rtol=2e-2, atol=2e-2)


def shifted(x, by, total):
    """Return x `[B, T, W]` in `total` columns, with `by` columns of left padding in each row; padding is random."""
    rows = torch.randn(x.shape[0], total, x.shape[2], dtype=x.dtype)
    for row, first in enumerate(by):
        rows[row, first : first + x.shape[1]] = x[row]
    return rows


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("chunk", [None, CHUNK, 1])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_parts_of_causal_attention_with_left_padding(function, chunk, backend):
    """Causal attention may be computed in several calls and steps, given all keys or only the last ones."""
    query, key, value, bias = (x.detach() for x in make_inputs(24, batch=3))
    start = -torch.tensor([0, 3, 5])
    mask = (torch.arange(24) + start[:, None] >= 0) & (torch.arange(24) + start[:, None] < 19)
    options = {"function": function, "chunk_size": chunk, "backend": backend}
    given = options | {"causal": True, "mask": mask, "start": start}
    output, weights = gated_attention(query, key, value, bias, return_weights=True, **given)
    torch.testing.assert_close(gated_attention(query, key, value, bias, **given)[mask], output[mask])
    assert weights.shape[2:] == ((24, 24) if chunk is None else (chunk, chunk))
    for begin, stop in [(t, t + 1) for t in range(24)] + [(0, 7), (7, 9), (9, 24), (2, 21)]:
        for cut_off in (0, begin if chunk is None else max(begin + 1 - chunk, 0)):
            # Without chunks, every key is visible.
            if chunk is None and cut_off or begin == cut_off and chunk != 1 and begin:
                continue
            keys, kept = slice(cut_off, stop), mask[:, begin:stop]
            arguments = (key[:, keys], value[:, keys], bias)
            parts = options | {"mask": mask[:, keys], "start": start + cut_off}
            part = gated_attention(query[:, begin:stop], *arguments, offset=begin - cut_off, causal=True, **parts)
            assert_same([part[kept]], [output[:, begin:stop][kept]])
            if stop > begin + 1:
                continue
            steps = [gated_attention_step(query[:, begin], *arguments, **parts)]
            if chunk is None:  # also with the query's own key in the middle
                parts |= {"mask": mask, "column": torch.full((3,), begin)}
                steps.append(gated_attention_step(query[:, begin], key, value, bias, **parts))
            for step in steps:
                assert_same([step[kept[:, 0]]], [output[:, begin][kept[:, 0]]])


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_cross_attention_with_left_padding(function, backend, blocks):
    """Left padding of queries and keys does not affect cross-attention, in one call or several."""
    inputs = make_inputs(7, 11, batch=3, positions=15)
    query, key, value, bias = (x.detach() for x in inputs)
    options = {"function": function, "backend": backend}
    exact = run(inputs, **options)
    of_query, of_key = [3, 0, 2], [0, 4, 4]
    padded = [shifted(x, by, total) for x, by, total in ((query, of_query, 10), (key, of_key, 15), (value, of_key, 15))]
    place = torch.arange(15) - torch.tensor(of_key)[:, None]
    options |= {"mask": (place >= 0) & (place < 11), "row_offset": torch.tensor(of_key) - torch.tensor(of_query)}
    inputs = [x.requires_grad_() for x in (*padded, bias)]
    output, weights = gated_attention(*inputs, return_weights=True, **options)
    assert weights.shape == (3, 1, 10, 15)
    for actual in (output, gated_attention(*inputs, **options)):
        cut = torch.stack([actual[row, first : first + 7] for row, first in enumerate(of_query)])
        torch.testing.assert_close(cut, exact[0], rtol=1e-12, atol=1e-12)
        weight = torch.randn(cut.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        gradients = torch.autograd.grad(cut, inputs, weight)
        torch.testing.assert_close(gradients[3], exact[4], rtol=1e-11, atol=1e-11)
        for gradient, right, firsts in zip(gradients, exact[1:4], (of_query, of_key, of_key), strict=False):
            cut = [gradient[row, first : first + right.shape[1]] for row, first in enumerate(firsts)]
            torch.testing.assert_close(torch.stack(cut), right, rtol=1e-11, atol=1e-11)
    for begin, stop in ((0, 1), (4, 5), (4, 10)):
        part = gated_attention(inputs[0][:, begin:stop], *inputs[1:], offset=begin, **options)
        for row, first in enumerate(of_query):
            real = slice(max(first, begin), min(first + 7, stop))
            torch.testing.assert_close(
                part[row, real.start - begin : max(real.stop - begin, 0)], output[row, real], rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "causal, queries, keys, offset",
    [(True, 1, 20, 19), (True, 5, 30, 7), (False, 7, 4, 0), (False, 4, 9, 0), (False, 4, 90, 9), (False, 1, 9, 5)]
    + [(False, 3, 0, 0), (False, 0, 3, 0)],
)
def test_other_keys_than_queries(function, causal, queries, keys, offset, backend):
    """Queries and keys may differ in number, as in cached decoding and cross-attention, and either may be missing."""
    inputs = make_inputs(queries, keys, size=20, width=37, positions=100)
    mask = torch.rand(2, keys) < 0.7
    mask[-1] = False
    for kept in (None, mask):
        options = {"function": function, "causal": causal, "offset": offset, "mask": kept}
        (exact,) = loops.gated_attention(*inputs, **options)
        weight = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        expected = [exact.detach(), *torch.autograd.grad(exact, inputs, weight)]
        assert_same(run(inputs, backend=backend, **options), expected, 1e-12)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_dropout(backend, monkeypatch):
    monkeypatch.setattr(torch_backend, "BLOCK_ROWS", 4)
    inputs = make_inputs(6, dtype=torch.float32)
    options = {"mask": make_mask("chunk and row", 2, 6), "backend": backend}
    samples = torch.stack([gated_attention(*inputs, dropout=0.3, **options) for _ in range(100)])
    expected = gated_attention(*inputs, **options)
    assert (samples[0] - samples[1]).abs().max() > 1e-2
    assert (samples.mean(0) - expected).abs().max() < 6 * samples.std(0).max() / 10
    assert (samples[:, -1] == 0).all()


@pytest.fixture(params=[math.inf, 0.0], ids=["kept", "computed again"])
def kept(request, monkeypatch):
    """Run the test with scores that are always stored for the backward pass, and with scores that never are."""
    monkeypatch.setattr(torch_backend, "KEPT", request.param)


@pytest.fixture
def products(monkeypatch):
    """Return a list of the number of scores in every block that is computed."""
    sizes, product = [], torch.baddbmm

    def watched(*arguments, **options):
        scores = product(*arguments, **options)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(torch, "baddbmm", watched)
    return sizes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_query_is_divided_before_the_product(function, causal, kept):
    """Results are equal bit for bit in float32, because results of published checkpoints depend on this rounding."""
    query, key, value, bias = inputs = make_inputs(17, dtype=torch.float32)
    lag = torch.arange(17) - torch.arange(17)[:, None]
    matrix = bias[bias.shape[0] // 2 + lag]
    divisor = math.sqrt(6) if function == "softmax" else 17
    if causal:
        matrix = matrix.masked_fill(lag > 0, -math.inf)
        divisor = divisor if function == "softmax" else torch.arange(1, 18)[:, None]
    scores = torch.baddbmm(matrix, query / divisor, key.mT)
    weights = scores.softmax(-1) if function == "softmax" else getattr(reference, function)(scores)
    assert torch.equal(gated_attention(*inputs, function=function, causal=causal), torch.bmm(weights, value))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_stored_scores_do_not_change_results(function, monkeypatch):
    """Results are equal for varlen sequences, under autocast, and with gradient checkpointing."""
    query, key, value, bias = make_inputs(40, dtype=torch.float32, batch=1)
    found = []
    for most in (math.inf, 0.0):
        monkeypatch.setattr(torch_backend, "KEPT", most)
        for options in ({"cu_seqlens": torch.tensor([0, 9, 12, 40])}, {"chunk_size": CHUNK}):
            attend = partial(gated_attention, function=function, **options)
            again = partial(checkpoint, attend, use_reentrant=False)
            for call, autocast in ((attend, False), (again, False), (attend, True)):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    output = call(query, key, value, bias)
                    found.append([output, *torch.autograd.grad(output.square().sum(), (query, key, value, bias))])
    for first, second in zip(found[:6], found[6:], strict=True):
        assert all(map(torch.equal, first, second))
    for results in (found[:3], found[3:6]):
        assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


def test_scores_of_one_block_at_a_time(products):
    """At most 256 rows of the 2048 x 2048 scores exist at a time, in the forward and the backward pass."""
    run(make_inputs(2048, dtype=torch.float32, batch=1), function="laplace")
    assert products == [256 * 2048] * 16


@pytest.mark.covering(1)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_with_dropout(function, kept, monkeypatch):
    """The backward pass drops the same weights as the forward pass."""
    monkeypatch.setattr(torch_backend, "BLOCK_ROWS", 2)

    def attend(*tensors):
        torch.manual_seed(5)
        return gated_attention(*tensors, function=function, chunk_size=3, dropout=0.4)

    assert torch.autograd.gradcheck(attend, make_inputs(5, batch=1, size=2, width=2))
