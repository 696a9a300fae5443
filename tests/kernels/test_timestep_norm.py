"""`timestep_norm`: large values, long states, groups without variance."""

import pytest
import torch

from luna_mega.kernels.api import TimestepNormState, timestep_norm, timestep_norm_step
from tests.kernels.backends import shrink_blocks
from tests.kernels.comparisons import relative_error


@pytest.fixture(params=["small", "other"])
def blocks(request, monkeypatch):
    """Run the test with blocks of a few positions, and with one block."""
    shrink_blocks(monkeypatch, request.param)


@pytest.mark.usefixtures("blocks")
def test_values_far_from_zero():
    """With a mean of 1e4 standard deviations, errors stay below 2e-3; float32 rounding of x loses 1e-3."""
    generator = torch.Generator().manual_seed(0)
    x = (1.5 * torch.randn(2, 100, 12, generator=generator) + 1e4).requires_grad_()
    seed, results = torch.randn(2, 100, 12, generator=generator), []
    for inputs, backend in ((x, "torch"), (x.detach().double().requires_grad_(), "reference")):
        output, state = timestep_norm(inputs, 3, return_state=True, backend=backend)
        total = (output * seed).sum() + state.mean.sum() + state.variance.sum()
        results.append([output, *state[1:], *torch.autograd.grad(total, inputs)])
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) <= 2e-3


def test_a_million_positions():
    """Single steps equal one call up to 1e-5, also after a state of a million positions.

    The means drift, so constant statistics would have much larger errors.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1000, 8, generator=generator) + torch.linspace(0, 1, 1000)[:, None]
    state = TimestepNormState(torch.tensor([1_000_000]), *(torch.full((1, 2), v).double() for v in (0.25, 1.75)))
    output, last = timestep_norm(x, 2, initial_state=state, return_state=True)
    steps, single = [], state
    for position in x.unbind(1):
        y, single = timestep_norm_step(position, single, 2)
        steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), output, rtol=1e-5, atol=1e-5)
    rows = x.double().unflatten(2, (2, 4))
    count = 1_000_000 + 1000
    mean = (0.25 * 1e6 + rows.mean((1, 3)) * 1000) / count
    variance = (
        1e6 * (1.75 + (0.25 - mean) ** 2) + 1000 * (rows - mean[:, None, :, None]).square().mean((1, 3))
    ) / count
    for statistics in (last, single):
        assert statistics.count.tolist() == [count]
        torch.testing.assert_close(statistics.mean, mean, rtol=1e-8, atol=0)
        torch.testing.assert_close(statistics.variance, variance, rtol=1e-7, atol=0)


@pytest.mark.usefixtures("blocks")
def test_a_group_of_equal_features():
    """If the variance is 0, the result is 0 instead of NaN, and gradients are finite."""
    x = torch.full((1, 50, 6), 3.3, requires_grad=True)
    output = timestep_norm(x, 2)
    assert output.abs().max() <= 1e-3
    assert torch.isfinite(torch.autograd.grad(output.sum(), x)[0]).all()
