"""Every operator has the right derivatives in every way of PyTorch, or raises an error that names what to use."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from luna_mega.kernels import _export, api
from tests.kernels.backends import graded, on_native, on_triton
from tests.kernels.calls import CALLS as TABLE, GPU_CALLS, ON_NATIVE, Sizes
from tests.marks import diagonal

STEP = 1e-6
# More positions than those that causal Luna attention computes without an operator.
SIZES = Sizes(1, 19, 2, 2, 3, 4, 2, 2, 2)
NAMES = [
    "luna_attention masked, tied", "luna_causal_attention masked, stateful", "luna_causal_attention rows=40, elu",
    "gated_attention masked", "diagonal_ssm directions=2, masked", *(name for name in TABLE if "_step" in name),
    *(name for name in TABLE if name not in GPU_CALLS and "_step" not in name),
]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def of_table(name: str) -> tuple[Callable, tuple[torch.Tensor, ...]]:
    call = TABLE[name](SIZES)
    return lambda *x, **o: call.run(**dict(zip(call.leaves, x, strict=True)), **o), tuple(call.leaves.values())


PARAMETERS, COMPLEX = [normal(4, 2, seed=seed) for seed in range(4)], (normal(4, 2), normal(4, 2, seed=1), normal(4))
DIAGONAL = -normal(4, 2).exp() / 4, normal(4, 2, seed=1), normal(4, 2, 2)
# Operator and options -> (function of the leaves, leaves).
CALLS: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {name: of_table(name) for name in NAMES} | {
    "diagonal_ssm, complex numbers": (
        lambda x, a, b, c, *p, **o: api.diagonal_ssm(
            x, *api.discretize(torch.complex(a, b), c[:, 0].exp(), torch.complex(a, c)), *p, **o
        ),
        (normal(1, 19, 4), DIAGONAL[0], *(normal(4, 2, seed=seed) for seed in (1, 2)), normal(4)),
    ),
    "ema_coefficients": (partial(api.ema_coefficients, dtype=torch.float64), tuple(PARAMETERS)),
    "diagonal_ssm_coefficients": (partial(api.diagonal_ssm_coefficients, dtype=torch.float64), DIAGONAL),
    "complex_ema_coefficients": (
        partial(api.complex_ema_coefficients, dtype=torch.float64), (*COMPLEX, normal(4, 2, 2)),
    ),
}  # fmt: skip

# Each formula of derivatives.
FAST = [
    "luna_attention masked, tied", "luna_causal_attention masked, stateful", "gated_attention masked",
    "damped_ema directions=2, shifted", "damped_ema truncated", "complex_ema masked, stateful", "diagonal_ssm real",
    "timestep_norm masked, stateful", *(name for name in CALLS if "_step" in name or "coefficients" in name),
]  # fmt: skip


def scalar(name: str, **options) -> Callable[..., torch.Tensor]:
    """Return a call as a function with one number as its result."""
    function = CALLS[name][0]

    def run(*leaves):
        outputs = function(*leaves, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum(
            (x * torch.linspace(1, 9, x.numel(), dtype=x.dtype, device=x.device).cos().view(x.shape)).sum()
            for x in outputs
        )

    return run


def gradients(run, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    return torch.autograd.grad(run(*leaves), leaves, allow_unused=True, materialize_grads=True)


def dot(first, second):
    return sum((x * y).sum() for x, y in zip(first, second, strict=True))


class Case:
    """A call with its gradients, and with those of the derivative in a direction, by differences of float64 results."""

    def __init__(self, name: str):
        self.run, self.leaves = scalar(name), CALLS[name][1]
        self.places = tuple(range(len(self.leaves)))
        self.directions = tuple(normal(*x.shape, seed=9) for x in self.leaves)
        self.first = gradients(
            scalar(name, **({} if "coefficients" in name else {"backend": "reference"})), self.leaves
        )
        above, below = (
            gradients(self.run, [x + sign * STEP * v for x, v in zip(self.leaves, self.directions, strict=True)])
            for sign in (1, -1)
        )
        self.second = [(x - y) / (2 * STEP) for x, y in zip(above, below, strict=True)]

    def new(self):
        return [x.clone().requires_grad_() for x in self.leaves]


def backward(case):
    leaves = case.new()
    case.run(*leaves).backward()
    return [x.grad for x in leaves], case.first


def second(case):
    leaves = case.new()
    first = torch.autograd.grad(case.run(*leaves), leaves, create_graph=True)
    derivative = dot(first, case.directions)
    return torch.autograd.grad(derivative, leaves, allow_unused=True, materialize_grads=True), case.second


def second_of_each(case):
    """The gradient of one leaf at a time, with `inputs=`, as for a gradient penalty."""
    results = [torch.zeros_like(x) for x in case.leaves]
    for place, direction in zip(case.places, case.directions, strict=True):
        leaves = case.new()
        (first,) = torch.autograd.grad(case.run(*leaves), leaves[place], create_graph=True)
        if first.requires_grad:  # not if the call is linear in the leaf and depends on no other one
            derivative = (first * direction).sum()
            found = torch.autograd.grad(derivative, leaves, allow_unused=True, materialize_grads=True)
            results = [x + y for x, y in zip(results, found, strict=True)]
    return results, case.second


def second_backward(case):
    leaves = case.new()
    case.run(*leaves).backward(create_graph=True)
    first = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    dot(first, case.directions).backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves], case.second


def dual(case):
    with forward_ad.dual_level():
        pairs = zip(case.leaves, case.directions, strict=True)
        result = forward_ad.unpack_dual(case.run(*(forward_ad.make_dual(*pair) for pair in pairs)))
    return [result.tangent], [dot(case.first, case.directions)]


def hessian(case):
    rows = torch.func.hessian(case.run, case.places)(*case.leaves)
    products = [
        sum(torch.tensordot(v, row[place], v.dim()) for v, row in zip(case.directions, rows, strict=True))
        for place in case.places
    ]
    return products, case.second


def batches(case, function):
    stacked = [torch.stack((x, 2 * x)) for x in case.leaves]
    results = torch.func.vmap(function)(*stacked)
    return [x[0] for x in (results if isinstance(results, tuple) else (results,))]


WAYS = {
    "backward": backward,
    "second": second,
    "second of each": second_of_each,
    "second backward": second_backward,
    "grad": lambda c: (torch.func.grad(c.run, c.places)(*c.leaves), c.first),
    "vjp": lambda c: (torch.func.vjp(c.run, *c.leaves)[1](torch.ones((), dtype=torch.float64)), c.first),
    "jvp": lambda c: ([torch.func.jvp(c.run, c.leaves, c.directions)[1]], [dot(c.first, c.directions)]),
    "jvp of grad": lambda c: (
        torch.func.jvp(torch.func.grad(c.run, c.places), c.leaves, c.directions)[1], c.second,
    ),
    "grad of grad": lambda c: (
        torch.func.grad(lambda *x: dot(torch.func.grad(c.run, c.places)(*x), c.directions), c.places)(*c.leaves),
        c.second,
    ),
    "jacrev": lambda c: (torch.func.jacrev(c.run, c.places)(*c.leaves), c.first),
    "jacfwd": lambda c: (torch.func.jacfwd(c.run, c.places)(*c.leaves), c.first),
    "hessian": hessian,
    "vmap": lambda c: (batches(c, c.run), [c.run(*c.leaves)]),
    "vmap of grad": lambda c: (batches(c, torch.func.grad(c.run, c.places)), c.first),
    "forward_ad": dual,
}  # fmt: skip


@pytest.mark.parametrize("name", graded(FAST, [], CALLS))
def test_every_way(name):
    case = Case(name)
    for way, compute in WAYS.items():
        for actual, expected in zip(*compute(case), strict=True):
            torch.testing.assert_close(
                actual, expected, rtol=1e-5, atol=1e-6, msg=lambda text, way=way: f"{way}: {text}"
            )


@pytest.mark.parametrize(
    "name",
    graded([NAMES[3], "timestep_norm masked, stateful", "luna_pack masked", "damped_ema masked, stateful"], [], CALLS),
)
def test_without_private_names(name, monkeypatch):
    """Without the private names of PyTorch that find transforms, no way has a wrong result."""
    case = Case(name)
    monkeypatch.setattr(_export, "HAS_NAMES", False)
    for way, compute in WAYS.items():
        try:
            results = compute(case)
        except (RuntimeError, NotImplementedError):
            assert way not in ("backward", "second", "second of each", "second backward")
            continue
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(
                actual, expected, rtol=1e-5, atol=1e-6, msg=lambda text, way=way: f"{way}: {text}"
            )
    if "coefficients" not in name:
        case.run = scalar(name, backend="reference")
        for actual, expected in zip(*WAYS["jvp"](case), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def shapes(name, leaves):
    """Return shapes and dtypes of the outputs and gradients of a call."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    outputs = CALLS[name][0](*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = torch.autograd.grad([x.sum() for x in outputs if x.requires_grad], leaves)
    return [(x.shape, x.dtype) for x in (*outputs, *found)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", graded(FAST, [], CALLS))
def test_without_values(name, dtype):
    """Under `FakeTensorMode` and for meta tensors, the results have their shapes and dtypes."""
    leaves = [x.to(dtype) for x in CALLS[name][1]]
    expected = shapes(name, leaves)
    with FakeTensorMode() as mode:
        assert shapes(name, [mode.from_tensor(x) for x in leaves]) == expected
    assert shapes(name, [x.to("meta") for x in leaves]) == expected


TRITON = [name for name in CALLS if not name.endswith(("coefficients", "truncated"))]
PAIRS = diagonal(TRITON, ("second", "second of each", "second backward"))


def check_derivative(name, way, backend, device, bound):
    case = Case(name)
    case.run, case.leaves = scalar(name, backend=backend), tuple(x.float().to(device) for x in case.leaves)
    case.directions = tuple(x.float().to(device) for x in case.directions)
    for actual, expected in zip(*WAYS[way](case), strict=True):
        torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=bound, atol=bound)


@pytest.mark.triton
@pytest.mark.parametrize(("name", "way"), graded(PAIRS[3:6], PAIRS[::4], PAIRS))
def test_second_derivatives_of_triton(name, way, triton_device):
    check_derivative(name, way, "triton", triton_device, 1e-3)


AVERAGES = [name for name in CALLS if name in ON_NATIVE]


@pytest.mark.parametrize(
    ("name", "way"), [*diagonal(AVERAGES, WAYS), *diagonal(AVERAGES, ["second backward", "second", "second of each"])]
)
def test_averages_in_float32(name, way):
    """The automatic choice computes derivatives of every kind: transforms use PyTorch, the others the C library."""
    check_derivative(name, way, "auto", "cpu", 1e-4)


@pytest.mark.parametrize(("backend", "name"), [on_native("complex_ema_step"), on_triton("luna_unpack", slow=False)])
def test_transforms_run_pytorch(backend, name, triton_device):
    leaves = [x.float().to(triton_device) for x in CALLS[name][1]]
    op = name.partition(" ")[0]
    with pytest.raises(ValueError, match=f"{op} cannot run on '{backend}': transforms of torch.func.*choose 'torch'"):
        torch.func.grad(scalar(name, backend=backend))(*leaves)


@pytest.mark.parametrize("name", ["gated_attention masked", "luna_causal_attention masked, stateful"])
def test_dropout_is_drawn_again(name):
    """With `create_graph=True`, the backward pass uses the dropout mask of the forward pass."""
    run, leaves, found = scalar(name, dropout=0.3), CALLS[name][1], []
    for create_graph in (False, True):
        torch.manual_seed(0)
        leaves = [x.clone().requires_grad_() for x in leaves]
        found.append(torch.autograd.grad(run(*leaves), leaves, create_graph=create_graph))
    for actual, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(actual, expected)
