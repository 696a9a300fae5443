"""`luna_causal_attention`: exact activations, thousands of steps, steps in place, dropout, weights, memory."""

import decimal
import math

import pytest
import torch

from luna_mega.kernels.api import LunaCausalState, luna_causal_attention, luna_causal_attention_step
from luna_mega.kernels.luna_causal_attention import reference, torch_backend
from tests.kernels.backends import on_triton
from tests.kernels.comparisons import assert_same, relative_error

CHUNK = torch_backend.CHUNK
ACTIVATIONS = reference.ACTIVATIONS


def draw(length, heads=3, size=5, width=6, rows=4, dtype=torch.float64):
    """Return query, pack_query, pack_key, key and value."""
    generator = torch.Generator().manual_seed(10 * length + rows)
    shapes = [(2, length, heads, size)] * 3 + [(2, rows, heads, size), (2, length, heads, width)]
    tokens = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    query, pack_key, key, pack_query, value = (x.requires_grad_() for x in tokens)
    return [query, pack_query, pack_key, key, value]


def draw_state(heads=3, size=5, width=6, rows=4):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, size, rows), (2, heads, rows, width)
    means = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    return LunaCausalState(*means, torch.tensor([7, 300]))


def random_mask(length):
    position = torch.arange(length)
    return torch.stack([torch.ones(length, dtype=torch.bool), (position < length // 4) | (position >= length // 2)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_in_both_tails(activation, dtype):
    """Value and slope are exact for all scores.

    PyTorch's softplus is off by 3e-9 at s = 29, and its elu(s) + 1 is 0 for s < -37.
    """
    numbers = [-700.0, -80.0, -40.0, -9.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 9.0, 28.0, 29.0, 57.0, 58.0, 100.0, 1e4]
    scores = torch.tensor([s for s in numbers if dtype == torch.float64 or s > -90], dtype=dtype, requires_grad=True)
    actual = reference.activate(scores, activation)
    (slope,) = torch.autograd.grad(actual.sum(), scores)
    torch.testing.assert_close(torch_backend._slope(scores.detach(), activation), slope)
    with decimal.localcontext(prec=600):
        for s, value, rate in zip(scores.tolist(), actual.tolist(), slope.tolist(), strict=True):
            exact = decimal.Decimal(s)
            if activation == "elu":
                exact_value, exact_rate = (exact + 1, 1) if s > 0 else (exact.exp(), exact.exp())
            else:
                power = 2**exact
                exact_value = (1 + power).ln() / decimal.Decimal(2).ln()
                exact_rate = power / (1 + power)
            tolerance = 4 * max(1.0, -s) * torch.finfo(dtype).eps
            assert value == pytest.approx(float(exact_value), rel=tolerance, abs=0)
            assert rate == pytest.approx(float(exact_rate), rel=tolerance, abs=0)


def test_thousands_of_steps_in_float32():
    """After 3,000 steps the error of the means is within float32 rounding, and no step modifies its input state."""
    leaves = [x.detach() for x in draw(3000)]
    exact, last = luna_causal_attention(*leaves, return_state=True)
    query, pack_query, pack_key, key, value = (x.float() for x in leaves)
    state, outputs = None, []
    for t in range(3000):
        before = None if state is None else [x.clone() for x in state]
        output, following = luna_causal_attention_step(
            query[:, t], pack_query, pack_key[:, t], key[:, t], value[:, t], state
        )
        assert state is None or all(map(torch.equal, state, before))
        state = following
        outputs.append(output)
    assert_same([torch.stack(outputs, 1), *state[:2]], [exact, *last[:2]], 1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    "backend, dtype",
    [(name, dtype) for name in ("reference", "torch") for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    + [on_triton(torch.float32)],
    ids=str,
)
def test_steps_in_place(backend, dtype, triton_device):
    """Steps in place keep the address of the state and give the results of separate states."""
    device = triton_device if backend == "triton" else torch.device("cpu")
    query, pack_query, pack_key, key, value = (x.detach().to(device) for x in draw(6, dtype=dtype))
    mask = random_mask(6).to(device)
    options = {"pack_mask": (torch.arange(4) != torch.tensor([[0], [3]])).to(device), "backend": backend}
    states = []
    for inplace in (False, True):
        state, outputs, places = None, [], set()
        for t in range(6):
            tokens = (query[:, t], pack_query, *(x[:, t] for x in (pack_key, key, value)))
            given = {} if state is None else {"inplace": inplace}
            output, state = luna_causal_attention_step(*tokens, state, mask=mask[:, t], **options, **given)
            outputs.append(output)
            places.add(tuple(x.data_ptr() for x in state))
        assert len(places) == 1 or not inplace
        states.append([torch.stack(outputs), *state])
    for separate, written in zip(*states, strict=True):
        torch.testing.assert_close(written, separate, atol=1e-6, rtol=1e-6)


def test_large_activations_in_float16():
    """At 8 times unit scale, results are exact, although sums of the original overflow float16 within 2048 tokens."""
    half = [(8 * x.detach()).half() for x in draw(2048, size=64, width=64, heads=2, rows=16)]
    output, state = luna_causal_attention(*half, return_state=True)
    exact = luna_causal_attention(*(leaf.double() for leaf in half))
    assert output.dtype == torch.float16 and torch.isfinite(output).all()
    assert all(torch.isfinite(x).all() for x in state)
    assert relative_error(output, exact) < 6e-4
    query, pack_query, pack_key, key, _ = half
    packed = reference.activate(torch.einsum("bthk,blhk->bhtl", pack_key, pack_query / 8), "softplus")
    assert not torch.isfinite(torch.einsum("bthk,bhtl->bhkl", key.abs(), packed)).all()


def test_memory_is_linear(monkeypatch):
    """Only the inputs are stored for the backward pass, and no tensor has T x K x L elements."""
    sizes, kept = [], []
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *x: sizes.append((out := product(*x)).numel()) or out)
    for length in (1024, 4096):
        leaves = draw(length, size=32, width=32, rows=16, dtype=torch.float32)
        sizes.clear()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            outputs = luna_causal_attention(*leaves)
        torch.autograd.grad(outputs.sum(), leaves)
        assert sum(kept) == sum(leaf.numel() for leaf in leaves) + 2 * length  # plus the counts
        assert max(sizes) <= 2 * length * CHUNK  # one head of both sequences


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 6])
def test_dropout(backend, length):
    """The mean of the state over samples is the state without dropout, and equal seeds give equal results."""
    inputs = [x.detach() for x in draw(length, rows=8, dtype=torch.float32)]
    leaves = [x.expand(200, *x.shape).flatten(0, 1) for x in inputs]
    options = {"return_state": True, "backend": backend}
    output, state = luna_causal_attention(*leaves, dropout=0.3, **options)
    plain, exact = luna_causal_attention(*inputs, **options)
    for dropped, right in zip(state[:2], exact[:2], strict=True):
        samples = dropped.unflatten(0, (200, 2))
        assert ((samples.mean(0) - right).abs() <= 6 * samples.std(0) / math.sqrt(200) + 1e-6).all()
    assert (output.unflatten(0, (200, 2)).std(0) > 1e-3).all()
    if length == 1:  # key and value sums use the same dropped pack weights
        packed = state.value_mean[..., 0] / leaves[4][:, 0, :, None, 0]
        torch.testing.assert_close(state.key_mean[..., 0, :], packed * leaves[3][:, 0, :, :1])
        assert 0.25 < (packed == 0).float().mean() < 0.35
    torch.manual_seed(3)
    first = luna_causal_attention(*leaves, dropout=0.3, **options)[0]
    torch.manual_seed(3)
    assert torch.equal(first, luna_causal_attention(*leaves, dropout=0.3, **options)[0])


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 1 << 60], ids=["a head each", "one block"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_with_dropout(monkeypatch, activation, block):
    """The backward pass drops the same weights as the forward pass."""
    monkeypatch.setattr(torch_backend, "CHUNK", 2)
    monkeypatch.setattr(torch_backend, "BLOCK_TOKENS", block)
    sizes, mask = {"heads": 2, "size": 2, "width": 2, "rows": 3}, torch.arange(5) >= torch.tensor([[0], [1]])
    *means, count = draw_state(**sizes)

    def attend(*leaves):
        torch.manual_seed(5)
        options = {"activation": activation, "dropout": 0.4, "mask": mask, "return_state": True}
        output, state = luna_causal_attention(*leaves[:5], state=LunaCausalState(*leaves[5:], count), **options)
        return output, *state[:2]

    assert torch.autograd.gradcheck(attend, [*draw(5, **sizes), *means])


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_causal_weights(backend):
    """Every backend returns the weights over unmasked rows of P, and the output and state without the option."""
    leaves, pack_mask = draw(9), torch.arange(4) != torch.tensor([[0], [3]])
    options = {"mask": random_mask(9), "pack_mask": pack_mask, "state": draw_state(), "backend": backend}
    expected = luna_causal_attention(*leaves, return_state=True, **options)
    output, weights, after = luna_causal_attention(*leaves, return_state=True, return_weights=True, **options)
    torch.testing.assert_close((output, *after), (expected[0], *expected[1]))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))
    assert (weights.movedim(-1, 1)[~pack_mask] == 0).all()
    separate = luna_causal_attention(*leaves, return_weights=True, **options)
    assert len(separate) == 2 and torch.equal(separate[1], weights)
