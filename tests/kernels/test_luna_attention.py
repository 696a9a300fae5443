"""`luna_attention`: half precision, other heads of P, dropout, invalid arguments."""

import pytest
import torch

from luna_mega.kernels.api import luna_attention, luna_pack, luna_unpack
from luna_mega.kernels.luna_attention import reference
from tests.kernels.comparisons import relative_error


def make_inputs(queries, keys, masking, dtype=torch.float64, batch=2, heads=3, size=8, tied=False, device="cpu"):
    """Return the list of query, key and value (omitted if tied, since it is the key), and the mask."""
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    lengths = (queries, keys) if tied else (queries, keys, keys)
    leaves = [torch.randn(batch, n, heads, size, generator=generator, dtype=torch.float64) for n in lengths]
    mask = None
    if masking != "none":
        mask = torch.rand(batch, keys, generator=generator) < 0.7
        mask[:, 0] = True
        if masking == "all of one row":
            mask[-1] = False
        mask = mask.to(device)
    return [x.to(device, dtype).requires_grad_() for x in leaves], mask


def run(attend, leaves, *arguments, **options):
    """Return the output, and the gradients of a fixed random projection of it; the last leaf is the value."""
    output = attend(leaves[0], leaves[1], leaves[-1], *arguments, **options)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(output)
    return [output.detach(), *torch.autograd.grad(output, leaves, weight)]


def exact(query, key, value, mask=None):
    return reference.attend(query, key, value, mask, query.shape[-1] ** -0.5)[0]


def doubled(leaves):
    return [x.detach().double().requires_grad_() for x in leaves]


def check(actual, expected, tolerance):
    """Check that the error of every tensor and of its rows is at most `tolerance`."""
    for name, a, e in zip(("output", "query", "key", "value"), actual, expected, strict=False):
        assert torch.isfinite(a).all(), name
        assert relative_error(a, e) <= tolerance, (name, relative_error(a, e))


def test_low_precision_softmax_is_float32():
    """The softmax of half-precision scores is float32: weights of 1/4096 do not vanish, as they would in float16."""
    query = torch.full((1, 1, 1, 4), 5.0, dtype=torch.float16)
    key, value = torch.full((1, 4096, 1, 4), 5.0, dtype=torch.float16), torch.ones(1, 4096, 1, 4, dtype=torch.float16)
    for backend in ("reference", "torch"):
        torch.testing.assert_close(luna_pack(query, key, value, backend=backend), torch.ones_like(query))


def test_tied_and_untied_with_other_pack_heads():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 33, 4, 6, generator=generator, dtype=torch.float64)
    p = torch.randn(2, 5, 2, 12, generator=generator, dtype=torch.float64)
    context = x.reshape(2, 33, 2, 12)
    mask, pack_mask = torch.rand(2, 33) < 0.8, torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    mask[:, 0] = True
    for project in (
        lambda packed: (packed.reshape(2, 5, 4, 6),) * 2,
        lambda packed: (packed.reshape(2, 5, 4, 6), packed.reshape(2, 5, 4, 6).sin()),
    ):
        packed, _ = reference.attend(p, context, context, mask, 12**-0.5)
        output, _ = reference.attend(x, *project(packed), pack_mask, 6**-0.5)
        actual = luna_attention(x, p, context, context, project, context_mask=mask, pack_mask=pack_mask)
        torch.testing.assert_close(actual, (output, packed))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_dropout(backend):
    (query, key, value), mask = make_inputs(6, 50, "all of one row", torch.float32)
    torch.manual_seed(0)
    samples = torch.stack([luna_pack(query, key, value, mask, dropout=0.3, backend=backend) for _ in range(100)])
    expected = luna_pack(query, key, value, mask)
    assert (samples[0] - samples[1]).abs().max() > 1e-2
    assert (samples.mean(0) - expected).abs().max() < 6 * samples.std(0).max() / 10
    assert (samples[:, -1] == 0).all()
    gradients = torch.autograd.grad(samples.sum(), (query, key, value))
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q[0], k, v, None), "batch, length, heads, head size"),
        (lambda q, k, v: (q, k, v[:, :2], None), "must agree"),
        (lambda q, k, v: (q[:, :, :2], k, v, None), "must agree"),
        (lambda q, k, v: (q, k.float(), v, None), "dtypes differ"),
        (lambda q, k, v: (q, k, v, torch.ones(2, 4)), "bool mask"),
        (lambda q, k, v: (q, k, v, torch.ones(2, 3, dtype=torch.bool)), "bool mask"),
    ],
)
def test_bad_arguments(change, message):
    inputs, _ = make_inputs(2, 4, "none")
    with pytest.raises(ValueError, match=message):
        luna_pack(*change(*inputs))


def test_bad_dropout():
    inputs, _ = make_inputs(2, 4, "none")
    with pytest.raises(ValueError, match="dropout must be in"):
        luna_pack(*inputs, dropout=1.0)


def test_invalid_cu_seqlens_raise():
    x, p, cu_seqlens = torch.randn(1, 11, 2, 6), torch.randn(4, 5, 2, 6), torch.tensor([0, 3, 3, 10, 11])
    key = value = x
    with pytest.raises(ValueError, match="needs key .1, total, heads, head size. and 4 rows in the other batch"):
        luna_pack(p[:3], key, value, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="needs query .1, total"):
        luna_unpack(x.expand(2, -1, -1, -1), p, p, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="must increase from 0 to 10"):
        luna_pack(p, key[:, :10], value[:, :10], cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="max_seqlen is 6"):
        luna_unpack(x, p, p, cu_seqlens=cu_seqlens, max_seqlen=6)
    with pytest.raises(ValueError, match="the same total length"):
        luna_attention(x[:, :5], p, key, value, lambda packed: (packed, packed), cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="batch size"):
        luna_pack(p, key, value)
