"""Moving average, timestep norm and attention against the original Megalodon operators: values, states, gradients."""

import pytest
import torch

from luna_mega import MegalodonConfig
from luna_mega.kernels.api import TimestepNormState, complex_ema, complex_ema_step, timestep_norm, use_backend
from luna_mega.kernels.recurrence import reference, torch_backend
from luna_mega.kernels.recurrence.coefficients import Coefficients, complex_coefficients, powers
from luna_mega.modeling_common.layout import NO_PADDING
from luna_mega.modeling_megalodon.modeling_megalodon import (
    MegalodonCacheLayer,
    MegalodonChunkAttention,
    MegalodonRotary,
)
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
    log_decay, turn, p, g = complex_coefficients(*parameters[:4])
    q = powers(log_decay, turn, torch.ones(1)).mT
    for name, actual in (("p", p[..., None]), ("q", q), ("g", g)):
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


@pytest.mark.parametrize("fixture", cases("12_op_attention", range(6)), indirect=True)
@pytest.mark.parametrize("attention_backend", ["reference", "torch"])
def test_attention(fixture, parity, attention_backend):
    """Results equal the original's, also after held keys, which are rotated; the cache holds the same keys after it."""
    sizes, io, (query, key, value) = fixture.sizes, fixture.io, fixture.leaves("q", "k", "v")
    config = MegalodonConfig(
        hidden_size=query.shape[-1],
        shared_representation_size=query.shape[-1],
        value_size=value.shape[-1],
        num_attention_heads=sizes["H"],
        norm_num_groups=1,
        chunk_size=sizes["C"],
        rope_theta=sizes["rope_base"] or 10000.0,
    )
    cache, held = None, sizes["held"]
    if held:
        cache = MegalodonCacheLayer()
        cache.extend(io["held_k"].flatten(2), io["held_v"].flatten(2), None, sizes["C"])
    rotation = MegalodonRotary(config)(query, NO_PADDING, cache)
    with use_backend(attention_backend):
        shared = torch.stack((query, key))
        output, _ = MegalodonChunkAttention(config)(shared, value, NO_PADDING, rotation, cache=cache)
    parity.check("y", output, io["y"], **fixture.tight)
    gradients = torch.autograd.grad(output, (query, key, value), io["cot"])
    for name, gradient in zip(("grad_q", "grad_k", "grad_v"), gradients, strict=True):
        parity.check(name, gradient, io[name], **fixture.loose)
    if held:
        kept = (held + sizes["L"]) % sizes["C"]
        for name, tensor in (("new_k", cache.keys), ("new_v", cache.values)):
            actual = tensor[:, :kept].unflatten(2, (sizes["H"], -1))
            assert actual.shape == io[name].shape
            if kept:
                parity.check(name, actual, io[name], **fixture.tight)


@pytest.mark.parametrize("fixture", cases("13_op_ema_raw", range(4)), indirect=True)
def test_average_of_coefficients(fixture, parity, backend):
    """Kernel, response to a state, and last state equal the original's, whose operators have p, q and gamma."""
    io, rates = fixture.io, fixture.sizes["rates"]
    leaves = dict(zip(("p", "q", "gamma", "h0", "x"), fixture.leaves("p", "q", "gamma", "h0", "x"), strict=True))
    # The torch backend uses log |q|. Its gradient divides by |q|, which amplifies rounding errors near zero.
    dtype = torch.float64 if rates == "near_zero" else torch.float32
    p, q, gamma, state, x = (leaf.to(dtype) for leaf in leaves.values())
    weight_in, number = p[..., 0], torch.view_as_complex(q[:, :, 0])
    turn = number.angle().double() / (2 * torch.pi)
    coefficients = Coefficients(number.abs().log(), turn, weight_in, gamma)
    run = (reference if backend == "reference" else torch_backend).average
    impulse = torch.zeros_like(x[:1].mT)
    impulse[:, 0] = 1.0
    kernel, _ = run(impulse, coefficients)
    carry, _ = run(torch.zeros_like(x.mT), coefficients, initial_state=state)
    _, last = run(x.mT, coefficients, initial_state=state, return_state=True)
    results = {"kernel": kernel[0].mT, "carry": carry.mT, "h_last": last}
    slow = {"atol": 1e-4} if rates == "near_one" else {}  # the original is off by 2.8e-5 of the largest value
    for name, result in results.items():
        parity.check(name, result, io[name], **(fixture.tight | slow), scaled=True)
    tested = {
        "grad": (["kernel", "carry"], ["k_cot", "b_cot"], ["p", "q", "gamma", "h0"]),
        "hidden_grad": (["h_last"], ["h_cot"], ["x", "p", "q", "h0"]),
    }
    for prefix, (outputs, cotangents, names) in tested.items():
        objective = sum((results[a] * io[b]).sum() for a, b in zip(outputs, cotangents, strict=True))
        gradients = torch.autograd.grad(objective, [leaves[name] for name in names], retain_graph=True)
        for name, gradient in zip(names, gradients, strict=True):
            parity.check(f"{prefix}_{name}", gradient, io[f"{prefix}_{name}"], **(fixture.loose | slow), scaled=True)
