"""`luna_causal_attention`: exact activations, steps in place, rows without tokens, memory, invalid arguments."""

import decimal
import math

import pytest
import torch

from luna_mega.kernels.api import LunaCausalState, luna_causal_attention, luna_causal_attention_step
from luna_mega.kernels.luna_causal_attention import reference, torch_backend
from tests.kernels.backends import on_triton
from tests.kernels.comparisons import assert_same, relative_error
from tests.kernels.leaves import Leaves

CHUNK = torch_backend.CHUNK
ACTIVATIONS = reference.ACTIVATIONS
MASKS = ["none", "left", "right", "middle", "all of one row"]
FUSED, SCANS = 16, 70  # numbers of rows of P for which Triton uses the fused kernel and the scans
NAMES = ("query", "pack_query", "pack_key", "key", "value", "key_mean", "value_mean")


def make_mask(masking, length):
    position = torch.arange(length)
    some = {
        "left": position >= length // 3,
        "right": position < length - length // 3,
        "middle": (position < length // 4) | (position >= length // 2),
        "all of one row": torch.zeros(length, dtype=torch.bool),
    }
    return None if masking == "none" else torch.stack([torch.ones(length, dtype=torch.bool), some[masking]])


@pytest.fixture
def small_tiles(monkeypatch):
    """Use segments of 64 tokens."""
    from luna_mega.kernels.luna_causal_attention import triton_forward

    monkeypatch.setattr(triton_forward, "MIN_SEGMENT", 64)


class Inputs(Leaves):
    """Tensors in the order of `NAMES`; the two means exist only with a state."""

    def __init__(self, length, masking="none", stateful=False, pack_masked=False, heads=3, size=5, width=6, rows=4):
        generator = torch.Generator().manual_seed(10 * length + rows)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        tokens = [normal(2, length, heads, size) for _ in range(3)]
        leaves = [tokens[0], normal(2, rows, heads, size), *tokens[1:], normal(2, length, heads, width)]
        if stateful:
            self.states = 2
            leaves += [normal(2, heads, size, rows), normal(2, heads, rows, width)]
            self.count = torch.tensor([7, 300])
        self.mask = make_mask(masking, length)
        self.pack_mask = torch.arange(rows) != torch.tensor([[0], [rows - 1]]) if pack_masked else None
        self.leaves = [leaf.requires_grad_() for leaf in leaves]

    def call(self, *leaves, **options):
        """Return the output and both means after the last token."""
        state = None if self.count is None else LunaCausalState(*leaves[5:], self.count)
        options = {"mask": self.mask, "pack_mask": self.pack_mask, "state": state, **options}
        output, state = luna_causal_attention(*leaves[:5], return_state=True, **options)
        return output, *state[:2]


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


@pytest.fixture(params=["one block", "a head each"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(torch_backend, "BLOCK_TOKENS", 1 if request.param == "a head each" else 1 << 60)


def test_thousands_of_steps_in_float32():
    """After 3,000 steps the error of the means is within float32 rounding, and no step modifies its input state."""
    inputs = Inputs(3000)
    exact = inputs.call(*inputs.leaves)
    query, pack_query, pack_key, key, value = (leaf.detach().float() for leaf in inputs.leaves)
    state, outputs = None, []
    for t in range(3000):
        before = None if state is None else [x.clone() for x in state]
        output, following = luna_causal_attention_step(
            query[:, t], pack_query, pack_key[:, t], key[:, t], value[:, t], state
        )
        assert state is None or all(map(torch.equal, state, before))
        state = following
        outputs.append(output)
    assert_same([torch.stack(outputs, 1), *state[:2]], exact, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    "backend, dtype",
    [(name, dtype) for name in ("reference", "torch") for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    + [on_triton(torch.float32)],
    ids=str,
)
def test_steps_in_place(device, backend, dtype):
    """Steps in place keep the address of the state and give the results of separate states."""
    inputs = Inputs(6, "middle", pack_masked=True).to(dtype)
    query, pack_query, pack_key, key, value = (leaf.detach().to(device) for leaf in inputs.leaves)
    options = {"pack_mask": inputs.pack_mask.to(device), "backend": backend}
    states = []
    for inplace in (False, True):
        state, outputs, places = None, [], set()
        for t in range(6):
            tokens = (query[:, t], pack_query, *(x[:, t] for x in (pack_key, key, value)))
            given = {} if state is None else {"inplace": inplace}
            output, state = luna_causal_attention_step(
                *tokens, state, mask=inputs.mask[:, t].to(device), **options, **given
            )
            outputs.append(output)
            places.add(tuple(x.data_ptr() for x in state))
        assert len(places) == 1 or not inplace
        states.append([torch.stack(outputs), *state])
    for separate, written in zip(*states, strict=True):
        torch.testing.assert_close(written, separate, atol=1e-6, rtol=1e-6)
    with torch.enable_grad(), pytest.raises(ValueError, match="inplace needs a state, and torch.no_grad"):
        luna_causal_attention_step(*tokens, state, inplace=True)


@pytest.mark.parametrize(
    "backend, length, rows",
    [(name, length, 4) for name in ("reference", "torch") for length in (1, 90)]
    + [on_triton(length, rows) for length in (1, 20) for rows in (FUSED, SCANS)],
)
def test_rows_without_tokens_and_without_p(device, backend, length, rows):
    """Rows without tokens or without P have outputs and gradients of 0, also after a state of zero tokens."""
    heads, dtype = (1, torch.float32) if backend == "triton" else (3, torch.float64)
    inputs = Inputs(length, "all of one row", stateful=True, heads=heads, rows=rows).to(dtype).on(device)
    inputs.count = torch.tensor([4, 0], device=device)
    inputs.pack_mask = torch.tensor([[False] * rows, [True] * rows], device=device)
    output, _, _, *gradients = inputs.run(device=device, backend=backend)
    assert (output == 0).all()
    assert all((gradient[1] == 0).all() for gradient in gradients)
    output = inputs.call(*inputs.leaves, backend=backend)[0]
    for gradient in torch.autograd.grad(output.sum(), inputs.leaves):
        assert (gradient == 0).all()
    padding_first = Inputs(length + 3, heads=heads, rows=rows).to(dtype).on(device)
    padding_first.mask = torch.arange(length + 3, device=device).expand(2, -1) >= 3
    assert (padding_first.call(*padding_first.leaves, backend=backend)[0][:, :3] == 0).all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 70])
def test_masked_rows_of_p_are_as_if_absent(backend, length):
    """Results and gradients equal a call without the masked rows, for any content; the state of these rows is 0."""
    inputs = Inputs(length)
    keep = torch.tensor([True, False, True, True])

    def without(query, pack_query, *rest):
        return inputs.call(query, pack_query[:, keep], *rest, backend=backend)

    def masked(query, pack_query, *rest):
        poisoned = pack_query.masked_fill(~keep[:, None, None], math.nan)
        options = {"pack_mask": keep.expand(2, -1), "backend": backend}
        output, key_mean, value_mean = inputs.call(query, poisoned, *rest, **options)
        assert (key_mean[..., ~keep] == 0).all() and (value_mean[:, :, ~keep] == 0).all()
        return output, key_mean[..., keep], value_mean[:, :, keep]

    assert_same(inputs.run(masked), inputs.run(without))


def test_large_activations_in_float16():
    """At 8 times unit scale, results are exact, although sums of the original overflow float16 within 2048 tokens."""
    inputs = Inputs(2048, size=64, width=64, heads=2, rows=16)
    inputs.leaves = [8 * leaf.detach() for leaf in inputs.leaves]
    half = [leaf.half() for leaf in inputs.leaves]
    output, state = luna_causal_attention(*half, return_state=True)
    exact = luna_causal_attention(*(leaf.double() for leaf in half))
    assert output.dtype == torch.float16 and torch.isfinite(output).all()
    assert all(torch.isfinite(x).all() for x in state)
    assert relative_error(output, exact) < 6e-4
    query, pack_query, pack_key, key, _ = half
    packed = reference.activate(torch.einsum("bthk,blhk->bhtl", pack_key, pack_query / 8), "softplus")
    assert not torch.isfinite(torch.einsum("bthk,bhtl->bhkl", key.abs(), packed)).all()


def test_autocast_and_mixed_states():
    inputs = Inputs(100, "left", stateful=True).to(torch.float32)

    def autocast(*leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return inputs.call(*leaves)

    expected = inputs.run()
    with torch.autocast("cpu", torch.bfloat16):
        inside = inputs.run()
    for other in (inputs.run(autocast), inside):
        assert all(map(torch.equal, other, expected))
    leaves = [*inputs.leaves[:5], *(x.double() for x in inputs.leaves[5:])]
    assert all(map(torch.equal, inputs.call(*leaves), expected[:3]))


def test_memory_is_linear(monkeypatch):
    """Only the inputs are stored for the backward pass, and no tensor has T x K x L elements."""
    sizes, kept = [], []
    product = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *x: sizes.append((out := product(*x)).numel()) or out)
    for length in (1024, 4096):
        inputs = Inputs(length, size=32, width=32, rows=16).to(torch.float32)
        sizes.clear()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            outputs = luna_causal_attention(*inputs.leaves)
        torch.autograd.grad(outputs.sum(), inputs.leaves)
        assert sum(kept) == sum(leaf.numel() for leaf in inputs.leaves) + 2 * length  # plus the counts
        assert max(sizes) <= 2 * length * CHUNK  # one head of both sequences


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 6])
def test_dropout(backend, length):
    """The mean of the state over samples is the state without dropout, and equal seeds give equal results."""
    inputs = Inputs(length, rows=8).to(torch.float32)
    leaves = [leaf.detach().expand(200, *leaf.shape).flatten(0, 1) for leaf in inputs.leaves]
    options = {"return_state": True, "backend": backend}
    output, state = luna_causal_attention(*leaves, dropout=0.3, **options)
    plain, exact = luna_causal_attention(*inputs.leaves, **options)
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
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_with_dropout(monkeypatch, activation, blocks):
    """The backward pass drops the same weights as the forward pass."""
    monkeypatch.setattr(torch_backend, "CHUNK", 2)
    inputs = Inputs(5, "left", stateful=True, heads=2, size=2, width=2, rows=3)

    def attend(*leaves):
        torch.manual_seed(5)
        return inputs.call(*leaves, activation=activation, dropout=0.4)

    assert torch.autograd.gradcheck(attend, inputs.leaves)


def state_of(key_mean=(2, 3, 5, 4), value_mean=(2, 3, 4, 6), count=(2,), dtype=torch.float32, integer=torch.int64):
    means = (torch.zeros(shape, dtype=dtype) for shape in (key_mean, value_mean))
    return LunaCausalState(*means, torch.zeros(count, dtype=integer))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": lambda x: x[0]}, r"\[batch, length, heads, size\].*got \[9, 3, 5\]"),
        ({name: lambda x: x[:, :0] for name in NAMES[:5]}, "length 1 or more"),
        ({"query": lambda x: x[..., :4]}, r"query \[2, 9, 3, 4\].*must have the same shape"),
        ({"key": lambda x: x[:, :8]}, "must have the same shape"),
        ({"value": lambda x: x[:, :8]}, r"value \[2, 8, 3, 6\] must match it except in the last"),
        ({"pack_query": lambda x: x[:1]}, r"pack_query \[2, rows, 3, 5\].*got \[1, 4, 3, 5\]"),
        ({"pack_query": lambda x: x[:, :0]}, "1 row or more"),
        ({"key": lambda x: x.float()}, "the same dtype, got.*torch.float32"),
        ({name: lambda x: x.long() for name in NAMES[:5]}, "floating-point tensors"),
        ({"mask": torch.ones(2, 9)}, r"bool mask of shape \[2, 9\].*torch.float32"),
        ({"mask": torch.ones(2, 8, dtype=torch.bool)}, r"bool mask of shape \[2, 9\].*\[2, 8\]"),
        ({"pack_mask": torch.ones(2, 9, dtype=torch.bool)}, r"bool pack_mask of shape \[2, 4\].*\[2, 9\]"),
        ({"cu_seqlens": torch.tensor([0, 9])}, r"with cu_seqlens needs tokens and mask \[1, 9, ...\], got \[2, 9\]"),
        ({"activation": "gelu"}, "no activation 'gelu'; choose one of softplus, elu"),
        ({"dropout": 1.0}, "dropout must be in .*got 1.0"),
        ({"state": state_of(key_mean=(2, 3, 5, 3))}, r"'key_mean': \[2, 3, 5, 3\].*need.*\[2, 3, 5, 4\]"),
        ({"state": state_of(count=(3,))}, "does not fit these inputs"),
        ({"state": state_of(dtype=torch.float16)}, "float32 or float64.*torch.float16"),
        ({"state": state_of(integer=torch.float32)}, "int64 count"),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(zip(NAMES, Inputs(9).leaves, strict=False))
    for name, value in change.items():
        arguments[name] = value(arguments[name]) if name in NAMES else value
    with pytest.raises(ValueError, match=message):
        luna_causal_attention(**arguments)


def test_bad_arguments_of_a_step():
    query, pack_query, *rest = Inputs(9).leaves
    with pytest.raises(ValueError, match=r"\[batch, heads, size\], got \[2, 9, 3, 5\]"):
        luna_causal_attention_step(query, pack_query, *rest, None)
    tokens = query[:, 0], pack_query, *(x[:, 0] for x in rest)
    with pytest.raises(ValueError, match=r"bool mask of shape \[2\]"):
        luna_causal_attention_step(*tokens, None, mask=torch.ones(2))
    with pytest.raises(ValueError, match="luna_causal_attention_step: a state of shapes"):
        luna_causal_attention_step(*tokens, state_of(count=(1,)))
