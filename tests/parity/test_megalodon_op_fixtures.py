"""`complex_ema` and `timestep_norm` against the original Megalodon operators: values, states, all gradients."""

import pytest
import torch

from luna_mega.kernels.api import TimestepNormState, complex_ema, complex_ema_step, timestep_norm
from luna_mega.kernels.moving_average import reference, torch_backend
from tests.parity.original import Original


@pytest.fixture(params=["reference", "fft", "chunks"])
def backend(request, monkeypatch):
    """Return the name of a backend; the torch backend runs with both algorithms."""
    monkeypatch.setattr(torch_backend, "MANY_POSITIONS", 0 if request.param == "chunks" else 4096)
    return "reference" if request.param == "reference" else "torch"


class Fixture(Original):
    """One case of a folder; names of its tensors do not include the name of the case."""

    def __init__(self, case, *folders):
        super().__init__(*folders)
        self.sizes, self.io = self.meta["cases"][case], self.starting_with(f"{case}.")

    def leaves(self, *names):
        return [self.io[name].clone().requires_grad_() for name in names]


@pytest.fixture
def fixture(request, parity_folder, outputs):
    folder, case = request.param
    return Fixture(case, parity_folder("megalodon", folder), outputs)


def cases(folder, numbers):
    return [(folder, f"case{number}") for number in numbers]


@pytest.mark.parametrize("fixture", cases("10_op_cema", range(5)), indirect=True)
def test_cema(fixture, parity, backend):
    """Results equal the original's, which has channels before time and returns its last state in some cases."""
    names = [f"weights.{name}" for name in ("alpha", "delta", "theta", "gamma", "omega")]
    x, *weights = fixture.leaves("x", *names)
    alpha, delta, theta, gamma, omega = weights
    parameters = [alpha[..., 0], delta[..., 0], theta[:, 0, 0], gamma, omega[:, 0]]
    state = fixture.leaves("h0")[0] if fixture.sizes["initial_state"] else None
    output, last = complex_ema(x.mT, *parameters, initial_state=state, return_state=True, backend=backend)
    parity.check("y", output.mT, fixture.io["y"], **fixture.tight)
    outputs, cotangents = [output.mT], [fixture.io["cot"]]
    if fixture.sizes["last_state"]:
        parity.check("h_last", last, fixture.io["h_last"], **fixture.tight)
        outputs, cotangents = [*outputs, last], [*cotangents, fixture.io["h_cot"]]
    leaves = [x, *weights, *([] if state is None else [state])]
    expected = ["grad_x", *(name.replace("weights", "grad") for name in names), "grad_h0"]
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    for name, gradient in zip(expected, gradients, strict=False):
        parity.check(name, gradient, fixture.io[name], **fixture.loose)
    p, q, g = reference.complex_coefficients(*parameters[:4])
    for name, actual in (("p", p[..., None]), ("q", torch.view_as_real(q)[:, :, None]), ("g", torch.view_as_real(g))):
        parity.check(name, actual, fixture.io[name], **fixture.tight)


@pytest.mark.parametrize("fixture", cases("10_op_cema", (0, 2, 4)), indirect=True)
def test_cema_in_steps(fixture, parity):
    parameters = [fixture.io[f"weights.{name}"] for name in ("alpha", "delta", "theta", "gamma", "omega")]
    parameters = [parameter.reshape(fixture.io["weights.gamma"].shape[: 1 + (i < 2)]) if i != 3 else parameter
                  for i, parameter in enumerate(parameters)]  # fmt: skip
    outputs, state = [], fixture.io["h0"]
    for x in fixture.io["x"].unbind(2):
        output, state = complex_ema_step(x, state, *parameters)
        outputs.append(output)
    parity.check("y", torch.stack(outputs, 2), fixture.io["y"], **fixture.tight)
    parity.check("h_last", state, fixture.io["h_last"], **fixture.tight)


@pytest.mark.parametrize("fixture", cases("11_op_timestep_norm", range(9)), indirect=True)
@pytest.mark.parametrize("norm_backend", ["reference", "torch"])
def test_timestep_norm(fixture, parity, norm_backend):
    """Results equal the original's.

    Gradients after masked positions are not compared, because the original's are wrong.
    """
    sizes, io = fixture.sizes, fixture.io
    x, weight, bias = fixture.leaves("x", "weights.weight", "weights.bias")
    leaves, state = {"grad_x": x, "grad.weight": weight, "grad.bias": bias}, None
    if sizes["previous"]:
        mean, variance = fixture.leaves("prev_mean", "prev_var")
        state = TimestepNormState(io["prev_count"], mean, variance)
        leaves |= {"grad_prev_mean": mean, "grad_prev_var": variance}
    elif sizes["prior_count"]:
        prior, spread = fixture.leaves("weights.prior_mean", "weights.prior_logv")
        parts = (v.expand(sizes["B"], -1) for v in (prior, spread.exp()))
        state = TimestepNormState(torch.full((sizes["B"],), sizes["prior_count"]), *parts)
        leaves |= {"grad.prior_mean": prior, "grad.prior_logv": spread}
    options = {"initial_state": state, "return_state": True, "backend": norm_backend}
    if sizes["mask"]:
        options["mask"] = io["padding_mask"] == 0
    output, (count, mean, variance) = timestep_norm(x, sizes["G"], 1.0 + weight, bias, **options)
    assert torch.equal(count, io["count"])
    far = {"atol": 1e-4, "rtol": 1e-3} if io["x"].abs().max() > 100 else {}
    for name, actual in (("y", output), ("mean", mean.float()), ("var", variance.float())):
        parity.check(name, actual, io[name], **(fixture.tight | far))
    outputs, cotangents = [output, mean, variance], [io["cot"], io["mean_cot"].double(), io["var_cot"].double()]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    for name, gradient in zip(leaves, gradients, strict=True):
        if name in io:
            parity.check(name, gradient, io[name], **(fixture.loose | far))
