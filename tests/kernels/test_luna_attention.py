"""`luna_attention`: half precision, other heads of P, dropout, weights."""

import pytest
import torch

from luna_mega.kernels.api import luna_attention, luna_pack
from luna_mega.kernels.luna_attention import reference


def draw(*lengths, dtype=torch.float64):
    """Return leaves `[2, length, 3, 8]`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 3, 8, generator=generator, dtype=dtype).requires_grad_() for n in lengths]


def random_mask(length):
    """Return a mask whose last row is fully masked."""
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[-1] = False
    return mask


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
    query, key, value = draw(6, 50, 50, dtype=torch.float32)
    mask = random_mask(50)
    torch.manual_seed(0)
    samples = torch.stack([luna_pack(query, key, value, mask, dropout=0.3, backend=backend) for _ in range(100)])
    expected = luna_pack(query, key, value, mask)
    assert (samples[0] - samples[1]).abs().max() > 1e-2
    assert (samples.mean(0) - expected).abs().max() < 6 * samples.std(0).max() / 10
    assert (samples[:, -1] == 0).all()
    gradients = torch.autograd.grad(samples.sum(), (query, key, value))
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_pack_and_unpack_weights(backend):
    """Returning weights does not change the output, and the weights applied to the values reproduce it."""
    x, context, p = draw(7, 11, 5)
    mask, pack_mask = random_mask(11), torch.rand(2, 5) < 0.8
    options = {"context_mask": mask, "pack_mask": pack_mask, "backend": backend}
    expected = luna_attention(x, p, context, context, lambda packed: (packed, packed), **options)
    *actual, weights, pack_weights = luna_attention(
        x, p, context, context, lambda packed: (packed, packed), return_weights=True, **options
    )
    torch.testing.assert_close(actual, list(expected))
    torch.testing.assert_close(torch.einsum("bhlm,bmhk->blhk", pack_weights, context), expected[1])
    torch.testing.assert_close(torch.einsum("bhtl,blhk->bthk", weights, expected[1]), expected[0])
