"""`complex_ema`: the reference against plain Python and numerical gradients, coefficients, invalid arguments."""

import cmath
import math

import pytest
import torch

from luna_mega.kernels.api import complex_ema, complex_ema_step, damped_ema
from tests.kernels.averages import COMPLEX, Inputs
from tests.kernels.leaves import MASKS, assert_same

NAMES = ("x", "input_logit", "damping_logit", "phase_logit", "projection", "skip")


@pytest.mark.parametrize("kind", COMPLEX)
@pytest.mark.parametrize("masking", MASKS)
def test_reference_is_the_recurrence(kind, masking):
    """The reference equals the equations evaluated with Python numbers."""
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
    inputs = Inputs(4, "complex states", "some", channels=2, states=2)
    assert torch.autograd.gradcheck(lambda *leaves: inputs.call(*leaves, backend="reference"), inputs.leaves)


def test_without_a_phase_it_is_the_damped_average():
    x, alpha, delta, _, gamma, _ = Inputs(90, "complex").leaves
    expected = damped_ema(x, alpha, delta, torch.ones_like(alpha), gamma[..., 0])
    actual = complex_ema(x, alpha, delta, torch.full((5,), -1e9, dtype=torch.float64), gamma)
    assert_same([actual], [expected])


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
    arguments = dict(zip(NAMES, Inputs(6, "complex").leaves, strict=True))
    with pytest.raises(ValueError, match=message):
        complex_ema(**change(arguments))


def test_bad_arguments_of_a_step():
    (x, *parameters), state = (inputs := Inputs(6, "complex states")).arguments(*inputs.leaves)
    with pytest.raises(ValueError, match=r"x \[batch, channels\]"):
        complex_ema_step(x, state, *parameters)
    with pytest.raises(ValueError, match="state .2, 5, 3, 2., got"):
        complex_ema_step(x[:, 0], state[:1], *parameters)
    with pytest.raises(ValueError, match="bool mask"):
        complex_ema_step(x[:, 0], state, *parameters, mask=torch.ones(2))
