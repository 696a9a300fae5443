"""Coefficients and chunk matrices of the average equal plain operators, and closed-form gradients equal autograd."""

import pytest
import torch

from luna_mega.kernels import api
from luna_mega.kernels.api import damped_ema, damped_ema_step, ema_coefficients
from luna_mega.kernels.moving_average import coefficients, native, reference, tables
from luna_mega.kernels.moving_average.coefficients import Coefficients
from tests.kernels.backends import needs_library
from tests.kernels.calls import CALLS, Sizes
from tests.kernels.comparisons import assert_same as assert_close, relative_error

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def assert_same(closed, plain, dtype):
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    for a, b in zip(closed, plain, strict=True):  # autograd computes a (1 - a), which loses tiny values
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())


def saturated_parameters(dtype):
    """Return the four parameters `[R, 1]` for all pairs of logits, also those at which a sigmoid is 0 or 1."""
    values = [-1e4, -80.0, -20.0, -3.0, -0.7, 0.0, 0.9, 6.0, 15.0, 30.0, 50.0, 90.0, 1e4]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(dtype)
    shapes = torch.randn(2, len(pairs), 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [x.clone().requires_grad_() for x in (*pairs.T[:, :, None], *shapes)]


@pytest.mark.triton
def test_triton_coefficients_and_gradients_are_exact(triton_device):
    """Coefficients and gradients are within a few float32 roundings of the reference in float64."""
    from luna_mega.kernels.moving_average import triton_coefficients

    leaves = saturated_parameters(torch.float64)
    parameters = [leaf.detach().float().to(triton_device) for leaf in leaves]
    rates, *weights = reference.damped_coefficients(*leaves)
    made = triton_coefficients.damped(*parameters)
    for actual, expected in zip(made, (rates, *weights), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected.mT.detach(), rtol=2e-7, atol=1e-37)
    of_state, of_rate, of_input = torch.rand(3, 1, len(parameters[0]), dtype=torch.float64)
    grads = torch.autograd.grad((rates, *weights), leaves, [rates.exp() * of_rate.mT, of_input.mT, of_state.mT])
    sums = torch.stack((of_state, of_rate))[None].float().to(triton_device)
    made = triton_coefficients.backward(sums, of_input.float().to(triton_device), *parameters)
    for actual, expected in zip(made, grads, strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=5e-7, atol=1e-15)


@needs_library
def test_native_coefficients_and_gradients_are_exact(level):
    """Coefficients and gradients are within a few float32 roundings of the reference in float64."""
    leaves = saturated_parameters(torch.float64)
    parameters = [leaf.detach().float() for leaf in leaves]
    rates, *weights = reference.damped_coefficients(*leaves)
    q, *made = native._damped_coefficients(*parameters)
    torch.testing.assert_close(q.clamp(min=reference.LEAST).log(), rates.detach(), rtol=2e-7, atol=2e-16)
    for actual, expected in zip(made, weights, strict=True):
        torch.testing.assert_close(actual.double(), expected.detach(), rtol=2e-7, atol=1e-37)
    given = torch.rand(3, len(rates), 1, dtype=torch.float64)
    given[0] *= rates.exp().detach()
    for row in torch.eye(3, dtype=torch.float64):  # one at a time, because sums of gradients can cancel
        seeds = row[:, None, None] * given
        expected = torch.autograd.grad((rates, *weights), leaves, list(seeds), retain_graph=True)
        for actual, exact in zip(native._damped_gradients(parameters, *seeds.float()), expected, strict=True):
            torch.testing.assert_close(actual.double(), exact, rtol=5e-7, atol=1e-15)


@DTYPES
def test_closed_form_of_the_gradients(dtype):
    """Coefficients equal plain operators bit for bit, and gradients equal autograd's."""
    leaves = saturated_parameters(dtype)
    plain = reference.damped_coefficients(*leaves)
    closed = coefficients.damped_coefficients(*leaves)
    closed = closed[0], *closed[2:]
    assert all(map(torch.equal, closed, plain))
    grads = [torch.randn_like(rows) for rows in plain]
    assert_same(*(torch.autograd.grad(made, leaves, grads) for made in (closed, plain)), dtype)


@pytest.mark.parametrize("direction", ["causal", "bidirectional", "shifted"])
@pytest.mark.parametrize("length", [1, 16, 100, 300])
@DTYPES
def test_closed_form_of_the_maps(dtype, length, direction):
    """The gradients of the weights of lags and of the matrices of chunks equal autograd's."""
    rows, shift = 5 if direction == "causal" else 10, direction == "shifted"
    leaves = [torch.randn(rows, 3, dtype=dtype) for _ in range(3)]
    leaves[0] = -leaves[0].exp()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    of = Coefficients(leaves[0], None, *leaves[1:])
    detached = Coefficients(*(None if t is None else t.detach() for t in of))
    taps, kept = tables.lags(of, 5, length, shift)
    gradient = torch.randn_like(taps)
    closed = tables.lags_backward(detached, 5, length, shift, [x.detach() for x in kept], gradient)
    assert_same([closed[0], *closed[2:]], torch.autograd.grad(taps, leaves, gradient), dtype)
    taps, *maps, kept = tables.chunk_maps(of, 5, length, shift)
    gradients = [torch.randn_like(made) for made in (taps, *maps)]
    closed = tables.chunk_maps_backward(detached, 5, length, shift, [x.detach() for x in kept], *gradients)
    assert_same([closed[0], *closed[2:]], torch.autograd.grad((taps, *maps), leaves, gradients), dtype)


def test_a_truncated_step_has_no_coefficients():
    x, parameters = torch.randn(2, 6, 5), [torch.randn(5, 3) for _ in range(4)]
    _, state = damped_ema(x, *parameters, truncation=4, return_state=True)
    with pytest.raises(ValueError, match="`coefficients` do not apply to a `TruncatedEmaState`; omit them"):
        damped_ema_step(x[:, 0], state, *parameters, coefficients=ema_coefficients(*parameters))


@pytest.mark.parametrize("op", ["damped_ema", "complex_ema", "diagonal_ssm"])
def test_coefficients_of_steps(op):
    leaves = CALLS[f"{op}_step"](Sizes(5, 1, channels=6, states=3)).leaves
    make, step = getattr(api, f"{op.removeprefix('damped_')}_coefficients"), getattr(api, f"{op}_step")
    made = make(*(x for key, x in leaves.items() if key not in ("x", "state", "skip")), dtype=torch.float64)
    expected = step(**leaves)
    assert_close(step(**leaves, coefficients=made), expected)
    other = step(**leaves, coefficients=tuple(2.0 * x for x in made))
    assert relative_error(other[1], expected[1]) > 0.1
