"""`gated_attention`: offsets, left padding, other keys than queries, dtypes, dropout, invalid arguments."""

import pytest
import torch

from luna_mega.kernels.api import gated_attention, gated_attention_step
from luna_mega.kernels.gated_attention import reference, torch_backend
from tests.kernels import loops
from tests.kernels.backends import SLOW_TRITON, on_triton
from tests.kernels.comparisons import relative_error

FUNCTIONS = reference.FUNCTIONS
CHUNK = 8
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3, 300]
MASKS = ["none", "some", "right", "chunk and row"]
NAMES = ("output", "query", "key", "value", "bias")
# Tolerances for Triton; float32 products use tf32x3.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def make_mask(masking, batch, length, chunk=CHUNK):
    if masking == "none":
        return None
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(length)) < 0.7
    mask[:, 0] = True
    if masking == "right":
        mask = torch.arange(length) < torch.tensor([[length], [(length + 1) // 2], [1]][:batch])
    if masking == "chunk and row":
        mask[0, chunk : 2 * chunk] = False
        mask[-1] = False
    return mask


def make_inputs(queries, keys=None, dtype=torch.float64, batch=2, size=6, width=10, positions=None, device="cpu"):
    generator = torch.Generator().manual_seed(queries)
    keys = queries if keys is None else keys
    shapes = (batch, queries, size), (batch, keys, size), (batch, keys, width), (2 * (positions or keys) - 1,)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[3] *= 0.5
    return [x.to(device, dtype).requires_grad_() for x in tensors]


def run(inputs, weight=None, **options):
    """Return the output, and the gradients of a fixed random projection of it."""
    output = gated_attention(*inputs, **options)
    if weight is None:
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, inputs, weight.to(output))]


def doubled(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("causal, queries, keys, offset", [(True, 3, 9, 4), (False, 7, 4, 0), (False, 2, 6, 3)])
def test_reference_with_offset_and_other_keys(function, causal, queries, keys, offset):
    inputs = [x.detach() for x in make_inputs(queries, keys, positions=9)]
    expected = loops.gated_attention(*inputs, None, function, causal, None, offset)[0]
    actual, _ = reference.attend(*inputs, None, function, causal, offset=offset)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    """Also run the test with small blocks, which end in the middle of chunks, sequences and batches."""
    if request.param == "many blocks":
        monkeypatch.setattr(torch_backend, "BLOCK_ROWS", 3)
        monkeypatch.setattr(torch_backend, "BLOCK_SCORES_CPU", 60)


@pytest.mark.parametrize(
    "backend, dtype, cases",
    [
        ("torch", dtype, ((False, 63, chunk), (True, 19, chunk)))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for chunk in (None, CHUNK)
    ]
    + [on_triton(dtype, ((False, 300, None), (True, 63, 2 * CHUNK))) for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_dtypes(device, function, backend, dtype, cases):
    """Output and gradient errors are at most twice those of the reference in the same dtype."""
    floor = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
    floor, sizes = (TOLERANCE, {"size": 32, "width": 64}) if backend == "triton" else (floor, {})
    for causal, length, chunk in cases:
        options = {"function": function, "causal": causal, "chunk_size": chunk}
        options["mask"] = make_mask("chunk and row", 2, length, 2 * CHUNK if backend == "triton" else CHUNK).to(device)
        inputs = make_inputs(length, dtype=dtype, device=device, **sizes)
        wide = doubled(inputs) if backend == "triton" else make_inputs(length)
        exact = run(wide, backend="reference", **options)
        plain, fast = run(inputs, backend="reference", **options), run(inputs, backend=backend, **options)
        for name, right, low, actual in zip(NAMES, exact, plain, fast, strict=True):
            assert actual.dtype == dtype
            assert relative_error(actual, right) <= max(floor[dtype], 2 * relative_error(low, right)), name


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


@pytest.mark.parametrize("function", FUNCTIONS)
def test_steps_are_rows_of_the_parallel_form(function):
    query, key, value, bias = (x.detach() for x in make_inputs(19))
    mask = make_mask("some", 2, 19)
    for chunk in (None, CHUNK):
        expected = gated_attention(query, key, value, bias, function=function, causal=True, chunk_size=chunk, mask=mask)
        for start, stop in [(t, t + 1) for t in range(19)] + [(2, 7), (16, 19)]:
            first = 0 if chunk is None else start // chunk * chunk
            keys = slice(first, stop)
            actual = gated_attention(
                query[:, start:stop], key[:, keys], value[:, keys], bias,
                function=function, causal=True, mask=mask[:, keys], offset=start - first,
            )  # fmt: skip
            torch.testing.assert_close(actual, expected[:, start:stop], rtol=1e-12, atol=1e-12)


def shifted(x, by, total):
    """Return x `[B, T, W]` in `total` columns, with `by` columns of left padding in each row; padding is random."""
    rows = torch.randn(x.shape[0], total, x.shape[2], dtype=x.dtype)
    for row, first in enumerate(by):
        rows[row, first : first + x.shape[1]] = x[row]
    return rows


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("chunk", [None, CHUNK, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_left_padding_does_not_affect_outputs(function, causal, chunk, backend):
    """Left padding does not affect outputs.

    Causal attention may also be computed in several calls, given all keys or only the last ones.
    """
    query, key, value, bias = (x.detach() for x in make_inputs(19, batch=3, positions=24))
    options = {"function": function, "causal": causal, "chunk_size": chunk, "backend": backend}
    expected, weights = gated_attention(query, key, value, bias, return_weights=True, **options)
    torch.testing.assert_close(gated_attention(query, key, value, bias, **options), expected, rtol=1e-12, atol=1e-12)
    first = [0, 3, 5]
    start = -torch.tensor(first)
    query, key, value = (shifted(x, first, 24) for x in (query, key, value))
    place = torch.arange(24) + start[:, None]
    mask = (place >= 0) & (place < 19)
    inputs = [x.requires_grad_() for x in (query, key, value, bias)]
    options |= {"mask": mask, "start": start}
    output, same = (gated_attention(*inputs, return_weights=r, **options) for r in (False, True))
    cut = [output[row, begin : begin + 19] for row, begin in enumerate(first)]
    torch.testing.assert_close(torch.stack(cut), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(same[0][mask], output[mask], rtol=1e-12, atol=1e-12)
    if chunk is not None:
        assert weights.shape[2:] == same[1].shape[2:] == (chunk, chunk)
        complete = 19 // chunk
        torch.testing.assert_close(same[1][:, :complete], weights[:, :complete], rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((output * mask[..., None]).sum(), inputs)
    for gradient in gradients[:3]:
        assert (gradient[~mask] == 0).all()
    if not causal:
        return
    for begin, stop in [(t, t + 1) for t in range(24)] + [(0, 7), (7, 9), (9, 24), (2, 21)]:
        for cut_off in (0, begin if chunk is None else max(begin + 1 - chunk, 0)):
            if chunk is None and cut_off:
                continue  # without chunks, every key is visible
            if begin == cut_off and chunk != 1 and begin:
                continue
            keys = slice(cut_off, stop)
            arguments = (key[:, keys], value[:, keys], bias)
            parts = options | {"mask": mask[:, keys], "start": start + cut_off}
            actual = gated_attention(query[:, begin:stop], *arguments, offset=begin - cut_off, **parts)
            kept = mask[:, begin:stop]
            torch.testing.assert_close(actual[kept], output[:, begin:stop][kept], rtol=1e-12, atol=1e-12)
            if stop == begin + 1:
                del parts["causal"]
                actual = gated_attention_step(query[:, begin], *arguments, **parts)
                torch.testing.assert_close(actual[kept[:, 0]], output[:, begin][kept[:, 0]], rtol=1e-12, atol=1e-12)
                if chunk is None:  # also with the query's own key in the middle
                    column = torch.full((3,), begin)
                    arguments, parts = (key, value, bias), parts | {"mask": mask, "column": column}
                    actual = gated_attention_step(query[:, begin], *arguments, **parts)
                    torch.testing.assert_close(actual[kept[:, 0]], output[:, begin][kept[:, 0]], rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("backend", ["torch", SLOW_TRITON])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "causal, queries, keys, offset",
    [(True, 1, 20, 19), (True, 5, 30, 7), (False, 7, 4, 0), (False, 4, 9, 0), (False, 4, 90, 9), (False, 1, 9, 5)]
    + [(False, 3, 0, 0), (False, 0, 3, 0)],
)
def test_other_keys_than_queries(device, function, causal, queries, keys, offset, backend):
    """Queries and keys may differ in number, as in cached decoding and cross-attention, and either may be missing."""
    dtype, bound = (torch.float32, TOLERANCE[torch.float32]) if backend == "triton" else (torch.float64, 1e-12)
    inputs = make_inputs(queries, keys, dtype, size=20, width=37, positions=100, device=device)
    mask = torch.rand(2, keys, device=device) < 0.7
    mask[-1] = False
    for kept in (None, mask):
        options = {"function": function, "causal": causal, "offset": offset, "mask": kept}
        exact = run(doubled(inputs), backend="reference", **options)
        for name, right, actual in zip(NAMES, exact, run(inputs, backend=backend, **options), strict=True):
            assert actual.shape == right.shape and relative_error(actual, right) <= bound, name


@pytest.mark.parametrize("backend", ["torch", SLOW_TRITON])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_a_bias(device, function, backend):
    inputs = make_inputs(20, dtype=torch.float32, size=20, width=20, device=device)
    options = {"function": function, "chunk_size": 16, "backend": backend}
    expected = run([*inputs[:3], torch.zeros_like(inputs[3], requires_grad=True)], **options)
    torch.testing.assert_close(run(inputs[:3], **options), expected[:-1])


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


@pytest.mark.parametrize(
    "change, options, message",
    [
        (lambda q, k, v, b: (q[0], k, v, b), {}, r"\[batch, length, size\]"),
        (lambda q, k, v, b: (q[:, :, :2], k, v, b), {}, "must agree in batch and size"),
        (lambda q, k, v, b: (q, k, v[:, :2], b), {}, "must agree in batch and size"),
        (lambda q, k, v, b: (q, k.float(), v, b), {}, "torch.float64, key torch.float32"),
        (lambda q, k, v, b: (q, k, v, b[None]), {}, r"shape \[2 M - 1\]"),
        (lambda q, k, v, b: (q, k, v, b[1:]), {}, r"shape \[2 M - 1\], got torch.float64 \[16\]"),
        (lambda q, k, v, b: (q, k, v, b[1:-1]), {}, "length 15 covers 8 positions, but 9 are in use.*17"),
        (lambda q, k, v, b: (q, k, v, b[6:-6]), {"chunk_size": 4}, "covers 3 positions, but 4"),
        (lambda *x: x, {"mask": torch.ones(2, 9)}, "bool mask"),
        (lambda *x: x, {"mask": torch.ones(2, 8, dtype=torch.bool)}, r"shape \[2, 9\]"),
        (lambda *x: x, {"function": "gelu"}, "does not support function 'gelu'; choose one of softmax, laplace, relu2"),
        (lambda *x: x, {"chunk_size": 0}, "at least 1.*got 0"),
        (lambda q, k, v, b: (q, k[:, :4], v[:, :4], b), {"chunk_size": 4}, "9 queries from position 0 on do not fit"),
        (lambda *x: x, {"start": torch.zeros(2)}, r"needs start \[2\] of int32 or int64, got torch.float32 \[2\]"),
        (lambda *x: x, {"start": torch.tensor([0, 1]), "chunk_size": 4}, r"start is \[0, 1\], so the first keys"),
        (lambda *x: x, {"row_offset": torch.tensor([0, 1]), "causal": True}, "row_offset is only for cross-attention"),
        (lambda *x: x, {"row_offset": torch.tensor([1])}, r"needs row_offset \[2\]"),
        (lambda *x: x, {"causal": True, "offset": 1}, "9 queries from position 1 on do not fit 9 keys"),
        (lambda *x: x, {"offset": -1}, "offset must not be negative"),
        (lambda *x: x, {"dropout": 1.0}, "dropout must be in"),
        (lambda *x: x, {"cu_seqlens": torch.tensor([0, 9])}, "batch size 1"),
        (lambda *x: (*(t[:1] for t in x[:3]), x[3]), {"cu_seqlens": torch.tensor([0, 8])}, "increase from 0 to 9"),
        (
            lambda *x: (*(t[:1] for t in x[:3]), x[3]),
            {"cu_seqlens": torch.tensor([0, 9]), "start": torch.tensor([0])},
            "no offset, row_offset or start",
        ),
        (
            lambda *x: (*(t[:1] for t in x[:3]), x[3]),
            {"cu_seqlens": torch.tensor([0, 9]), "return_weights": True},
            "does not return weights with cu_seqlens",
        ),
    ],
)
def test_bad_arguments(change, options, message):
    with pytest.raises(ValueError, match=message):
        gated_attention(*change(*make_inputs(9)), **options)
