"""`complex_ema`: the reference against numbers and gradients, the torch backend against the reference, in float64."""

import cmath
import math

import pytest
import torch
from torch.library import opcheck

from luna_mega.kernels.api import (
    complex_ema,
    complex_ema_coefficients,
    complex_ema_step,
    damped_ema,
    explain,
    use_backend,
)
from luna_mega.kernels.moving_average import export, torch_backend
from tests.kernels.errors import relative_error
from tests.kernels.test_damped_ema import MASKS, assert_same

KINDS = ["plain", "states"]
NAMES = ("x", "input_logit", "damping_logit", "phase_logit", "projection", "skip")


class Inputs:
    """Tensors of one call, in the order of the gradients: x, four parameters, skip, initial state."""

    def __init__(self, length, kind="plain", masking="none", states=3, batch=2, channels=5, skip=True, dtype=None):
        generator = torch.Generator().manual_seed(100 * length + states)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        logits = [normal(channels, states) - 1.0, normal(channels, states), normal(channels)]
        # Every second channel decays slowly.
        logits[0][::2] -= 5.0
        tensors = [normal(batch, length, channels), *logits, normal(channels, states, 2)]
        tensors += [normal(channels)] if skip else []
        self.mask = None
        if masking != "none":
            self.mask = torch.rand(batch, length, generator=generator) < 0.7
            if masking == "all of one row":
                self.mask[-1] = False
        self.stateful, self.has_skip = kind == "states", skip
        tensors += [normal(batch, channels, states, 2)] if self.stateful else []
        self.leaves = [tensor.requires_grad_() for tensor in tensors]
        if dtype is not None:
            self.to(dtype)

    def to(self, dtype):
        state = torch.promote_types(dtype, torch.float32)
        last = len(self.leaves) - 1 if self.stateful else None
        self.leaves = [
            tensor.detach().to(state if index == last else dtype).requires_grad_()
            for index, tensor in enumerate(self.leaves)
        ]
        return self

    def arguments(self, *leaves):
        """Return the arguments of a call or a step: x, four parameters and the skip; and the state."""
        *leaves, state = leaves if self.stateful else (*leaves, None)
        return (leaves if self.has_skip else [*leaves, None]), state

    def call(self, *leaves, **options):
        """Output, or output and final state."""
        leaves, state = self.arguments(*leaves)
        options = {"mask": self.mask, "initial_state": state, "return_state": self.stateful} | options
        return complex_ema(*leaves, **options)

    def run(self, function=None, **options):
        """Outputs, and gradients of a fixed random projection of them."""
        outputs = (function or self.call)(*self.leaves, **options)
        outputs = outputs if self.stateful else (outputs,)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
        gradients = torch.autograd.grad(outputs, self.leaves, weights)
        return [output.detach() for output in outputs] + list(gradients)


def saturated(length, kind):
    """Inputs with logits far beyond the values at which a sigmoid saturates at 0 or 1."""
    inputs = Inputs(length, kind, "some", states=9)
    extremes = torch.tensor([-1e4, -100.0, -30.0, 0.0, 20.0, 30.0, 90.0, 100.0, 1e4], dtype=torch.float64)
    with torch.no_grad():
        inputs.leaves[1].copy_(extremes)
        inputs.leaves[3].copy_(torch.tensor([-1e4, -20.0, 0.3, 30.0, 1e4]))
        for row in range(len(inputs.leaves[2])):
            inputs.leaves[2][row] = extremes.roll(row)
    return inputs


@pytest.fixture(params=["fft", "chunks"])
def form(request, monkeypatch):
    """Both forms of the torch backend, at any size, and several blocks of channels."""
    choose_form(request.param, monkeypatch)


@pytest.fixture(params=["fft", "chunks", "export"])
def any_form(request, monkeypatch):
    """The forms of the torch backend, and the form of exported programs with small groups."""
    choose_form(request.param, monkeypatch)


def choose_form(name, monkeypatch):
    monkeypatch.setattr(torch_backend, "MANY_POSITIONS", 0 if name == "chunks" else 1 << 60)
    monkeypatch.setattr(torch_backend, "BLOCK", 2)
    if name == "export":
        monkeypatch.setattr(torch_backend, "average", export.average)
        monkeypatch.setattr(export, "GROUP", 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masking", MASKS)
def test_reference_is_the_recurrence(kind, masking):
    """The equations evaluated with Python numbers."""
    inputs = Inputs(7, kind, masking, channels=2)
    x, alpha, delta, theta, gamma, omega, *initial = (leaf.tolist() for leaf in inputs.leaves)
    count = len(alpha[0])
    output, state = torch.empty(2, 7, 2, dtype=torch.float64), torch.empty(2, 2, count, 2, dtype=torch.float64)
    for b in range(2):
        for d in range(2):
            p = [1 / (1 + math.exp(-a)) for a in alpha[d]]
            angle = 2 * math.pi / count / (1 + math.exp(-theta[d]))
            q = [(1 - p[n] / (1 + math.exp(-delta[d][n]))) * cmath.exp(1j * (n + 1) * angle) for n in range(count)]
            h = [complex(*pair) for pair in initial[0][b][d]] if initial else [0j] * count
            for t in range(7):
                kept = x[b][t][d] if inputs.mask is None or inputs.mask[b, t] else 0.0
                h = [q[n] * h[n] + p[n] * kept for n in range(count)]
                y = sum(complex(*gamma[d][n]) * h[n] for n in range(count)) / math.sqrt(count)
                output[b, t, d] = y.real + omega[d] * kept
            state[b, d] = torch.view_as_real(torch.tensor(h, dtype=torch.complex128))
    actual = inputs.call(*inputs.leaves, backend="reference")
    assert_same(actual if initial else [actual], [output, state] if initial else [output])


def test_reference_gradients():
    inputs = Inputs(4, "states", "some", channels=2, states=2)
    assert torch.autograd.gradcheck(lambda *leaves: inputs.call(*leaves, backend="reference"), inputs.leaves)


def test_without_a_phase_it_is_the_damped_average():
    x, alpha, delta, _, gamma, _ = Inputs(90).leaves
    expected = damped_ema(x, alpha, delta, torch.ones_like(alpha), gamma[..., 0])
    actual = complex_ema(x, alpha, delta, torch.full((5,), -1e9, dtype=torch.float64), gamma)
    assert_same([actual], [expected])


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("length, states", [(1, 1), (2, 16), (63, 2), (64, 1), (65, 16), (130, 2), (500, 2)])
def test_torch_backend(any_form, length, states, kind, masking):
    inputs = Inputs(length, kind, masking, states, skip=masking != "some")
    assert_same(inputs.run(), inputs.run(backend="reference"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_long(any_form, kind):
    """5000 positions: exact in float64; within 5e-6 in float32, also if a state persists and rotates over all of them.

    The phase is exact in float32, because its rounding would rotate the states by more than the tolerance.
    """
    inputs = Inputs(5000, kind, channels=2, states=2, batch=1)
    with torch.no_grad():
        inputs.leaves[1][0] -= 4.0
        inputs.leaves[3].copy_(torch.tensor([0.0, 1e4]))  # half a turn, complete turns
    inputs.to(torch.float32).to(torch.float64)
    exact = inputs.run(backend="reference")
    assert_same(inputs.run(), exact, 1e-11)
    assert_same(inputs.to(torch.float32).run(), exact, 5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision(form, kind, dtype):
    """Forward and every gradient: no worse than twice the error of the reference in the same dtype."""
    inputs = Inputs(150, kind, "some")
    exact = inputs.run(backend="reference")
    plain, fast = inputs.to(dtype).run(backend="reference"), inputs.run()
    floor = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    for index, (low, actual, expected) in enumerate(zip(plain, fast, exact, strict=True)):
        assert actual.dtype == low.dtype
        assert relative_error(actual, expected) <= max(floor, 2 * relative_error(low, expected)), index
    assert fast[1].dtype == (torch.float32 if kind == "states" else dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_slow_decay_in_low_precision(any_form, dtype):
    """In half precision, states with lifetimes of 400 to 20,000 positions are within 1 % of float64."""
    inputs = Inputs(1000, states=4, skip=False)
    with torch.no_grad():
        rows = inputs.leaves[1]
        rows.copy_(torch.linspace(-10.0, -6.0, rows.numel(), dtype=torch.float64).view_as(rows))
    inputs.to(dtype).to(torch.float64)
    exact = inputs.run(backend="reference")
    for actual, expected in zip(inputs.to(dtype).run(), exact, strict=True):
        assert relative_error(actual, expected) < 0.01


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("masking", MASKS)
def test_segments_and_steps_are_the_parallel_form(backend, masking):
    inputs = Inputs(150, "states", masking)
    expected = inputs.run(backend=backend)

    def segments(*leaves, lengths):
        (x, *parameters), state = inputs.arguments(*leaves)
        outputs, start = [], 0
        for length in lengths:
            mask = None if inputs.mask is None else inputs.mask[:, start : start + length]
            part = x[:, start : start + length]
            if length > 1 or (mask is not None and not mask.all()):  # a masked step does not decay the state
                options = {"mask": mask, "initial_state": state, "return_state": True, "backend": backend}
                output, state = complex_ema(part, *parameters, **options)
            else:
                output, state = complex_ema_step(part[:, 0], state, *parameters, backend=backend)
                output = output[:, None]
            outputs.append(output)
            start += length
        return torch.cat(outputs, 1), state

    for lengths in ([1, 2, 37, 1, 90, 19], [1] * 150):
        assert_same(inputs.run(segments, lengths=lengths), expected)


def test_coefficients_of_steps_hold():
    inputs = Inputs(1, "states")
    (x, *parameters), state = inputs.arguments(*inputs.leaves)
    made = complex_ema_coefficients(*parameters[:4], dtype=torch.float64)
    expected = complex_ema_step(x[:, 0], state, *parameters)
    assert_same(complex_ema_step(x[:, 0], state, *parameters, coefficients=made), expected)
    made = [2.0 * number for number in made]
    assert relative_error(complex_ema_step(x[:, 0], state, *parameters, coefficients=made)[1], expected[1]) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_varlen_sequences(form, kind):
    """Every sequence matches a separate call, and an empty sequence keeps its state."""
    bounds = [0, 3, 3, 90, 91]
    inputs = Inputs(91, kind, "some", batch=1)
    if kind == "states":
        inputs.leaves[-1] = torch.randn(4, 5, 3, 2, dtype=torch.float64, requires_grad=True)

    def separate(*leaves):
        (x, *rest), states = inputs.arguments(*leaves)
        outputs, lasts = [], []
        for index, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            state = None if states is None else states[index : index + 1]
            if start < end:
                options = {"mask": inputs.mask[:, start:end], "initial_state": state, "backend": "reference"}
                output, state = complex_ema(x[:, start:end], *rest, return_state=True, **options)
                outputs.append(output)
            lasts.append(state)
        return (torch.cat(outputs, 1), torch.cat(lasts)) if kind == "states" else torch.cat(outputs, 1)

    assert_same(inputs.run(cu_seqlens=torch.tensor(bounds)), inputs.run(separate))


def test_padding_does_not_affect_outputs(any_form):
    """Padding on either side, with any content: same results and gradients; with left padding also the same state."""
    inputs = Inputs(90)
    expected = inputs.run()
    before = torch.full((2, 7, 5), math.inf, dtype=torch.float64)
    mask = torch.tensor([False] * 7 + [True] * 90 + [False] * 50).expand(2, -1)

    def padded(x, *rest):
        wide = torch.cat([before, x, before.repeat(1, 8, 1)[:, :50]], 1)
        return inputs.call(wide, *rest, mask=mask)[:, 7:97]

    assert_same(inputs.run(padded), expected)
    x, *rest = inputs.leaves
    state = complex_ema(torch.cat([before, x], 1), *rest, mask=mask[:, :97], return_state=True)[1]
    assert_same([state], [complex_ema(x, *rest, return_state=True)[1]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_padding(form, kind):
    """The average of masked inputs is 0, with gradient 0; a state decays."""
    inputs = Inputs(70, kind, "all of one row")
    output, *rest = inputs.run()
    assert (rest[1 if kind == "states" else 0][-1] == 0).all()
    if kind == "states":
        alpha, delta = (leaf.detach() for leaf in inputs.leaves[1:3])
        size = (1 - alpha.sigmoid() * delta.sigmoid()) ** 70 * inputs.leaves[-1][-1].detach().norm(dim=-1)
        torch.testing.assert_close(rest[0][-1].norm(dim=-1), size)
    else:
        assert (output[-1] == 0).all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_saturated_logits(any_form, backend, dtype, kind):
    """Results are finite, even if the original computes NaN as the power of a decay of 0."""
    inputs = saturated(130, kind)
    for tensor in inputs.to(dtype).run(backend=backend):
        assert torch.isfinite(tensor).all()
    if kind == "states":
        (x, *parameters), state = inputs.arguments(*inputs.leaves)
        output, state = complex_ema_step(x[:, 0], state, *parameters, backend=backend)
        for tensor in torch.autograd.grad([output.sum(), state.sum()], inputs.leaves):
            assert torch.isfinite(tensor).all()


def test_autocast_and_mixed_dtypes(form):
    inputs = Inputs(100, "states", "some", dtype=torch.float32)

    def autocast(*leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return inputs.call(*leaves)

    assert all(torch.equal(a, b) for a, b in zip(inputs.run(autocast), inputs.run(), strict=True))
    x, *rest = inputs.leaves
    exact = inputs.call(x.double(), *(tensor.double() for tensor in rest), backend="reference")
    mixed = inputs.call(x.double(), *rest)
    assert_same(mixed, exact)
    assert {tensor.dtype for tensor in mixed} == {torch.float64}
    assert inputs.call(x.bfloat16(), *rest)[0].dtype == torch.bfloat16


def test_determinism_and_strides(form):
    inputs = Inputs(200, masking="some", dtype=torch.float32)
    first, again = inputs.run(), inputs.run()
    inputs.leaves[0] = inputs.leaves[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for a, b, strided in zip(first, again, inputs.run(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, strided)


@pytest.mark.slow
@pytest.mark.parametrize("kind, skip", [("plain", True), ("states", False)])
def test_registration(form, kind, skip, monkeypatch):
    calls = []
    operator = torch.ops.luna_mega.moving_average
    inputs = Inputs(20, kind, "some" if skip else "none", skip=skip, dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.luna_mega, "moving_average", lambda *args: calls.append(args) or operator(*args))
        inputs.call(*inputs.leaves)
    arguments = [a.detach().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in calls[0]]
    opcheck(operator, tuple(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("kind, dynamic", [("plain", True), ("states", False)])
def test_compile_fullgraph(form, kind, dynamic):
    torch.compiler.reset()
    for length in (40, 90) if dynamic else (90,):
        inputs = Inputs(length, kind, "some", dtype=torch.float32)
        compiled = torch.compile(inputs.call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        assert_same(inputs.run(compiled), inputs.run(), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_export_needs_no_custom_operator(kind):
    class Average(torch.nn.Module):
        def forward(self, x, mask):
            return complex_ema(x, *rest, mask=mask, initial_state=state, return_state=kind == "states")

    inputs = Inputs(40, kind, "some", dtype=torch.float32)
    (x, *rest), state = inputs.arguments(*(leaf.detach() for leaf in inputs.leaves))
    length = torch.export.Dim("length", min=2)
    exported = torch.export.export(Average(), (x, inputs.mask), dynamic_shapes=({1: length}, {1: length}))
    assert "luna_mega" not in exported.graph_module.code and "complex" not in exported.graph_module.code
    for length in (40, 75, 2):
        x, mask = torch.randn(2, length, 5), torch.rand(2, length) < 0.8
        torch.testing.assert_close(exported.module()(x, mask), Average()(x, mask), rtol=1e-5, atol=1e-5)


def test_backend_choice():
    inputs = Inputs(3, dtype=torch.float32)
    assert "complex_ema runs on 'torch'" in explain("complex_ema")
    with use_backend("reference"):
        assert "complex_ema_step runs on 'reference'" in explain("complex_ema_step")
    with pytest.raises(ValueError, match="'tritn', which is not a backend"):
        inputs.call(*inputs.leaves, backend="tritn")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"x": a["x"][0]}, "batch, length, channels"),
        (lambda a: a | {"x": a["x"][:, :0]}, "length 1 or more"),
        (lambda a: a | {"x": a["x"].long()}, "floating-point"),
        (lambda a: a | {"x": a["x"][..., :3]}, "for 3 channels two logits"),
        (lambda a: a | {"phase_logit": a["phase_logit"][:, None]}, r"a phase_logit \[5\]"),
        (lambda a: a | {"projection": a["projection"][..., 0]}, r"a projection \[5, N, 2\]"),
        (lambda a: a | {"damping_logit": a["damping_logit"][:, :2]}, "two logits"),
        (lambda a: a | {"skip": a["skip"][:4]}, "skip of shape"),
        (lambda a: a | {"mask": torch.ones(2, 6)}, "bool mask"),
        (lambda a: a | {"mask": torch.ones(2, 5, dtype=torch.bool)}, "bool mask"),
        (lambda a: a | {"initial_state": torch.zeros(2, 5, 3)}, "state .2, 5, 3, 2., got"),
        (lambda a: a | {"initial_state": torch.zeros(2, 5, 3, 2).half()}, "float32 or float64 state"),
        (lambda a: a | {"cu_seqlens": torch.tensor([0, 6])}, r"x \[1, total, channels\]"),
        (lambda a: a | {"max_seqlen": 6}, "max_seqlen requires cu_seqlens"),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(zip(NAMES, Inputs(6).leaves, strict=True))
    with pytest.raises(ValueError, match=message):
        complex_ema(**change(arguments))


def test_bad_arguments_of_a_step():
    (x, *parameters), state = (inputs := Inputs(6, "states")).arguments(*inputs.leaves)
    with pytest.raises(ValueError, match=r"x \[batch, channels\]"):
        complex_ema_step(x, state, *parameters)
    with pytest.raises(ValueError, match="state .2, 5, 3, 2., got"):
        complex_ema_step(x[:, 0], state[:1], *parameters)
    with pytest.raises(ValueError, match="bool mask"):
        complex_ema_step(x[:, 0], state, *parameters, mask=torch.ones(2))
