"""`gated_attention` on Triton against the reference in float64; interpreted if there is no GPU."""

import pytest
import torch

from luna_mega.kernels.api import gated_attention, use_float32_precision
from luna_mega.kernels.gated_attention import reference
from tests.kernels import test_gated_attention
from tests.kernels.comparisons import relative_error
from tests.kernels.test_gated_attention import NAMES, TOLERANCE, doubled, run

FUNCTIONS = reference.FUNCTIONS
CHUNK = 16
LENGTHS = [1, CHUNK - 1, CHUNK, 2 * CHUNK + 1]
pytestmark = pytest.mark.triton


def make_inputs(device, queries, keys=None, dtype=torch.float32, size=20, width=37, **options):
    return test_gated_attention.make_inputs(queries, keys, dtype, size=size, width=width, device=device, **options)


def make_mask(device, batch, length, row=True):
    """Return a random mask that drops a chunk of the first sequence and, if `row`, the entire last sequence."""
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(length)) < 0.7
    mask[0, CHUNK : 2 * CHUNK] = False
    if row:
        mask[-1] = False
    return mask.to(device)


def check(inputs, tolerance=None, **options):
    """Compare every result of Triton with the reference in float64, and return the results."""
    results = run(inputs, backend="triton", **options)
    exact = run(doubled(inputs), backend="reference", **options)
    for name, x, result, right in zip(NAMES, [inputs[2], *inputs], results, exact, strict=True):
        assert result.dtype == x.dtype and result.shape == right.shape, name
        assert relative_error(result, right) <= (tolerance or TOLERANCE[x.dtype]), name
    return results


@pytest.mark.covering(1)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [None, CHUNK])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_and_gradients(device, function, causal, chunk, masked):
    for length in LENGTHS if masked else LENGTHS[1::2]:
        options = {"function": function, "causal": causal, "chunk_size": chunk}
        options["mask"] = make_mask(device, 2, length) if masked else None
        results = check(make_inputs(device, length, positions=70), **options)
        if masked:
            assert all((result[-1] == 0).all() for result in results[:-1])
            assert all((result[0, CHUNK : 2 * CHUNK] == 0).all() for result in results[2:4])
            if chunk:
                assert all((result[0, CHUNK : 2 * CHUNK] == 0).all() for result in results[:2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, causal, batch, length, chunk",
    [
        ("softmax", False, 1, 300, None),
        ("laplace", True, 1, 500, None),
        ("softmax", True, 2, 300, 140),
        ("relu2", False, 2, 300, 140),
    ],
)
def test_many_blocks(device, function, causal, batch, length, chunk, monkeypatch):
    """Results are exact with several blocks of queries, keys and columns.

    In the backward pass, a program computes a band of a segment or a group of segments.
    """
    from luna_mega.kernels.gated_attention import triton_backward

    monkeypatch.setattr(triton_backward, "SCORES", 80000)
    inputs = make_inputs(device, length, batch=batch, width=70)
    mask = make_mask(device, batch, length, row=False)
    check(inputs, function=function, causal=causal, chunk_size=chunk, mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, causal, batch, length, chunk", [("laplace", True, 1, 300, None), ("relu2", False, 2, 200, 140)]
)
def test_forward_of_two_kernels(device, function, causal, batch, length, chunk, monkeypatch):
    """For long chunks and wide values, the forward pass with two kernels equals that with one kernel."""
    from luna_mega.kernels.common import triton_choice
    from luna_mega.kernels.gated_attention import triton_backward, triton_products

    kernels = []

    def last(kernel, key, configurations, run):
        kernels.append(configurations[-1])
        return run(configurations[-1])

    monkeypatch.setattr(triton_backward, "SCORES", 80000)
    for name in ("LONG", "WIDE"):
        monkeypatch.setattr(triton_products, name, 60)
    inputs = make_inputs(device, length, batch=batch, width=70, dtype=torch.bfloat16)
    options = {"function": function, "causal": causal, "chunk_size": chunk}
    options["mask"] = make_mask(device, batch, length, row=False)
    check(inputs, **options)
    options |= {"dropout": 0.3, "backend": "triton"}
    torch.manual_seed(0)
    two = gated_attention(*inputs, **options)
    with triton_choice.choosing(last):
        torch.manual_seed(0)
        one = gated_attention(*inputs, **options)
    assert triton_products.Kernels(1) in kernels
    torch.testing.assert_close(two, one, rtol=1e-2, atol=1e-2 * one.abs().max().item())


@pytest.mark.slow
def test_small_numbers_in_float16(device):
    """Causal queries with divisors in the thousands neither underflow nor overflow float16."""
    for size in (0.02, 50.0):
        inputs = make_inputs(device, 500, dtype=torch.float16, batch=1)
        with torch.no_grad():
            inputs[0] *= size
        check(inputs, tolerance=4e-3, function="laplace", causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_mixed_dtypes_and_wide_bias(device, function):
    query, key, value, bias = make_inputs(device, 40)
    inputs = [query, key, value.detach().bfloat16().requires_grad_(), bias.detach().double().requires_grad_()]
    check(inputs, tolerance=1.5e-2, function=function, causal=True)
    assert run(inputs, function=function, backend="triton")[1].dtype == torch.float32


def check_kept(inputs, kept, **options):
    """Compare results at unmasked queries, and their gradients, with the reference in float64."""
    weight = torch.randn(*kept.shape, inputs[2].shape[2], generator=torch.Generator().manual_seed(1)).to(kept.device)
    weight *= kept[..., None]
    results = run(inputs, weight, backend="triton", **options)
    exact = run(doubled(inputs), weight, backend="reference", **options)
    for name, result, right in zip(NAMES, (results[0][kept], *results[1:]), (exact[0][kept], *exact[1:]), strict=True):
        torch.testing.assert_close(result.double(), right, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, causal, chunk",
    [("softmax", True, CHUNK), ("laplace", True, None), ("laplace", True, CHUNK), ("relu2", False, CHUNK)],
)
def test_positions_count_from_the_first_token(device, function, causal, chunk):
    """With left padding, chunks start at the first token, also in a call with only the last queries."""
    inputs, start = make_inputs(device, 40), torch.tensor([-5, -19], device=device)
    mask = torch.arange(40, device=device) + start[:, None] >= 0
    options = {"function": function, "causal": causal, "chunk_size": chunk}
    check_kept(inputs, mask, mask=mask, start=start, **options)
    rest = [inputs[0][:, 30:], *(x[:, 8:] for x in inputs[1:3]), inputs[3]]
    rest = [x.detach().requires_grad_() for x in rest]
    check_kept(rest, mask[:, 30:], mask=mask[:, 8:], start=start + 8, offset=22, **options)


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_offsets_by_row(device, function):
    inputs, row_offset = make_inputs(device, 20, 33), torch.tensor([4, -3], device=device)
    mask = torch.arange(33, device=device) >= row_offset[:, None]
    kept = torch.arange(20, device=device) >= -row_offset[:, None]
    check_kept(inputs, kept, function=function, mask=mask, row_offset=row_offset)
    with pytest.raises(ValueError, match="row_offset is combined with offset 2; the kernels support only offset 0"):
        gated_attention(*inputs, function=function, mask=mask, row_offset=row_offset, offset=2, backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_dropout(device, function, varlen):
    """An identity as the value shows the dropped weights; from these follow other outputs and all gradients."""
    length, rate = 72, 0.3
    inputs = make_inputs(device, length, batch=1 if varlen else 2)
    options = {"function": function, "chunk_size": 24}
    cu_seqlens = {"cu_seqlens": torch.tensor([0, 48, 72], device=device)} if varlen else {}
    on_triton = {**options, **cu_seqlens, "dropout": rate, "backend": "triton"}
    identity = torch.eye(length, device=device).expand(len(inputs[0]), -1, -1)

    def seeded(*tensors):
        torch.manual_seed(5)
        return gated_attention(*tensors, **on_triton)

    query, key, value, bias = (x.detach().double().requires_grad_() for x in inputs)
    complete = gated_attention(query, key, identity.double(), bias, backend="reference", **options)
    shown = seeded(*inputs[:2], identity, inputs[3]).detach().double()
    multiplier = (shown > 0.5 * complete) / (1.0 - rate)
    dropped = complete * multiplier
    torch.testing.assert_close(shown, dropped.detach(), rtol=1e-4, atol=1e-5)
    gone = multiplier[complete > 1e-3] == 0
    assert abs(gone.double().mean() - rate) < 0.05
    assert not torch.equal(multiplier[0, :24, :24], multiplier[0, 24:48, 24:48])
    output, expected = seeded(*inputs), dropped @ value
    weight = torch.randn(output.shape, device=device)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)
    exact = torch.autograd.grad(expected, (query, key, value, bias), weight.double())
    for result, right in zip(torch.autograd.grad(output, inputs, weight), exact, strict=True):
        assert relative_error(result, right) <= 2e-5
    assert not torch.equal(gated_attention(*inputs, **on_triton), output)


@pytest.mark.slow
def test_ieee_and_autocast(device):
    inputs = make_inputs(device, 63)
    with use_float32_precision("ieee"):
        check(inputs, tolerance=2e-6, function="laplace", chunk_size=CHUNK)
    expected = run(inputs, backend="triton")
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = run(inputs, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(inside, expected, strict=True))


@pytest.mark.slow
def test_autocast_multiplies_in_the_dtype_of_the_value(device):
    """Under autocast, products use the dtype of the value, although learned scales make query and key float32."""
    query, key = (torch.randn(2, 40, 16, device=device, requires_grad=True) for _ in range(2))
    value = torch.randn(2, 40, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        output = gated_attention(query, key, value, backend="triton")
    narrow = gated_attention(query.bfloat16(), key.bfloat16(), value, backend="triton")
    assert output.dtype == torch.bfloat16 and output.equal(narrow)
    assert not output.equal(gated_attention(query, key, value, backend="triton"))
    output.float().square().sum().backward()
    assert query.grad.dtype == torch.float32 and query.grad.isfinite().all()
