"""Results do not depend on which tensors the torch backend of `gated_attention` stores for the backward pass."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from luna_mega.kernels.api import gated_attention
from luna_mega.kernels.gated_attention import reference, torch_backend
from tests.kernels.test_gated_attention import CHUNK, FUNCTIONS, make_inputs, make_mask, run


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


@pytest.mark.parametrize("function", FUNCTIONS)
def test_scores_are_kept_while_they_are_no_more_bytes_than_value_and_output(function, products):
    """Scores are stored in one block if they are at most as large as value and output (here 10 columns each)."""
    options = {"function": function, "mask": make_mask("some", 2, 60)}
    for chunk, dtype, blocks in ((20, None, 1), (30, None, 2), (15, torch.float32, 1), (20, torch.bfloat16, 2)):
        inputs = make_inputs(60, dtype=dtype or torch.float64)
        run(inputs, chunk_size=chunk, **options)
        assert len(products) == blocks, (chunk, dtype)
        with torch.no_grad():
            gated_attention(*inputs, chunk_size=chunk, **options)
        assert len(products) == blocks + 1
        products.clear()
    inputs = make_inputs(20)
    output = gated_attention(*inputs, function=function)
    first = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    for again, right in zip(torch.autograd.grad(output.sum(), inputs), first, strict=True):
        assert torch.equal(again, right)
    assert len(products) == 1


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
