"""`complex_ema`: without a phase it is `damped_ema`; invalid arguments."""

import pytest
import torch

from luna_mega.kernels.api import complex_ema, complex_ema_step, damped_ema
from tests.kernels.averages import Inputs
from tests.kernels.comparisons import assert_same

NAMES = ("x", "input_logit", "damping_logit", "phase_logit", "projection", "skip")


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
