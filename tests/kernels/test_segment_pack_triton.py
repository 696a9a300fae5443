"""`segment_pack` in Triton against the reference in float64; interpreted if there is no GPU."""

import pytest
import torch
from torch.library import opcheck

from luna_mega.kernels.api import assign_rows, luna_unpack, segment_pack
from tests.kernels.test_segment_pack import MASKS, make_inputs, run
from tests.marks import slow_but

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def device(triton_device, monkeypatch):
    """Tiles of 4 tokens and 16 features."""
    from luna_mega.kernels.segment_pack import triton_kernels

    monkeypatch.setattr(triton_kernels, "BLOCK_T", 4)
    monkeypatch.setattr(triton_kernels, "LARGEST_D", 16)
    return triton_device


@pytest.mark.parametrize("dtype", slow_but([torch.float32], TOLERANCE), ids=str)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("length, rows, width", [(1, 1, 1), (3, 5, 16), (17, 3, 7), (40, 8, 33)])
def test_forward_and_gradients(device, length, rows, width, masking, dtype):
    states, score, mask = make_inputs(length, masking, scale=2.0, width=width, dtype=dtype)
    row = assign_rows(score, mask, rows)
    expected = run(states.double(), score.double(), row, mask, rows, backend="reference")
    actual, again = (run(states, score, row, mask, rows, device, backend="triton") for _ in range(2))
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    for a, b, c in zip(actual, again, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.double(), c.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_masked_tokens_are_not_loaded(device):
    states, score, mask = make_inputs(20, "all of one row", dtype=torch.float32)
    row = assign_rows(score, mask, 4)
    expected = run(states, score, row, mask, 4, device, backend="triton")
    hidden = states.masked_fill(~mask[..., None], float("nan")), score.masked_fill(~mask, float("nan"))
    for a, b in zip(run(*hidden, row, mask, 4, device, backend="triton"), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("output", [0, 1])
def test_gradients_of_one_output(device, output):
    states, score, mask = make_inputs(20, dtype=torch.float32)
    row, gradients = assign_rows(score, mask, 4), []
    for backend, place in (("reference", "cpu"), ("triton", device)):
        leaves = [x.to(place).requires_grad_() for x in (states.clone(), score.clone())]
        results = segment_pack(*leaves, row.to(place), mask.to(place), 4, backend=backend)
        results[output].sin().sum().backward()
        gradients.append([torch.zeros_like(x) if x.grad is None else x.grad.cpu() for x in leaves])
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected.to(actual), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_padding_free(device, masked):
    lengths, rows = [9, 1, 0, 14], 6
    states, score, mask = make_inputs(sum(lengths), "some", batch=1, dtype=torch.float32)
    mask = mask if masked else None
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    row = assign_rows(score, mask, rows, cu_seqlens=bounds)
    expected = run(states.double(), score.double(), row, mask, rows, backend="reference", cu_seqlens=bounds)
    actual = run(states, score, row, mask, rows, device, backend="triton", cu_seqlens=bounds.to(device))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_registration(device, masked):
    states, score, mask = make_inputs(9, "some", dtype=torch.float32)
    flat = states.flatten(0, 1).to(device).requires_grad_(), score.flatten().to(device).requires_grad_()
    kept, starts = mask.flatten().to(device) if masked else None, torch.tensor([0, 4, 4, 9, 18, 27], device=device)
    opcheck(torch.ops.luna_mega.segment_pack_triton, (*flat, kept, starts))


@pytest.mark.parametrize("size", [8, 127])
def test_unpack_with_bias(triton_device, size):
    """With a mask, for tied keys and values."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, n, 1, size, generator=generator) for n in (7, 5))
    bias, mask = torch.randn(2, 5, generator=generator), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    results = []
    for backend, device in (("reference", "cpu"), ("triton", triton_device)):
        leaves = [x.detach().to(device).requires_grad_() for x in (query, key, bias)]
        output = luna_unpack(*leaves[:2], leaves[1], mask.to(device), bias=leaves[2], backend=backend)
        results.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_float64_is_not_supported(triton_device):
    states, score, _ = make_inputs(5, "none")
    row = assign_rows(score, None, 2)
    with pytest.raises(ValueError, match="segment_pack cannot run on 'triton': states are float64; choose 'torch'"):
        run(states, score, row, None, 2, backend="triton")
