"""Triton kernels of the moving averages and of their steps against the reference in float64."""

import pytest
import torch

from luna_mega.kernels.api import damped_ema
from tests.kernels.averages import KINDS, Inputs, saturated
from tests.kernels.leaves import assert_same
from tests.kernels.test_moving_average import FLOAT32, check_triton, small_tiles  # noqa: F401, a fixture

pytestmark = [pytest.mark.triton]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_one_chunk(device, monkeypatch, kind, skip):
    from luna_mega.kernels.moving_average import triton_plan

    monkeypatch.setattr(triton_plan, "SHORTEST_CHUNK", 1 << 20)
    check_triton(device, Inputs(11, kind, "some", skip=skip))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["complex", "complex states"])
def test_default_configuration(triton_device, kind):
    check_triton(triton_device, Inputs(11, kind, "some"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, channels, states",
    [("states", 37, 9), ("states", 10, 40), ("complex states", 37, 9), ("complex states", 10, 32)],
)
def test_blocks_of_channels(device, kind, channels, states):
    check_triton(device, Inputs(10, kind, "some", states, batch=1, channels=channels))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states", "complex states"])
def test_long(triton_device, kind):
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


@pytest.mark.slow
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("kind", ["causal", "states", "complex"])
def test_some_outputs(device, kind, used):
    """Gradients are correct if only the result, only the states or both are used, also without initial states."""
    inputs = Inputs(10, kind, "some")
    exact = inputs.exact(return_state=True, used=used)
    assert_same(inputs.run(device=device, backend="triton", return_state=True, used=used), exact, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states", "bidirectional", "complex states"])
def test_saturated_logits(device, kind):
    inputs = saturated(10, kind)
    exact = inputs.run(backend="reference")
    assert_same(inputs.to(torch.float32).run(device=device, backend="triton"), exact, FLOAT32)


def step_inputs(kind, device, masked=True, skip=True):
    inputs = Inputs(1, kind, states=5, channels=37, batch=3, skip=skip, dtype=torch.float32).on(device)
    inputs.mask = torch.tensor([True, False, True], device=device) if masked else None
    return inputs


def step(inputs):
    """Return a function that calls the step with the leaves of `inputs`."""

    def call(*leaves, **options):
        (x, *parameters), state = inputs.arguments(*leaves)
        return inputs.step(x[:, 0], state, *parameters, mask=inputs.mask, **options)

    return call


@pytest.mark.covering(1)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", [pytest.param("states", marks=pytest.mark.slow), "complex states"])
def test_step(device, kind, masked, skip):
    inputs = step_inputs(kind, device, masked, skip)
    with torch.no_grad():
        outputs = [x.cpu() for x in step(inputs)(*inputs.leaves, backend="triton")]
    actual = inputs.run(step(inputs), device, backend="triton")  # gradients are computed in PyTorch
    exact = inputs.to(torch.float64).run(step(inputs), device, backend="reference")
    assert_same(actual, exact, FLOAT32)
    assert_same(outputs, exact[:2], FLOAT32)


@pytest.mark.slow
def test_truncation_at_the_length_is_none(device):
    leaves = [leaf.detach().to(device) for leaf in Inputs(6, dtype=torch.float32).leaves]
    assert torch.equal(damped_ema(*leaves, truncation=6, backend="triton"), damped_ema(*leaves, backend="triton"))
