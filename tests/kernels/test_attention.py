"""Attention of Luna and Mega: dropout, returned weights, exact activations, parts with left padding, rounding."""

import decimal
import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from luna_mega.kernels import api
from luna_mega.kernels.api import gated_attention, gated_attention_step, luna_attention, luna_causal_attention
from luna_mega.kernels.gated_attention import reference as gated_reference
from luna_mega.kernels.luna_causal_attention.reference import ACTIVATIONS
from tests.kernels.backends import on_triton, shrink_blocks
from tests.kernels.comparisons import assert_same

FUNCTIONS = gated_reference.FUNCTIONS
RATE = 0.25


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"):
    """Return leaves with random numbers, which are the same for every dtype and device."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(device, dtype).requires_grad_() for x in made]


def causal(*leaves: Tensor, count: int = 7, **options) -> tuple[Tensor, ...]:
    """Return the output of causal attention and the means of its state, given those before."""
    state = api.LunaCausalState(*leaves[5:], torch.full((2,), count, device=leaves[0].device))
    output, state = luna_causal_attention(*leaves[:5], state=state, return_state=True, **options)
    return output, state.key_mean, state.value_mean


def single(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *leaves, **options: (op(*leaves, **options),)


# Numbers of queries and keys, or of positions and rows of P, and the shapes of the tensors. Heads have a size of the
# number of keys, so that the values can be unit vectors.
Q, K = 70, 64
HEADS = (2, Q, 2, K), (2, K, 2, K), (2, K, 2, K)
CAUSAL = [(2, 40, 2, 5), (2, 24, 2, 5), *[(2, 40, 2, 5)] * 2, (2, 40, 2, 6), (2, 2, 5, 24), (2, 2, 24, 6)]
SHORT = [(2, 1, 2, 5), (2, 24, 2, 5), *[(2, 1, 2, 5)] * 2, (2, 1, 2, 6), (2, 2, 5, 24), (2, 2, 24, 6)]
MASK = torch.arange(K) != torch.tensor([[5], [9]])
GATED = (2, K, 20), (2, K, 20), (2, K, 70), (2 * K - 1,)
DROPOUT = {
    "luna_pack": (single(api.luna_pack), HEADS, {"mask": MASK}),
    "luna_unpack": (single(api.luna_unpack), HEADS, {}),
    "luna_unpack, tied": (single(lambda *x, **options: api.luna_unpack(*x[:2], x[-1], **options)), HEADS[:2], {}),
    "luna_causal_attention": (causal, CAUSAL, {}),
    "luna_causal_attention, one position": (causal, SHORT, {}),
    "luna_causal_attention, elu": (causal, CAUSAL, {"activation": "elu", "mask": torch.arange(40) >= MASK[:, :1] * 9}),
    "gated_attention, mask": (single(gated_attention), GATED, {"mask": MASK}),
    "gated_attention, relu2": (single(gated_attention), GATED, {"function": "relu2"}),
    "gated_attention, chunks": (single(gated_attention), GATED, {"function": "laplace", "chunk_size": 24}),
    "gated_attention, varlen": (
        single(gated_attention), [*((1, *shape[1:]) for shape in GATED[:3]), GATED[3]],
        {"function": "laplace", "cu_seqlens": torch.tensor([0, 30, K])}),
}  # fmt: skip


def factors_of(run: Callable, exact: Callable, leaves: list[Tensor]) -> list[Tensor]:
    """Return the dropout factors of all weights, which unit vectors as values show; -1 = the weight is 0."""
    if len(leaves) < 7:
        units = torch.eye(K, dtype=leaves[0].dtype, device=leaves[0].device)
        units = (units if leaves[1].dim() == 3 else units[:, None]).expand(*leaves[1].shape[:-1], -1)
        inputs = [*leaves[:2], units, *leaves[3:]]
        shown, complete = run(*inputs)[0].double(), exact(*(x.double() for x in inputs))[0]
        if shown.dim() == 4:
            shown, complete = shown.transpose(1, 2), complete.transpose(1, 2)
        return [torch.where(complete > 0.0, (shown > 0.5 * complete).double() / (1.0 - RATE), -1.0)]
    # If the values of causal attention are unit vectors, their mean is the pack weights. If the mean is, the output is
    # the unpack weights.
    (batch, length, heads, _), rows = leaves[0].shape, leaves[1].shape[1]
    ones, flat = leaves[0].new_ones(batch, length, heads, 1), leaves[0].new_zeros(batch, rows, heads, 1)
    units, means = (torch.eye(n).to(ones).expand(batch, heads, -1, -1) for n in (length, rows))
    none = leaves[0].new_zeros(batch, heads, 1, rows), leaves[0].new_zeros(batch, heads, rows, length)
    packed = run(ones, flat, ones, ones, units.transpose(1, 2), *none, count=0)[2].mT * length
    wide = ones.expand(-1, -1, -1, rows)
    unpacked = run(ones, flat, ones, ones, wide, none[0], means, count=1 << 40)[0].transpose(1, 2) * rows
    return [(x > 0.5).double() / (1.0 - RATE) for x in (packed, unpacked)]


def check_independence(factors: Tensor) -> None:
    """Means of rows and columns vary like means of independent draws, and heads or sequences differ."""
    kept, seen = (factors > 0.0).double(), factors >= 0.0
    assert abs(kept[seen].mean() - (1.0 - RATE)) < 4 * math.sqrt(RATE * (1.0 - RATE) / seen.sum())
    assert len(kept) == 1 or not torch.equal(kept[0], kept[1])
    assert kept.dim() == 3 or not torch.equal(kept[0, 0], kept[0, 1])
    for dim in (-1, -2) if seen.all() and min(kept.shape[-2:]) > 1 else ():
        spread = kept.mean(dim).std() / math.sqrt(RATE * (1.0 - RATE) / kept.shape[dim])
        assert 0.75 < spread < 1.25, (dim, spread)


def train(run: Callable, leaves: list[Tensor], **options: bool) -> list[Tensor]:
    """Return the outputs, and the gradients of a function of them."""
    outputs = run(*leaves)
    total = sum(x.double().sin().sum() for x in outputs)
    return [x.detach() for x in (*outputs, *torch.autograd.grad(total, leaves, **options))]


def of_sequences(factors: Tensor, bounds: Tensor) -> Tensor:
    """Return the factors of each of several sequences, padded to the longest one."""
    spans = list(itertools.pairwise(bounds.tolist()))
    longest = max(end - start for start, end in spans)
    parts = [factors[0, start:end, start:end] for start, end in spans]
    return torch.stack([nn.functional.pad(x, (0, longest - len(x)) * 2) for x in parts])


@pytest.mark.parametrize(
    ("backend", "name", "dtype", "blocks"),
    [("torch", name, torch.float64, blocks) for name in DROPOUT for blocks in ("small", "other")]
    + [on_triton(name, torch.float32, "small", slow="one" not in name) for name in DROPOUT]
    + [on_triton("luna_pack", torch.bfloat16, "default")]
    + [on_triton("luna_unpack, tied", torch.bfloat16, "default", slow=False)],
    ids=str,
)
def test_dropout(backend, name, dtype, blocks, triton_device, monkeypatch):
    """Outputs and gradients equal those of the reference with the same dropped weights; the seed chooses these."""
    shrink_blocks(monkeypatch, blocks, backend == "triton")
    op, shapes, options = DROPOUT[name]
    device = triton_device if backend == "triton" else torch.device("cpu")
    leaves = draw(*shapes, dtype=dtype, device=device)
    if len(shapes) == 4:  # all weights of all functions are above 0
        leaves[3] = (0.2 * leaves[3] + 1.2).detach().requires_grad_()
    options = {key: x.to(device) if torch.is_tensor(x) else x for key, x in options.items()}

    def seeded(*tensors, **more):
        torch.manual_seed(5)
        return op(*tensors, dropout=RATE, backend=backend, **options | more)

    def exact(*tensors, **more):
        return op(*tensors, backend="reference", **options | more)

    with torch.no_grad():
        found = factors_of(partial(seeded, mask=None), partial(exact, mask=None), leaves)
        other = op(*leaves, dropout=RATE, backend=backend, **options)[0]
    actual = train(seeded, leaves)
    if backend == "torch":
        with torch.device("meta"):  # PyTorch's default device
            assert all(map(torch.equal, train(seeded, leaves), actual))
    assert all(map(torch.equal, actual, train(seeded, leaves))) and not torch.equal(actual[0], other)
    left = [of_sequences(x, options["cu_seqlens"]) for x in found] if "cu_seqlens" in options else list(found)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "dropout", lambda x, rate, train: x * left.pop(0) if rate else x)
        expected = train(partial(exact, dropout=RATE), [x.detach().double().requires_grad_() for x in leaves])
    assert not left
    bound = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    assert_same(actual, expected, bound)
    if backend == "torch":
        assert_same(train(seeded, leaves, create_graph=True), expected, bound)
    for factors in found:
        check_independence(factors)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_returned_weights(backend):
    """Returning weights does not change the other results, and the weights applied to the values reproduce them."""
    x, context, p = draw((2, 7, 3, 8), (2, 11, 3, 8), (2, 5, 3, 8))
    mask, pack_mask = torch.arange(11) != torch.tensor([[4], [0]]), torch.arange(5) != torch.tensor([[0], [3]])
    options = {"context_mask": mask, "pack_mask": pack_mask, "backend": backend}
    run = partial(luna_attention, x, p, context, context, lambda packed: (packed, packed), **options)
    output, packed, weights, pack_weights = run(return_weights=True)
    assert_same((output, packed), run())
    assert_same([torch.einsum("bhlm,bmhk->blhk", pack_weights, context)], [packed])
    assert_same([torch.einsum("bhtl,blhk->bthk", weights, packed)], [output])

    large = [4.0 * y.bfloat16() for y in (p, context)]  # only the weights are rounded to bfloat16
    halves, exact = (api.luna_pack(q, k, k, return_weights=True)[1] for q, k in (large, [y.double() for y in large]))
    assert_same([halves], [exact], 3e-3)

    leaves = [x, p, *draw(*[(2, 7, 3, 8)] * 3)]
    options = {"mask": mask[:, :7], "pack_mask": pack_mask, "return_state": True, "backend": backend}
    output, state = luna_causal_attention(*leaves, **options)
    again, weights, after = luna_causal_attention(*leaves, return_weights=True, **options)
    assert_same((again, *after), (output, *state))
    assert_same([weights.sum(-1)], [torch.ones(2, 3, 7)])
    assert not weights.movedim(-1, 1)[~pack_mask].any()
    last = torch.einsum("bhl,bhlv->bhv", weights[:, :, -1], state.value_mean)
    assert_same([last], [output[:, -1]])

    query, key, value, _ = draw(*GATED)
    for chunk, mask, padding in ((None, MASK, 0), (16, MASK, 0), (16, None, 0), (16, MASK, 5)):
        options = {"chunk_size": chunk, "mask": mask, "start": -torch.tensor([padding] * 2), "backend": backend}
        output, weights = gated_attention(query, key, value, return_weights=True, **options)
        assert weights.shape == (2, K // (chunk or K), chunk or K, chunk or K)
        assert_same([output[:, padding:]], [gated_attention(query, key, value, **options)[:, padding:]])
        shown = (weights @ value.roll(-padding, 1).unflatten(1, (-1, chunk or K))).flatten(1, 2)
        assert_same([shown[:, : K - padding]], [output[:, padding:]])
        none = [y[:0] for y in (query, key, value)]
        found = gated_attention(*none, return_weights=True, chunk_size=chunk, heads=2, backend=backend)
        assert [y.shape for y in found] == [(0, K, 70), (0, 2, *weights.shape[1:])]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(name, dtype) for name in ("reference", "torch") for dtype in (torch.float64, torch.float32)]
    + [on_triton(torch.float32)],
    ids=str,
)
def test_activations_are_exact_in_both_tails(backend, dtype, activation, triton_device):
    """Values and slopes are exact for all scores: if all values are 1, their mean is the pack weight.

    PyTorch's softplus is off by 3e-9 at s = 29, and its elu(s) + 1 is 0 for s < -37.
    """
    numbers = [-700.0, -80.0, -40.0, -9.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 9.0, 28.0, 29.0, 57.0, 58.0, 100.0, 1e4]
    numbers = [s for s in numbers if dtype == torch.float64 or s > -90]
    device = triton_device if backend == "triton" else "cpu"
    scores = torch.tensor(numbers, dtype=dtype, device=device).requires_grad_()
    options = {"activation": activation, "return_state": True, "backend": backend}
    for length in (1, 2, 40):
        ones = scores.new_ones(1, length, 1, 1)
        _, state = luna_causal_attention(ones, scores.view(1, -1, 1, 1), ones, ones, ones, **options)
        values = state.value_mean.flatten()
        (slopes,) = torch.autograd.grad(values.sum(), scores)
        with decimal.localcontext(prec=600):
            for s, value, slope in zip(numbers, values.tolist(), slopes.tolist(), strict=True):
                exact, power = decimal.Decimal(s), 2 ** decimal.Decimal(s)
                right = (1 + power).ln() / decimal.Decimal(2).ln(), power / (1 + power)
                if activation == "elu":
                    right = (exact + 1, 1) if s > 0 else (exact.exp(), exact.exp())
                rel = (9 if backend == "triton" or length == 40 else 4) * max(1.0, -s) * torch.finfo(dtype).eps
                assert (value, slope) == pytest.approx(tuple(map(float, right)), rel=rel, abs=0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend", ["reference", "torch", on_triton()])
@pytest.mark.parametrize("chunk", [None, 8, 1])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_parts_of_causal_attention_with_left_padding(function, chunk, backend, triton_device):
    """Causal attention may be computed in several calls and steps, given all keys or only the last ones."""
    device, dtype, bound = torch.device("cpu"), torch.float64, 1e-12
    if backend == "triton":
        device, dtype, bound = triton_device, torch.float32, 2e-5
    shapes = (3, 24, 6), (3, 24, 6), (3, 24, 10), (47,)
    query, key, value, bias = (x.detach() for x in draw(*shapes, dtype=dtype, device=device))
    start = -torch.tensor([0, 3, 5], device=device)
    place = torch.arange(24, device=device) + start[:, None]
    mask = (place >= 0) & (place < 19)
    options = {"function": function, "chunk_size": chunk, "backend": backend}
    given = options | {"causal": True, "mask": mask, "start": start}
    output = gated_attention(query, key, value, bias, **given)
    if backend != "triton":
        with torch.device("meta"):  # PyTorch's default device
            assert torch.equal(gated_attention(query, key, value, bias, **given), output)
    for begin, stop in [(t, t + 1) for t in range(24)] + [(0, 7), (7, 9), (9, 24), (2, 21)]:
        for cut_off in {0, 0 if chunk is None else max(begin + 1 - chunk, 0)}:  # without chunks, every key is visible
            keys, kept = slice(cut_off, stop), mask[:, begin:stop]
            arguments = (key[:, keys], value[:, keys], bias)
            parts = options | {"mask": mask[:, keys], "start": start + cut_off}
            part = gated_attention(query[:, begin:stop], *arguments, offset=begin - cut_off, causal=True, **parts)
            assert_same([part[kept]], [output[:, begin:stop][kept]], bound)
            if stop > begin + 1:
                continue
            steps = [gated_attention_step(query[:, begin], *arguments, **parts)]
            if chunk is None:  # also with the query's own key in the middle
                parts |= {"mask": mask, "column": torch.full((3,), begin, device=device)}
                steps.append(gated_attention_step(query[:, begin], key, value, bias, **parts))
            for step in steps:
                assert_same([step[kept[:, 0]]], [output[:, begin][kept[:, 0]]], bound)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_query_is_divided_before_the_product(function, causal):
    """Results are equal bit for bit in float32, because results of published checkpoints depend on this rounding."""
    query, key, value, bias = inputs = draw((2, 17, 6), (2, 17, 6), (2, 17, 10), (33,), dtype=torch.float32)
    lag = torch.arange(17) - torch.arange(17)[:, None]
    matrix = bias[bias.shape[0] // 2 + lag]
    divisor = math.sqrt(6) if function == "softmax" else 17
    if causal:
        matrix = matrix.masked_fill(lag > 0, -math.inf)
        divisor = divisor if function == "softmax" else torch.arange(1, 18)[:, None]
    scores = torch.baddbmm(matrix, query / divisor, key.mT)
    weights = scores.softmax(-1) if function == "softmax" else getattr(gated_reference, function)(scores)
    assert torch.equal(gated_attention(*inputs, function=function, causal=causal), torch.bmm(weights, value))
