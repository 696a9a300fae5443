"""Averages, state space models and the norm: exact decays, discretization, truncation, long sequences, large values."""

import decimal
import math

import pytest
import torch

from luna_mega.kernels.api import damped_ema, damped_ema_step, discretize, timestep_norm
from luna_mega.kernels.recurrence.coefficients import log_decay
from tests.kernels.backends import NATIVE, shrink_blocks
from tests.kernels.calls import OPERATORS, Sizes
from tests.kernels.comparisons import relative_error
from tests.kernels.contract import Case, check


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", NATIVE])
@pytest.mark.parametrize("blocks", ["small", "other"])
@pytest.mark.parametrize("operator", ["damped_ema", "complex_ema", "diagonal_ssm"])
def test_long(operator, blocks, backend):
    """The averages of 5,000 positions are within 5e-6 in float32, even if states persist, and 1e-11 in float64."""
    sizes = Sizes(1, 5000, channels=2, states=2)
    case = Case(operator, sizes=sizes, decays="slow", blocks=blocks, dtype=torch.float32)
    check(case, backend, bound=5e-6)
    if backend == "torch":
        check(Case(operator, sizes=sizes, decays="slow", blocks=blocks), backend)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_log_decay_is_exact_and_finite(dtype):
    values = [-1e4, -300.0, -80.0, -20.0, -9.0, -3.0, -0.7, 0.0, 0.9, 2.5, 6.0, 15.0, 30.0, 90.0, 1e4]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(dtype)
    logits = [pairs[:, 0].clone().requires_grad_(), pairs[:, 1].clone().requires_grad_()]
    actual = log_decay(*logits)
    assert all(torch.isfinite(g).all() for g in (actual, *torch.autograd.grad(actual.sum(), logits)))
    assert (actual <= 0).all() and actual.min() >= -70
    with decimal.localcontext(prec=300):
        for (a, b), log_q in zip(pairs.tolist(), actual.tolist(), strict=True):
            if abs(a) <= 300 and abs(b) <= 300:
                p = [1 / (1 + (-decimal.Decimal(logit)).exp()) for logit in (a, b)]
                exact = max(float((1 - p[0] * p[1]).ln()), math.log(1e-30))
                assert log_q == pytest.approx(exact, rel=4 * torch.finfo(dtype).eps, abs=torch.finfo(dtype).tiny)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_truncated_states_after_lengths_and_masked_steps(backend):
    x, *parameters = OPERATORS["damped_ema"].make(Sizes(4, 20, channels=5, states=3)).leaves.values()
    lengths, mask = torch.tensor([20, 11, 1, 0]), torch.tensor([True, False, True, False])
    options = {"truncation": 4, "return_state": True, "backend": backend}
    _, first = damped_ema(x[:, :9], *parameters, **options)
    kept = {"mask": torch.arange(20) < lengths[:, None], "lengths": lengths}
    _, state = damped_ema(x, *parameters, initial_state=first, **kept, **options)
    _, after = damped_ema_step(x[:, 3], state, *parameters, mask=mask, backend=backend)
    for row, length in enumerate(lengths.tolist()):
        rows = torch.cat([x[row, :9], x[row, :length], *([x[row, 3:4]] if mask[row] else [])])[None]
        _, last = damped_ema(rows, *parameters, **options)
        for got, expected in zip(after, last, strict=True):
            torch.testing.assert_close(got[row], expected[0])


@pytest.mark.parametrize("real", [False, True])
def test_methods_of_discretize(real):
    torch.manual_seed(0)
    a = torch.complex(torch.tensor(-0.5, dtype=torch.float64), math.pi * torch.arange(4.0).double()).expand(5, 4)
    dt, c = 0.1 * torch.rand(5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.complex128)
    if real:
        a, c = a.real, c.real
    z = a * dt[:, None]
    expected = {
        "zoh": (torch.exp(z), c * (torch.exp(z) - 1) / a),
        "bilinear": ((1 + z / 2) / (1 - z / 2), c * dt[:, None] / (1 - z / 2)),
        "none": (torch.exp(z), c),
    }
    for method, (q, weight) in expected.items():
        log_decay, phase, found = discretize(a, dt, c, method)
        assert (phase is None) == (real and method != "bilinear")
        got = torch.exp(log_decay) if phase is None else torch.polar(torch.exp(log_decay), phase)
        torch.testing.assert_close(got.to(torch.complex128), q.to(torch.complex128))
        torch.testing.assert_close(found.to(torch.complex128), weight.to(torch.complex128))
        steps = discretize(a, dt[:, None].expand_as(z), c, method)
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(steps, (log_decay, phase, found), strict=True))
    assert torch.equal(discretize(a, dt, torch.ones_like(a))[2], discretize(a, dt)[2])
    zero = torch.full_like(a, -2.0).requires_grad_()  # a bilinear q of 0
    log_decay, phase, found = discretize(zero, torch.ones_like(dt), c, "bilinear")
    (slope,) = torch.autograd.grad(log_decay.sum() + phase.sum() + found.real.sum(), zero)
    assert log_decay.exp().max() < 1e-29 and log_decay.isfinite().all() and slope.isfinite().all()


def test_discretize_is_accurate_for_short_steps_and_computes_in_float32():
    a, step = torch.full((1, 1), -0.5), torch.full((1,), 1e-6)
    assert abs(discretize(a, step)[2].item() / 1e-6 - 1) < 1e-5
    for half in (torch.bfloat16, torch.float16):
        log_decay, phase, weight = discretize(a.to(half), torch.full((1,), 1e-2, dtype=half))
        assert phase is None and log_decay.dtype == weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert discretize(a, step)[2].dtype == torch.float32


@pytest.mark.parametrize("blocks", ["small", "other"])
def test_norm_of_values_far_from_zero(blocks, monkeypatch):
    """With a mean of 1e4 standard deviations, errors stay below 2e-3; float32 rounding of x loses 1e-3."""
    shrink_blocks(monkeypatch, blocks)
    generator = torch.Generator().manual_seed(0)
    x = (1.5 * torch.randn(2, 100, 12, generator=generator) + 1e4).requires_grad_()
    seed, results = torch.randn(2, 100, 12, generator=generator), []
    for inputs, backend in ((x, "torch"), (x.detach().double().requires_grad_(), "reference")):
        output, state = timestep_norm(inputs, 3, return_state=True, backend=backend)
        total = (output * seed).sum() + state.mean.sum() + state.variance.sum()
        results.append([output, *state[1:], *torch.autograd.grad(total, inputs)])
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) <= 2e-3
