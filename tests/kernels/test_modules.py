"""Layers of `kernels.modules`: results of their ops, states, steps, dtypes and initializations."""

import copy
import math
import pickle

import pytest
import torch
from torch.nn.utils import parametrizations, prune, weight_norm

from luna_mega import MegaConfig, MegalodonConfig, MegalodonModel, MegaModel
from luna_mega.kernels.api import complex_ema, damped_ema, diagonal_ssm, discretize, use_backend
from luna_mega.kernels.modules import ComplexMovingAverage, DiagonalSSM, MovingAverage
from tests.kernels.comparisons import assert_same

D, N, T = 6, 4, 20
LAYERS = {
    "MovingAverage": lambda: MovingAverage(D, N),
    "MovingAverage, no skip": lambda: MovingAverage(D, N, skip=False),
    "ComplexMovingAverage": lambda: ComplexMovingAverage(D, N),
    "DiagonalSSM": lambda: DiagonalSSM(D, N),
    "DiagonalSSM, inv": lambda: DiagonalSSM(D, N, init="inv", discretization="bilinear"),
    "DiagonalSSM, real": lambda: DiagonalSSM(D, N, init="real"),
    "DiagonalSSM, real, bilinear": lambda: DiagonalSSM(D, N, init="real", discretization="bilinear"),
}
BIDIRECTIONAL = [lambda: MovingAverage(D, N, bidirectional=True), lambda: DiagonalSSM(D, N, bidirectional=True)]


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param]()


@pytest.fixture
def x():
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(0))


def test_layers_compute_their_ops(x):
    mask = torch.arange(T)[None] < torch.tensor([[T], [T - 3]])
    average = MovingAverage(D, N)
    logits = average.input_logit, average.damping_logit, average.expansion, average.projection
    assert torch.equal(average(x, mask=mask), damped_ema(x, *logits, average.skip, mask=mask))
    turning = ComplexMovingAverage(D, N)
    logits = turning.input_logit, turning.damping_logit, turning.phase_logit, turning.projection
    assert torch.equal(turning(x, mask=mask), complex_ema(x, *logits, turning.skip, mask=mask))
    ssm = DiagonalSSM(D, N)
    a = torch.complex(-ssm.log_rate.exp(), ssm.frequency)
    weights = discretize(a, ssm.log_step.exp(), 2 * torch.view_as_complex(ssm.output_weight))
    torch.testing.assert_close(ssm(x, mask=mask), diagonal_ssm(x, *weights, ssm.skip, mask=mask))


def test_masked_rows_of_a_step_keep_their_states(layer, x):
    _, state = layer(x, return_state=True)
    mask = torch.tensor([True, False])
    output, after = layer.step(x[:, 0], state, mask=mask)
    expected, moved = layer.step(x[:1, 0], state[:1])
    torch.testing.assert_close(output[:1], expected)
    torch.testing.assert_close(after, torch.cat((moved, state[1:])))
    assert not layer.step(x[:, 0], mask=mask)[1][1].any()


def segments(layer, x):
    first, state = layer(x[:, :7], return_state=True)
    second, state = layer(x[:, 7:], state, return_state=True)
    return torch.cat((first, second), 1), state


def test_segments_and_steps_are_one_call(layer, x):
    """Outputs, states and gradients of all parameters are equal, also outputs of copies."""
    layer, x = layer.double(), x.double()
    results = []
    for run in (lambda *_: layer(x, return_state=True), segments, steps):
        output, state = run(layer, x)
        gradients = torch.autograd.grad(output.sin().sum() + state.sum(), list(layer.parameters()))
        results.append([output, state, *gradients])
        assert all(y.any() for y in gradients)
    assert_same(results[1], results[0], 1e-11)
    assert_same(results[2], results[0], 1e-11)
    with torch.no_grad():
        for copied in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert_same(steps(copied, x), results[0][:2])


def steps(layer, x, coefficients=None):
    state, outputs = None, []
    for t in range(x.shape[1]):
        output, state = layer.step(x[:, t], state, coefficients=coefficients)
        outputs.append(output)
    return torch.stack(outputs, 1), state


def halve(layer, name):
    layer.load_state_dict({key: 0.5 * weight for key, weight in layer.state_dict().items()})


CHANGES = {
    "new weights": halve,
    "pruning": lambda layer, name: prune.random_unstructured(layer, name, amount=0.3),
    "hook of every call": weight_norm,
    "parametrization": parametrizations.weight_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("given", [False, True])
def test_steps_have_the_current_weights(layer, x, given, change):
    """Steps after a change of the weights, which have not been computed in a call since then."""
    steps(layer, x[:, :5], layer.step_coefficients() if given else None)
    change(layer, "projection" if hasattr(layer, "projection") else "output_weight")
    with torch.no_grad():
        next(layer.parameters()).mul_(0.5)
        actual = steps(layer, x[:, :5], layer.step_coefficients() if given else None)
        assert_same(actual, layer(x[:, :5], return_state=True), 1e-5)


def test_hooks_run_in_steps(layer, x):
    _, state = layer(x, return_state=True)
    layer.register_forward_pre_hook(lambda module, inputs: (2.0 * inputs[0], *inputs[1:]))
    layer.register_forward_hook(lambda module, inputs, output: (output[0] + 1.0, output[1]))
    expected, after = layer(x[:, :1], state, return_state=True)
    assert_same(layer.step(x[:, 0], state), (expected[:, 0], after), 1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_given_coefficients(layer, x, backend):
    """Coefficients of other weights give the results of those weights; wrong shapes and dtypes raise an error."""
    with use_backend(backend):
        expected, made = steps(layer, x), layer.step_coefficients()
        if not isinstance(layer, MovingAverage):
            with torch.no_grad():
                [weight.mul_(0.5) for name, weight in layer.named_parameters() if name != "skip"]
        assert_same(steps(layer, x, made), expected, 1e-5)
        wrong = type(layer)(D, N + 1, **({"init": "real"} if getattr(layer, "frequency", 1) is None else {}))
        others = wrong.step_coefficients(), made[:2], [of[:1] for of in made], layer.step_coefficients(torch.float64)
        for given in others:
            with pytest.raises(ValueError, match=r"needs three `coefficients` of torch.float32 \[6, 4"):
                layer.step(x[:, 0], expected[1], coefficients=given)
        with pytest.raises(ValueError, match="needs three `coefficients` of torch.float64"):
            layer.step(x[:, 0].double(), expected[1].double(), coefficients=made)
        wide = layer.step(x[:, 0].double(), coefficients=layer.step_coefficients(torch.float64))
        assert_same(wide, layer.step(x[:, 0].double()), 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(layer, x, dtype):
    layer, x = layer.to(dtype), x.to(dtype)
    exact, wide = copy.deepcopy(layer).double(), x.double()
    output, state = layer(x, return_state=True)
    assert output.dtype == dtype and state.dtype == torch.float32
    bound = 5e-3 if dtype == torch.bfloat16 else 6e-4
    assert_same([output], [exact(wide)], bound)
    step, state = layer.step(x[:, 0], state)
    assert step.dtype == dtype and state.dtype == torch.float32
    output.sum().backward()
    assert all(weight.grad.isfinite().all() and weight.grad.dtype == dtype for weight in layer.parameters())


@pytest.mark.parametrize("make", BIDIRECTIONAL)
def test_bidirectional_layers(make, x):
    layer = make()
    output = layer(x)
    x = x.clone()
    x[:, -1] += 1.0
    assert not torch.allclose(layer(x)[:, 0], output[:, 0])
    for call in (lambda: layer(x, return_state=True), lambda: layer.step(x[:, 0])):
        with pytest.raises(ValueError, match="no state; omit initial_state and return_state"):
            call()
    with pytest.raises(ValueError, match="a bidirectional layer has no steps; call the layer with all positions"):
        layer.step_coefficients()
    assert repr(layer) == f"{type(layer).__name__}({D}, states={N}, bidirectional=True)"
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    assert_same([compiled(x)], [layer(x)], 1e-5)


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compile(layer, x, dynamic):
    """With `dynamic`, the sizes of x are symbols, and those of weights are constants."""
    torch.compiler.reset()
    options = {"fullgraph": True, "dynamic": dynamic, "backend": "eager" if dynamic else "aot_eager"}
    state = layer(x, return_state=True)[1].detach()
    compiled = torch.compile(layer, **options)
    assert_same([compiled(x)], [layer(x)], 1e-5)
    assert_same(compiled(x, state, return_state=True), layer(x, state, return_state=True), 1e-5)
    step = torch.compile(layer.step, **options)
    with torch.no_grad():
        assert_same(step(x[:, 0], state), layer.step(x[:, 0], state), 1e-5)
        halve(layer, "")
        assert_same(step(x[:, 0], state), layer.step(x[:, 0], state), 1e-5)


def moments(tensors):
    """Return the mean, the standard deviation and the quantiles of numbers."""
    numbers = tensors.detach().flatten()
    return torch.stack((numbers.mean(), numbers.std(), *numbers.quantile(torch.linspace(0.02, 0.98, 9))))


def test_initializations_are_those_of_the_models():
    """The parameters have the distributions of `MegaModel` and `MegalodonModel`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 512, "num_hidden_layers": 1, "ema_projection_size": 16}
    mega = MegaModel(MegaConfig(**sizes)).layers[0].mega_layer.ema_gate
    average = MovingAverage(512, bidirectional=True)
    logits = (mega.damping_factor, mega.decay_factor, mega.ema_expansion_matrix)
    theirs = [*(weight.squeeze(-1) for weight in logits), mega.kernel_projection_matrix, mega.residual_weight]
    megalodon = next(m for m in MegalodonModel(MegalodonConfig(**sizes)).modules() if hasattr(m, "theta"))
    turning = ComplexMovingAverage(512)
    others = [megalodon.alpha, megalodon.delta, megalodon.theta, megalodon.gamma, megalodon.omega]
    rows = [*zip((*average.arguments(), average.skip), theirs, strict=True)]
    rows += zip((*turning.arguments(), turning.skip), (x.squeeze() for x in others), strict=True)
    for ours, expected in rows:
        assert ours.shape == expected.shape
        close = {"rtol": 0.1, "atol": 0.1 * expected.std().item() + 0.05 * (ours.numel() < 1000)}
        torch.testing.assert_close(moments(ours), moments(expected), **close)
    assert (average.expansion[:, ::2] > 0.5).all() and (average.expansion[:, 1::2] < -0.5).all()
    assert not turning.projection[..., 1].any() and turning.skip.abs().max() <= 1.0
    torch.testing.assert_close(turning.phase_logit.sort()[0], megalodon.theta.flatten().sort()[0])
    assert not torch.equal(turning.phase_logit, turning.phase_logit.sort()[0])  # in random order
    assert ComplexMovingAverage(1).phase_logit.isfinite()


def test_initializations_of_s4d():
    """Gu et al. 2022, equations 8 and 9, and real states; the steps have uniform logarithms."""
    torch.manual_seed(0)
    number = torch.arange(16)
    for init, imaginary in (("lin", math.pi * number), ("inv", 32 / math.pi * (32 / (2 * number + 1) - 1))):
        layer = DiagonalSSM(300, 16, init=init)
        torch.testing.assert_close(layer.frequency, imaginary.float().expand(300, 16))
        torch.testing.assert_close(-layer.log_rate.exp(), torch.full((300, 16), -0.5))
    assert abs(torch.view_as_complex(layer.output_weight.detach()).std().item() - 1.0) < 0.05
    steps = layer.log_step.exp()
    assert 0.001 <= steps.min() < 0.0012 and 0.09 < steps.max() <= 0.1
    assert abs(layer.log_step.mean().item() - math.log(0.01)) < 0.2
    real = DiagonalSSM(3, 16, init="real", step=(0.1, 0.1))
    torch.testing.assert_close(real.log_rate.exp(), (number + 1.0).expand(3, 16))
    torch.testing.assert_close(real.log_step.exp(), torch.full((3,), 0.1))
    assert real.frequency is None and real.output_weight.shape == (3, 16)


def test_layers_of_the_meta_device_are_initialized_later():
    for make in (*LAYERS.values(), *BIDIRECTIONAL):
        with torch.device("meta"):
            layer = make()
            assert layer(torch.ones(2, T, D)).shape == (2, T, D)
        layer = layer.to_empty(device="cpu")
        layer.reset_parameters()
        assert all(weight.isfinite().all() for weight in layer.parameters())
