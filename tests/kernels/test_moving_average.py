"""Damped and complex moving averages: long sequences, saturated logits, mixed dtypes, and Triton."""

import pytest
import torch

from luna_mega.kernels.api import use_backend
from luna_mega.kernels.moving_average import export, torch_backend
from tests.kernels.averages import DAMPED, KINDS, STATEFUL, Inputs, saturated
from tests.kernels.backends import NATIVE
from tests.kernels.comparisons import assert_same, relative_error
from tests.kernels.leaves import MASKS

CHUNK = 8
FLOAT32 = 5e-6


@pytest.fixture
def small_tiles(monkeypatch):
    """Use chunks of 8 positions for any number of processors."""
    from luna_mega.kernels.moving_average import triton_plan

    monkeypatch.setattr(triton_plan, "SHORTEST_CHUNK", CHUNK)
    monkeypatch.setattr(triton_plan, "CONFIGURATIONS", (triton_plan.Configuration(1 << 20, 8),))


@pytest.fixture(params=["fft", "chunks", "auto"])
def form(request, monkeypatch):
    """Run the test with both algorithms of the torch backend, at any size, and with the automatic choice."""
    choose_form(request.param, monkeypatch)
    with use_backend("auto" if request.param == "auto" else "torch"):
        yield


@pytest.fixture(params=["fft", "chunks", "export", NATIVE])
def any_form(request, monkeypatch):
    """Run the test with each algorithm of the torch backend, and with the C library; return the name."""
    choose_form(request.param, monkeypatch)
    with use_backend("native" if request.param == "native" else "torch"):
        yield request.param


@pytest.fixture(params=["reference", "fft", "chunks", "export", NATIVE])
def form_or_reference(request, monkeypatch):
    return options_of(request, monkeypatch)


def options_of(request, monkeypatch):
    if request.param == "triton":
        return {"backend": "triton", "device": request.getfixturevalue("device")}
    choose_form(request.param, monkeypatch)
    return {"backend": request.param if request.param in ("reference", "native") else "torch"}


def choose_form(name, monkeypatch):
    monkeypatch.setattr(torch_backend, "MANY_POSITIONS", 0 if name == "chunks" else 1 << 60)
    monkeypatch.setattr(torch_backend, "BLOCK", 2)
    if name == "export":
        monkeypatch.setattr(torch_backend, "average", export.average)
        monkeypatch.setattr(export, "GROUP", 4)


@pytest.mark.triton
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", DAMPED)
@pytest.mark.parametrize(
    "length, states, masking",
    [
        (1, 1, "none"),
        (2, 16, "all of one row"),
        (CHUNK - 1, 3, "some"),
        (CHUNK, 2, "none"),
        (CHUNK + 1, 5, "some"),
        (19, 2, "all of one row"),
    ],
)
def test_forward_and_gradients(device, length, states, masking, kind):
    batch = 2 if masking == "all of one row" else 1
    check_triton(device, Inputs(length, kind, masking, states, batch=batch, skip=masking != "some"))


@pytest.mark.triton
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["complex", "complex states"])
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("length, states", [(1, 1), (CHUNK - 1, 3), (CHUNK + 1, 16), (19, 2)])
def test_complex_forward_and_gradients(device, length, states, masking, kind):
    check_triton(device, Inputs(length, kind, masking, states, skip=masking != "some"))


def check_triton(device, inputs):
    exact = inputs.exact()
    assert_same(inputs.run(device=device, backend="triton"), exact, FLOAT32)


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_one_chunk(device, monkeypatch, kind, skip):
    from luna_mega.kernels.moving_average import triton_plan

    monkeypatch.setattr(triton_plan, "SHORTEST_CHUNK", 1 << 20)
    check_triton(device, Inputs(11, kind, "some", skip=skip))


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["complex", "complex states"])
def test_default_configuration(triton_device, kind):
    check_triton(triton_device, Inputs(11, kind, "some"))


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, channels, states",
    [("states", 37, 9), ("states", 10, 40), ("complex states", 37, 9), ("complex states", 10, 32)],
)
def test_blocks_of_channels(device, kind, channels, states):
    check_triton(device, Inputs(10, kind, "some", states, batch=1, channels=channels))


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states", "complex states"])
def test_long_on_triton(triton_device, kind):
    """For slow decays (1 - q >= 1e-5), errors over 500 positions are at most 2e-6 of the largest value.

    With complete turns they are at most 4e-6, and 2e-5 for one gradient.
    """
    inputs = Inputs(500, kind, states=4, channels=3, batch=1)
    with torch.no_grad():
        inputs.leaves[1].copy_(torch.linspace(-12.0, -1.0, 12).view(3, 4))
        inputs.leaves[2].fill_(0.5)
        if inputs.complex:
            inputs.leaves[3].copy_(torch.tensor([0.0, 1.5, 1e4]))
    exact = inputs.exact()
    for index, (a, b) in enumerate(zip(inputs.run(device=triton_device, backend="triton"), exact, strict=True)):
        # Rounding the phase to float32 rotates states that persist over all positions.
        bound = 2e-6 if not inputs.complex else 2e-5 if index == 5 else 4e-6
        assert (a - b).abs().max() <= bound * b.abs().max(), index


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("kind", ["causal", "states", "complex"])
def test_some_outputs(device, kind, used):
    """Gradients are correct if only the result, only the states or both are used, also without initial states."""
    inputs = Inputs(10, kind, "some")
    exact = inputs.exact(return_state=True, used=used)
    assert_same(inputs.run(device=device, backend="triton", return_state=True, used=used), exact, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal", "shifted", "complex", "complex states"])
def test_long(any_form, kind):
    """The averages of 5000 positions are exact in float64, and within 5e-6 in float32 even if states persist.

    The phase is exact in float32, because its rounding would rotate the states by more than the tolerance.
    """
    inputs = Inputs(5000, kind, channels=2, states=2, batch=1)
    with torch.no_grad():
        inputs.leaves[1][0] -= 4.0
        if inputs.complex:
            inputs.leaves[3].copy_(torch.tensor([0.0, 1e4]))  # rotation by half a turn, and by complete turns
    inputs.to(torch.float32).to(torch.float64)
    exact = inputs.run(backend="reference")
    if any_form != "native":
        assert_same(inputs.run(), exact, 1e-11)
    assert_same(inputs.to(torch.float32).run(), exact, 5e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "complex"])
def test_slow_decay_in_low_precision(any_form, dtype, kind):
    """In half precision, states with lifetimes of 400 to 20,000 positions are within 1 % of float64.

    With a kernel in bfloat16, the error would be 10 to 21 %.
    """
    inputs = Inputs(1000, kind, states=4, skip=False)
    with torch.no_grad():
        rows = inputs.leaves[1]
        rows.copy_(torch.linspace(-10.0, -6.0, rows.numel(), dtype=torch.float64).view_as(rows))
    exact = inputs.exact(dtype)
    for actual, expected in zip(inputs.run(), exact, strict=True):
        assert relative_error(actual, expected) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_saturated_logits(form_or_reference, dtype, kind):
    """Results are finite for decays of 0, for which the original computes NaN."""
    inputs = saturated(130, kind)
    for tensor in inputs.to(dtype).run(**form_or_reference):
        assert torch.isfinite(tensor).all()
    if kind in STATEFUL:
        (x, *parameters), state = inputs.arguments(*inputs.leaves)
        output, state = inputs.step(x[:, 0], state, *parameters, **form_or_reference)
        for tensor in torch.autograd.grad([output.sum(), state.sum()], inputs.leaves):
            assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("kind", STATEFUL)
def test_autocast_and_mixed_dtypes(form, kind):
    inputs = Inputs(100, kind, "some", dtype=torch.float32)

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


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states", "bidirectional", "complex states"])
def test_saturated_logits_on_triton(device, kind):
    inputs = saturated(10, kind)
    exact = inputs.run(backend="reference")
    assert_same(inputs.to(torch.float32).run(device=device, backend="triton"), exact, FLOAT32)


@pytest.mark.triton
@pytest.mark.slow
def test_truncation_at_the_length_is_none(device):
    inputs = Inputs(6, dtype=torch.float32)
    options = {"device": device, "backend": "triton"}
    assert all(map(torch.equal, inputs.run(truncation=6, **options), inputs.run(**options)))
