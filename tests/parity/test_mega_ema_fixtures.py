"""`damped_ema` against the original `MultiHeadEMA`: outputs, all gradients, steps and segments with a cache.

The logit of the input weight is named delta in branch `main` and alpha in branch `flash`. In `flash`, the backward
average starts at the next token.
"""

import pytest
import torch

from luna_mega.kernels.api import damped_ema, damped_ema_step
from luna_mega.kernels.recurrence import torch_backend
from luna_mega.kernels.recurrence.coefficients import damped_coefficients
from luna_mega.kernels.recurrence.lag_tables import lags
from tests.parity.original import Original

CASES = [
    "01_ema_bidir",
    "01_ema_bidir_extreme",
    "01_ema_bidir_trunc",
    "01_ema_causal",
    "01_ema_causal_extreme",
    "01_ema_causal_trunc",
    "15_flash_ema_bidir",
    "15_flash_ema_bidir_trunc",
    "15_flash_ema_bidir_trunc0",
    "15_flash_ema_causal",
]


@pytest.fixture(params=["reference", "fft", "chunks"])
def backend(request, monkeypatch):
    """Return the name of a backend; the torch backend runs with both algorithms (truncation requires the FFT)."""
    monkeypatch.setattr(torch_backend, "MANY_POSITIONS", 0 if request.param == "chunks" else 4096)
    return "reference" if request.param == "reference" else "torch"


class Fixture(Original):
    def __init__(self, *folders):
        super().__init__(*folders)
        logits = ("alpha", "delta") if self.flash else ("delta", "alpha")
        self.names, weights = (*logits, "beta", "gamma", "omega"), self.weights()
        self.parameters = [weights[name].squeeze(-1).requires_grad_() for name in self.names]
        self.options = {"shift": self.flash and self.args["bidirectional"], "truncation": self.args["truncation"]}
        self.mask = self.io["padding_mask"] == 0
        self.x, self.cotangent = map(self.time_major, ("x", "cot"))


@pytest.fixture
def fixture(request, parity_folder, outputs):
    return Fixture(parity_folder("mega", request.param), outputs)


@pytest.mark.parametrize("fixture", CASES, indirect=True)
def test_parallel(fixture, parity, backend):
    for padded in ("", "_padded"):
        x = fixture.x.clone().requires_grad_()
        mask = fixture.mask if padded else None
        output = damped_ema(x, *fixture.parameters, mask=mask, backend=backend, **fixture.options)
        parity.check(f"out{padded}", output.transpose(0, 1), fixture.io[f"out{padded}"], **fixture.tight)
        gradients = torch.autograd.grad(output, [x, *fixture.parameters], fixture.cotangent)
        expected = fixture.io[f"grad_x{padded}"]
        parity.check(f"grad_x{padded}", gradients[0].transpose(0, 1), expected, **fixture.loose)
        for name, gradient in zip(fixture.names, gradients[1:], strict=True):
            expected = fixture.io[f"grad{padded}.{name}"]
            parity.check(f"grad{padded}.{name}", gradient.view(expected.shape), expected, **fixture.loose)


@pytest.mark.parametrize("fixture", CASES, indirect=True)
def test_kernel(fixture, parity):
    coefficients = damped_coefficients(*fixture.parameters[:4])
    expected = fixture.io["kernel"]
    kernel, _ = lags(coefficients, len(expected), expected.shape[1], shift=False)
    parity.check("kernel", kernel, expected, **fixture.tight)
    parity.check("coeff_q", coefficients[0].exp()[..., None], fixture.io["coeff_q"], **fixture.tight)


@pytest.mark.parametrize("fixture", [case for case in CASES if "causal" in case], indirect=True)
def test_steps_and_segments(fixture, parity, backend):
    """Steps and segments equal the original's steps, which never truncate the average."""
    rows, channels = fixture.x.shape[0], fixture.x.shape[2]
    state = torch.zeros(rows, channels, fixture.args["ndim"])
    steps = []
    for x in fixture.x.unbind(1):
        output, state = damped_ema_step(x, state, *fixture.parameters, backend=backend)
        steps.append(output)
    parity.check("step_out", torch.stack(steps), fixture.io["step_out"], **fixture.tight)
    parity.check("step_final_state", state, fixture.io["step_final_state"], **fixture.tight)
    cuts = fixture.io["segment_cuts"].tolist()
    for padded in ("", "_padded"):
        state, segments = None, []
        for start, end in zip(cuts[:-1], cuts[1:], strict=True):
            output, state = damped_ema(
                fixture.x[:, start:end],
                *fixture.parameters,
                mask=fixture.mask[:, start:end] if padded else None,
                initial_state=state,
                return_state=True,
                backend=backend,
            )
            segments.append(output)
        expected = fixture.io[f"segment_out{padded}"]
        parity.check(f"segment_out{padded}", torch.cat(segments, 1).transpose(0, 1), expected, **fixture.tight)
        if not padded:
            parity.check("segment_final_state", state, fixture.io["segment_final_state"], **fixture.tight)
