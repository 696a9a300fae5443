"""`damped_ema`: exact decays, truncated states, the choice of an algorithm, invalid arguments."""

import decimal
import math

import pytest
import torch

from luna_mega.kernels.api import TruncatedEmaState, damped_ema, damped_ema_step
from luna_mega.kernels.moving_average import reference, torch_backend
from tests.kernels.averages import Inputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_log_decay_is_exact_and_finite(dtype):
    values = [-1e4, -300.0, -80.0, -20.0, -9.0, -3.0, -0.7, 0.0, 0.9, 2.5, 6.0, 15.0, 30.0, 90.0, 1e4]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(dtype)
    logits = [pairs[:, 0].clone().requires_grad_(), pairs[:, 1].clone().requires_grad_()]
    actual = reference.log_decay(*logits)
    assert all(torch.isfinite(g).all() for g in (actual, *torch.autograd.grad(actual.sum(), logits)))
    assert (actual <= 0).all() and actual.min() >= -70
    with decimal.localcontext(prec=300):
        for (a, b), log_q in zip(pairs.tolist(), actual.tolist(), strict=True):
            if abs(a) <= 300 and abs(b) <= 300:
                p = [1 / (1 + (-decimal.Decimal(logit)).exp()) for logit in (a, b)]
                exact = max(float((1 - p[0] * p[1]).ln()), math.log(1e-30))
                assert log_q == pytest.approx(exact, rel=4 * torch.finfo(dtype).eps, abs=torch.finfo(dtype).tiny)


def truncated(inputs):
    return TruncatedEmaState(torch.zeros(2, 5, 3), torch.zeros(2, 5, 3), torch.zeros(2, inputs, 5))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_truncated_states_after_lengths_and_masked_steps(backend):
    x, *parameters = Inputs(20, batch=4).leaves
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


@pytest.mark.parametrize("kind", ["causal", "complex"])
def test_lengths_that_do_not_fit(kind):
    inputs = Inputs(6, kind)
    mask, lengths = torch.ones(2, 6, dtype=torch.bool), torch.tensor([6, 2])
    with pytest.raises(ValueError, match=r"lengths must be integers \[2\], got torch.int64 \[3\]"):
        inputs.op(*inputs.leaves, mask=mask, lengths=torch.ones(3, dtype=torch.long), return_state=True)
    for options in ({"mask": mask}, {"return_state": True}):
        with pytest.raises(ValueError, match="lengths need return_state=True and a mask"):
            inputs.op(*inputs.leaves, lengths=lengths, **options)


def test_size_chooses_the_form(monkeypatch):
    chosen = []
    operator = torch_backend.operator
    monkeypatch.setattr(torch_backend, "operator", lambda *args: chosen.append(args[8] or "fft") or operator(*args))
    for batch, length, options in (
        (1, 511, {}),
        (1, 512, {}),
        (2, 513, {}),
        (4, 1024, {}),
        (1, 4097, {}),
        (1024, 16, {}),
        (1024, 17, {}),
        (1024, 33, {}),
        (4, 1024, {"truncation": 1000}),
        (4, 1024, {"truncation": 1024}),
        (1, 8, {"return_state": True}),
    ):
        inputs = Inputs(length, batch=batch, channels=1, states=1, dtype=torch.float32)
        damped_ema(*inputs.leaves, **options, backend="torch")
    assert chosen == ["fft", 16, 32, 32, 64, 16, 32, 64, "fft", 32, 16]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a | {"x": a["x"][0]}, "batch, length, channels"),
        (lambda a: a | {"x": a["x"][:, :0]}, "length 1 or more"),
        (lambda a: a | {"x": a["x"].long()}, "floating-point"),
        (lambda a: a | {"x": a["x"][..., :3]}, "5 rows of parameters fit neither 3 channels"),
        (lambda a: a | {"expansion": a["expansion"][:, :2]}, "one shape"),
        (lambda a: a | {"projection": a["projection"][:, :, None]}, "one shape"),
        (lambda a: a | {"skip": a["skip"][:4]}, "skip of shape"),
        (lambda a: a | {"mask": torch.ones(2, 6)}, "bool mask"),
        (lambda a: a | {"mask": torch.ones(2, 5, dtype=torch.bool)}, "bool mask"),
        (lambda a: a | {"shift": True}, "two directions"),
        (lambda a: a | {"truncation": 4, "initial_state": torch.zeros(2, 5, 3)}, "truncation=4 needs a TruncatedEmaSt"),
        (lambda a: a | {"truncation": 4, "initial_state": truncated(3)}, r"inputs \[2, 4, 5\], got \[2, 3, 5\]"),
        (lambda a: a | {"initial_state": truncated(3)}, "is a TruncatedEmaState; pass its truncation too"),
        (lambda a: a | {"initial_state": torch.zeros(2, 5, 2)}, "state .2, 5, 3., got"),
        (lambda a: a | {"initial_state": torch.zeros(2, 5, 3).half()}, "float32 or float64 state"),
    ],
)
def test_bad_arguments(change, message):
    names = ("x", "input_logit", "damping_logit", "expansion", "projection", "skip")
    arguments = dict(zip(names, Inputs(6).leaves, strict=True))
    with pytest.raises(ValueError, match=message):
        damped_ema(**change(arguments))


def test_bad_arguments_of_two_directions_and_of_a_step():
    inputs = Inputs(6, "bidirectional")
    with pytest.raises(ValueError, match="a bidirectional average has no state"):
        damped_ema(*inputs.leaves, return_state=True)
    x, *parameters = inputs.leaves
    with pytest.raises(ValueError, match="one row of parameters per channel"):
        damped_ema_step(x[:, 0], torch.zeros(2, 5, 3), *parameters)
    x, *parameters, state = Inputs(6, "states").leaves
    with pytest.raises(ValueError, match="state .2, 5, 3., got"):
        damped_ema_step(x[:, 0], state[:1], *parameters)
    with pytest.raises(ValueError, match="bool mask"):
        damped_ema_step(x[:, 0], state, *parameters, mask=torch.ones(2))


def test_invalid_cu_seqlens_raise():
    leaves = Inputs(6).leaves
    cu_seqlens = torch.tensor([0, 6])
    with pytest.raises(ValueError, match=r"\[1, total, channels\]"):
        damped_ema(*leaves, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="requires cu_seqlens"):
        damped_ema(*leaves, max_seqlen=6)
    leaves = Inputs(6, batch=1).leaves
    with pytest.raises(ValueError, match="must increase from 0 to 6"):
        damped_ema(*leaves, cu_seqlens=cu_seqlens - 1)
    with pytest.raises(ValueError, match="state .1, 5, 3., got"):
        damped_ema(*leaves, cu_seqlens=cu_seqlens, initial_state=torch.zeros(2, 5, 3))
