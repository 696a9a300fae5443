"""NaN and infinity at masked positions of x have the results and gradients of zeros, in random calls."""

import random
from functools import partial

import pytest
import torch

from tests.kernels import calls
from tests.kernels.backends import NATIVE

AVERAGES = {
    kind: [{"stateful": True}, {"directions": 2}] for kind in ("damped_ema", "diagonal_ssm", "diagonal_ssm real")
}
AVERAGES["damped_ema"] += [{"directions": 2, "shift": True}, {"truncation": 5}]
AVERAGES["complex_ema"] = [{"stateful": True}]
OPS = {
    f"{kind} {options}": partial(calls._average, kind=kind, masked=True, **options)
    for kind, several in AVERAGES.items()
    for options in several
} | {f"timestep_norm {stateful}": partial(calls._norm, masked=True, stateful=stateful) for stateful in (False, True)}
STEPS = {kind: partial(calls._average, kind=kind, step=True) for kind in AVERAGES} | {
    "timestep_norm": partial(calls._norm, step=True, stateful=True)
}


def results(call, rows, kept, fill, seeds, **options):
    leaves = {name: x.float() for name, x in call.leaves.items()}
    leaves["x"] = leaves["x"].masked_fill(~rows, fill)
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    with torch.autocast("cpu", enabled=options.pop("autocast")):
        outputs = list(call.run(**leaves, **options))
    generator = torch.Generator().manual_seed(seeds)
    grads = [torch.randn(x.shape, generator=generator) for x in outputs]
    outputs[0], grads[0] = outputs[0][kept], grads[0][kept]
    return outputs, torch.autograd.grad(outputs, list(leaves.values()), grads)


def check(call, rows, kept, rng, **options):
    options |= {"autocast": rng.random() < 0.3}
    fill, seeds = rng.choice([float("nan"), float("inf"), -float("inf")]), rng.randrange(1000)
    expected = results(call, rows, kept, 0.0, seeds, **options)
    actual = results(call, rows, kept, fill, seeds, **options)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)


def skip_unsupported(name, backend):
    if backend in ("native", "triton") and "truncation" in name or backend == "native" and "norm" in name:
        pytest.skip(f"{backend} does not support it")


@pytest.mark.triton
@pytest.mark.parametrize("backend", ["reference", "torch", NATIVE, "triton"])
@pytest.mark.parametrize("name", OPS)
def test_masked_positions(name, backend, monkeypatch, triton_device):
    skip_unsupported(name, backend)
    rng = random.Random(f"{name} {backend}")
    for length in (rng.randrange(2, 30), rng.choice((70, 600)))[: 2 if backend in ("native", "torch") else 1]:
        mask = torch.rand(2, length) < rng.choice((0.3, 0.8))
        mask[:, rng.randrange(length)] = True
        padded = calls._rows
        monkeypatch.setattr(calls, "_rows", lambda x, masked=False, *rest, mask=mask: {"mask": mask} if masked else {})
        sizes = calls.Sizes(2, length, channels=4, states=3, groups=2)
        check(OPS[name](sizes), mask[..., None], mask, rng, backend=backend)
        monkeypatch.setattr(calls, "_rows", padded)


@pytest.mark.parametrize("backend", ["reference", "torch", NATIVE])
@pytest.mark.parametrize("name", STEPS)
def test_masked_rows_of_steps(name, backend):
    skip_unsupported(name, backend)
    rng, mask = random.Random(name), torch.tensor([True, False, True])
    check(STEPS[name](calls.Sizes(3, 1, channels=4, states=3)), mask[:, None], mask, rng, backend=backend, mask=mask)
