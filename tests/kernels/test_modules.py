"""Layers of `kernels.modules`: results of their ops, states, steps, copies, dtypes and initializations."""

import copy
import io
import math
import pickle
import random
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

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
    """Outputs, states and gradients of all parameters are equal."""
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
        assert_same(steps(layer, x), results[0][:2])


def steps(layer, x, coefficients=None):
    state, outputs = None, []
    for t in range(x.shape[1]):
        output, state = layer.step(x[:, t], state, coefficients=coefficients)
        outputs.append(output)
    return torch.stack(outputs, 1), state


def change_with_an_optimizer(layer, draw):
    kind = draw.choice([torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
    variant = draw.choice(["fused", "foreach"])
    with torch.enable_grad():
        layer(torch.ones(1, 3, D, dtype=next(layer.parameters()).dtype)).sum().backward()
    kind(layer.parameters(), 0.1, **{variant: True}).step()


def change_data(layer, draw):
    for weight in layer.parameters():
        if draw.random() < 0.5:
            weight.data.mul_(0.5)
        else:
            weight.data = 0.5 * weight.data


def change_as_a_vector(layer, draw):
    vector_to_parameters(0.9 * parameters_to_vector(layer.parameters()), layer.parameters())


def swap(layer, draw):
    for weight in layer.parameters():
        torch.utils.swap_tensors(weight, torch.nn.Parameter(0.8 * weight))


def load(layer, draw):
    layer.load_state_dict({name: 0.5 * x for name, x in layer.state_dict().items()}, assign=draw.random() < 0.5)


def load_averages(layer, draw):
    average = torch.optim.swa_utils.AveragedModel(layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    change_data(layer, draw)
    for _ in range(2):
        average.update_parameters(layer)
    layer.load_state_dict(average.module.state_dict())


def choose(layer, draw):
    """Return the name of a matrix that no parametrization computes."""
    names = ["projection" if hasattr(layer, "projection") else "output_weight"]
    names += [name for name in ("input_logit", "log_rate") if hasattr(layer, name)]
    return draw.choice([name for name in names if not parametrize.is_parametrized(layer, name)] or [None])


def prune_weight(layer, draw):
    """Prune for the first time or again, or make the result of pruning permanent."""
    name = choose(layer, draw)
    pruned = name is not None and hasattr(layer, f"{name}_mask")
    if pruned and draw.random() < 0.3:
        prune.remove(layer, name)
    elif pruned or name in layer._parameters:
        prune.random_unstructured(layer, name, amount=0.3)


def normalize(layer, draw):
    name = choose(layer, draw)
    if name in layer._parameters:
        old = torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm
        new = torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.parametrizations.spectral_norm
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            draw.choice([*old, *new])(layer, name)
    layer.eval()  # in training mode, every call of a spectral norm changes the weight


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((), 1.5))

    def forward(self, weight):
        return self.scale * weight


def scale(layer, draw):
    name = choose(layer, draw)
    if name in layer._parameters:
        parametrize.register_parametrization(layer, name, Scaled())


def adapt_in_a_hook(layer, draw):
    """Compute a weight before every call, as adapters of low rank do."""
    name = choose(layer, draw)
    if name in layer._parameters:
        base = layer._parameters.pop(name)
        layer.register_parameter(f"{name}_base", base)
        layer.register_parameter(f"{name}_row", torch.nn.Parameter(0.1 * torch.randn(base.shape[1:])))
        with_kwargs = draw.random() < 0.5

        def hook(module, *_):
            setattr(module, name, getattr(module, f"{name}_base") + getattr(module, f"{name}_row"))

        layer.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
        setattr(layer, name, base.detach())  # of before


def convert(layer, draw):
    layer.to(draw.choice([torch.float64, torch.bfloat16])).float()


CHANGES = [
    change_with_an_optimizer, change_data, change_as_a_vector, swap, load, load_averages, prune_weight, normalize,
    scale, adapt_in_a_hook, convert,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_steps_have_the_current_weights(layer, x, seed):
    """Random changes of the weights, each after steps with the earlier weights."""
    draw, x = random.Random(f"{seed}, {layer}"), x[:, :5]
    for change in draw.sample(CHANGES, 4):
        with torch.no_grad():
            steps(layer, x)
            layer.step_coefficients()
            change(layer, draw)
        check_steps(layer, x, given=draw.random() < 0.5, enabled=draw.random() < 0.3)


def check_steps(layer, x, given, enabled):
    # Steps first: a call would run the hooks that compute weights.
    with torch.set_grad_enabled(enabled):
        actual = steps(layer, x, layer.step_coefficients() if given else None)
        assert_same(actual, layer(x, return_state=True), 1e-5)


class Steps(torch.nn.Module):
    def __init__(self, layer, given):
        super().__init__()
        self.layer, self.given = layer, given

    def forward(self, x):
        return steps(self.layer, x, self.layer.step_coefficients() if self.given else None)


@pytest.mark.parametrize("given", [False, True])
def test_steps_of_functional_weights(layer, x, given):
    run, expected = Steps(layer, given), layer(x[:, :5], return_state=True)
    steps(layer, x[:, :5])
    weights = {name: 0.8 * weight for name, weight in layer.named_parameters()}
    actual = torch.func.functional_call(run, {f"layer.{name}": x for name, x in weights.items()}, (x[:, :5],))
    assert_same(actual, torch.func.functional_call(layer, weights, (x[:, :5],), {"return_state": True}), 1e-5)
    assert_same(run(x[:, :5]), expected, 1e-5)


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
                layer.load_state_dict(
                    {name: 0.5 * w if name != "skip" else w for name, w in layer.state_dict().items()}
                )
        assert_same(steps(layer, x, made), expected, 1e-5)
        wrong = type(layer)(D, N + 1, **({"init": "real"} if getattr(layer, "frequency", 1) is None else {}))
        for given in (
            wrong.step_coefficients(),
            made[:2],
            [of[:1] for of in made],
            layer.step_coefficients(torch.float64),
        ):
            with pytest.raises(ValueError, match=r"needs three `coefficients` of torch.float32 \[6, 4"):
                layer.step(x[:, 0], expected[1], coefficients=given)
        with pytest.raises(ValueError, match="needs three `coefficients` of torch.float64"):
            layer.step(x[:, 0].double(), expected[1].double(), coefficients=made)
        wide = layer.step(x[:, 0].double(), coefficients=layer.step_coefficients(torch.float64))
        assert_same(wide, layer.step(x[:, 0].double()), 1e-9)


def test_copies(layer, x):
    with torch.no_grad():
        state = layer.step(x[:, 0])[1]
        expected = layer.step(x[:, 1], state)
        stored = io.BytesIO()
        torch.save(layer, stored)
        stored.seek(0)
        other = type(layer)(D, N)
        copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(stored, weights_only=False)
        for layer_ in copies:
            assert_same(layer_.step(x[:, 1], state), expected, 0.0)
            next(layer_.parameters()).zero_()
        assert_same(layer.step(x[:, 1], state), expected, 0.0)
    assert layer.state_dict().keys() == dict(layer.named_parameters()).keys()
    if other.state_dict().keys() == layer.state_dict().keys():
        assert repr(other) == repr(layer) == f"{type(layer).__name__}({D}, states={N})"


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
    assert repr(layer).endswith("bidirectional=True)")
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
        load(layer, random.Random(0))
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


@pytest.mark.parametrize("surrounding", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
@pytest.mark.parametrize("make", [*LAYERS.values(), *BIDIRECTIONAL])
def test_layers_without_values(make, surrounding):
    """Construction, calls and steps read no values."""
    with surrounding():
        layer, x, bounds = make(), torch.ones(2, T, D), torch.tensor([0, 3, T])
        options = {} if layer.bidirectional else {"return_state": True}
        results = layer(x, mask=x[..., 0] > 0, **options), layer(x[:1], cu_seqlens=bounds, max_seqlen=T, **options)
        if options:
            results += layer.step(x[:, 0], results[0][1]), layer(x[:1], results[1][1], cu_seqlens=bounds, max_seqlen=T)
        sum(y.sum() for y in torch.utils._pytree.tree_leaves(results)).backward()
    shapes = [tuple(y.shape) for y in torch.utils._pytree.tree_leaves(results)]
    assert shapes.count((1, T, D)) == 1 + bool(options) and shapes[0] == (2, T, D)
    assert all(weight.grad.shape == weight.shape for weight in layer.parameters())


def test_layers_of_the_meta_device_are_initialized_later():
    for make in LAYERS.values():
        with torch.device("meta"):
            layer = make()
        layer = layer.to_empty(device="cpu")
        layer.reset_parameters()
        assert all(weight.isfinite().all() for weight in layer.parameters())
