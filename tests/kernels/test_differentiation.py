"""Every operator has the right derivatives in every way of PyTorch, for any of its tensors, and in programs."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from luna_mega.kernels import _mode, api
from tests.kernels.backends import needs_library, on_native, on_triton
from tests.kernels.calls import OPERATORS, WIDE
from tests.kernels.contract import Case, Inputs, cases
from tests.kernels.test_contract import ON_NATIVE, SIZES
from tests.marks import diagonal, slow_but

EACH = pytest.mark.parametrize("operator", OPERATORS)
FLOAT64, SINGLE = 1e-6, 1e-4
LENGTHS = (19, 2, 5)  # causal Luna attention computes at most 16 positions without an operator


class Member(NamedTuple):
    """A call: its tensors by name, the names of some that are differentiated, and a function of all."""

    tensors: dict[str, Tensor]
    chosen: list[str]
    call: Callable[..., tuple[Tensor, ...]]

    def number(self, *chosen: Tensor, **tensors: Tensor) -> Tensor:
        """Return one number, which is not linear in the outputs."""
        outputs = self.call(**self.tensors | dict(zip(self.chosen, chosen, strict=True)) | tensors)
        return number([x for x in outputs if x.is_floating_point()])

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(self.tensors[key] for key in self.chosen)

    @property
    def directions(self) -> tuple[Tensor, ...]:
        return tuple((3.0 * x).cos() for x in self.leaves)


def number(outputs: list[Tensor]) -> Tensor:
    weights = (torch.linspace(1, 9, x.numel(), dtype=x.dtype, device=x.device).cos().view(x.shape) for x in outputs)
    return sum((x * weight).sin().sum() for x, weight in zip(outputs, weights, strict=True))


def member(case: Case, backend="torch", dtype=torch.float64, device: Any = "cpu", given=False) -> Member:
    """Return a call whose masks, bounds, lengths, and perhaps coefficients, are tensors too; the seed chooses some."""
    inputs, rng = Inputs(case), random.Random(case.seed or 0)
    tensors, options = inputs.arguments("torch", **inputs.leaves)
    fixed = {key: x for key, x in options.items() if not torch.is_tensor(x)}
    tensors |= {key: x for key, x in options.items() if torch.is_tensor(x)}
    if given and case.is_average and case.is_step:
        tensors |= {f"coefficient {i}": x for i, x in enumerate(coefficients(case.operator, inputs.call.leaves))}
    wide = torch.promote_types(dtype, torch.float32)
    for key, x in tensors.items():
        tensors[key] = x.to(device, (wide if key in WIDE else dtype) if x.is_floating_point() else None)
    real = [key for key, x in tensors.items() if x.is_floating_point()]
    chosen = real if case.seed is None else some(rng, real)

    def call(**given: Tensor) -> tuple[Tensor, ...]:
        made = tuple(given.pop(key) for key in list(given) if key.startswith("coefficient"))
        return inputs.call.run(**given, **fixed, **({"coefficients": made} if made else {}), backend=backend)

    return Member(tensors, chosen, call)


def coefficients(operator: str, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the coefficients of steps for the leaves of a call."""
    parameters = {key: x for key, x in leaves.items() if key not in ("x", "state", "skip")}
    parameters |= {"phase": None} if "real" in operator else {}
    name = operator.partition("_step")[0].removeprefix("damped_")
    return getattr(api, f"{name}_coefficients")(**parameters, dtype=torch.float64)


def some(rng: random.Random, values: list) -> list:
    return [value for value in values if rng.random() < 0.4] or [rng.choice(values)]


def random_cases(operator: str, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> st.SearchStrategy[Case]:
    """Draw cases with one sequence and one position or more."""
    options = {"places": "contiguous", "decays": "trained", "garbage": False, "autocast": False} | options
    drawn = cases((operator,), lengths, **options)
    return drawn.filter(lambda case: case.sizes.batch and case.sizes.length)


def gradients(result: Tensor, leaves: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    if not result.requires_grad:
        return tuple(map(torch.zeros_like, leaves))
    return torch.autograd.grad(result, leaves, allow_unused=True, materialize_grads=True, **options)


def dot(first: Any, second: Any) -> Tensor:
    return sum((x * y).sum() for x, y in zip(first, second, strict=True))


def new(member: Member) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in member.leaves]


def places(member: Member) -> tuple[int, ...]:
    return tuple(range(len(member.chosen)))


def second(member):
    leaves = new(member)
    return gradients(dot(gradients(member.number(*leaves), leaves, create_graph=True), member.directions), leaves)


def second_of_each(member):
    """The gradient of one leaf at a time, with `inputs=`, as for a gradient penalty."""
    results = [torch.zeros_like(x) for x in member.leaves]
    for place, direction in zip(places(member), member.directions, strict=True):
        leaves = new(member)
        (first,) = gradients(member.number(*leaves), [leaves[place]], create_graph=True)
        found = gradients((first * direction).sum(), leaves)
        results = [x + y for x, y in zip(results, found, strict=True)]
    return results


def dual(member):
    with forward_ad.dual_level():
        result = member.number(*map(forward_ad.make_dual, member.leaves, member.directions))
        return [forward_ad.unpack_dual(result).tangent]


def products(member, rows=None):
    rows = hessian(member.number, places(member))(*member.leaves) if rows is None else rows
    return [
        sum(torch.tensordot(v, row[place], v.dim()) for v, row in zip(member.directions, rows, strict=True))
        for place in places(member)
    ]


def vectorized_products(member):
    return products(member, torch.autograd.functional.hessian(member.number, member.leaves, vectorize=True))


def batched(member):
    """The gradients of a batch of gradients, which PyTorch computes with the `vmap` before `torch.func`."""
    leaves = new(member)
    result, options = member.number(*leaves), {"allow_unused": True, "materialize_grads": True}
    if not result.requires_grad:
        return list(map(torch.zeros_like, leaves))
    rows = torch.autograd.grad(result, leaves, torch.ones(2).to(result), is_grads_batched=True, **options)
    assert not any(x.requires_grad for x in rows)
    return [x[1] for x in rows]


def of_two(member, function):
    results = vmap(function)(*(torch.stack((x, 2 * x)) for x in member.leaves))
    return [x[0] for x in (results if isinstance(results, tuple) else (results,))]


PLAIN = ("backward", "second", "second of each")
# Way -> (what it computes, function).
WAYS = {
    "backward": ("first", lambda m: gradients(m.number(*(leaves := new(m))), leaves)),
    "second": ("second", second),
    "second of each": ("second", second_of_each),
    "batched": ("first", batched),
    "vectorized hessian": ("second", vectorized_products),
    "grad": ("first", lambda m: grad(m.number, places(m))(*m.leaves)),
    "vjp": ("first", lambda m: vjp(m.number, *m.leaves)[1](torch.ones_like(m.leaves[0]).sum() / m.leaves[0].numel())),
    "jvp": ("slope", lambda m: [jvp(m.number, m.leaves, m.directions)[1]]),
    "jvp of grad": ("second", lambda m: jvp(grad(m.number, places(m)), m.leaves, m.directions)[1]),
    "grad of grad": (
        "second", lambda m: grad(lambda *x: dot(grad(m.number, places(m))(*x), m.directions), places(m))(*m.leaves),
    ),
    "jacrev": ("first", lambda m: jacrev(m.number, places(m))(*m.leaves)),
    "jacfwd": ("first", lambda m: jacfwd(m.number, places(m))(*m.leaves)),
    "hessian": ("second", products),
    "vmap": ("value", lambda m: of_two(m, m.number)),
    "vmap of grad": ("first", lambda m: of_two(m, grad(m.number, places(m)))),
    "forward_ad": ("slope", dual),
    "linearize": ("slope", lambda m: [linearize(m.number, *m.leaves)[1](*m.directions)]),
}  # fmt: skip


def check(case: Case, ways: Any, bound: float = FLOAT64, **options: Any) -> None:
    """Compare derivatives with those of the reference in float64, in any way that does not raise an error."""
    exact, actual = member(case, "reference"), member(case, **options)
    exact = exact._replace(tensors={key: x.cpu().double() if x.is_floating_point() else x.cpu()
                                    for key, x in actual.tensors.items()})  # fmt: skip
    leaves = new(exact)
    value = exact.number(*leaves)
    first = gradients(value, leaves, create_graph=True)
    slope = dot(first, exact.directions)
    right = {"value": [value], "first": first, "slope": [slope], "second": gradients(slope, leaves)}
    for way in ways:
        kind, compute = WAYS[way]
        try:
            found = compute(actual)
        except (RuntimeError, NotImplementedError):
            if _mode.HAS_NAMES or way in PLAIN:
                raise
            continue
        for x, y in zip(found, right[kind], strict=True):
            torch.testing.assert_close(
                x.cpu().double(), y, rtol=bound, atol=bound, msg=lambda text, way=way: f"{way}: {text}"
            )


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # `unfold_backward` of PyTorch
@EACH
@given(data=st.data())
@settings(max_examples=3)
def test_every_way(operator, data):
    check(data.draw(random_cases(operator)), WAYS, backend=data.draw(st.sampled_from(["torch", "reference"])))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("operator", ["gated_attention", "timestep_norm", "luna_pack", "damped_ema"])
def test_every_way_without_private_names(operator, monkeypatch):
    """Without the private names of PyTorch that find transforms, no way has a wrong result."""
    monkeypatch.setattr(_mode, "HAS_NAMES", False)
    case = Case(operator, sizes=SIZES, layout="mask", stateful=OPERATORS[operator].stateful)
    check(case, WAYS)
    check(case, ["jvp"], backend="reference")


@needs_library
@pytest.mark.parametrize("operator", ON_NATIVE)
@given(data=st.data())
@settings(max_examples=4)
def test_averages_in_float32(operator, data):
    """The automatic choice computes derivatives of every kind: transforms use PyTorch, the others the C library."""
    case = data.draw(random_cases(operator).filter(lambda case: not case.options.get("truncation")))
    way = data.draw(st.sampled_from(list(WAYS)))
    check(case, {*PLAIN, way}, SINGLE, dtype=torch.float32, backend="auto")


PAIRS = [pair for pair in diagonal(OPERATORS, PLAIN[1:]) if "unpack" not in pair[0]]


@pytest.mark.triton
@pytest.mark.parametrize(("operator", "way"), slow_but([*PAIRS[:7], PAIRS[14]], PAIRS))
def test_second_derivatives_of_triton(operator, way, triton_device):
    case = Case(operator, sizes=SIZES._replace(batch=1, length=9), stateful=OPERATORS[operator].stateful)
    check(case, [way], 1e-3, dtype=torch.float32, backend="triton", device=triton_device)


@pytest.mark.triton
@pytest.mark.parametrize("operator", ["luna_causal_attention_step", "luna_unpack", "gated_attention", *ON_NATIVE[1:3]])
def test_second_derivatives_that_triton_does_not_compute(operator, triton_device):
    layout, lengths, given, kind = "varlen", (2, 1), {}, "of varlen calls"
    if "causal" in operator:
        layout, lengths, given, kind = "dense", (), {"dropout": 0.1}, "with dropout"
    case = Case(operator, sizes=SIZES._replace(length=2), layout=layout, lengths=lengths)
    made = member(case, "triton", torch.float32, triton_device)
    leaves = new(made)
    with pytest.raises(RuntimeError, match=f"the gradient {kind}.* cannot be differentiated again"):
        gradients(made.number(*leaves, **given), leaves, create_graph=True)


@pytest.mark.parametrize(("backend", "operator"), [on_native("complex_ema_step"), on_triton("luna_unpack", slow=False)])
def test_transforms_run_pytorch(backend, operator, triton_device):
    made = member(Case(operator, sizes=SIZES), backend, torch.float32, triton_device)
    with pytest.raises(ValueError, match=f"{operator} cannot run on '{backend}': transforms of torch.func.*'torch'"):
        grad(made.number)(*made.leaves)


D = torch.float64
PARAMETERS = [torch.linspace(-2.0, 1.0, 8, dtype=D).roll(k).view(4, 2).requires_grad_() for k in range(4)]
PAIR = torch.linspace(-1.0, 1.0, 16, dtype=D).view(4, 2, 2).requires_grad_()
COEFFICIENTS = {
    "ema_coefficients": PARAMETERS,
    "complex_ema_coefficients": [*PARAMETERS[:2], PARAMETERS[2][:, 0].detach().requires_grad_(), PAIR],
    "diagonal_ssm_coefficients": [(-PARAMETERS[0].exp()).detach().requires_grad_(), PARAMETERS[1], PAIR],
    "discretize": [
        torch.complex(-PARAMETERS[0].exp(), PARAMETERS[1]).detach().requires_grad_(),
        PARAMETERS[2][:, 0].exp().detach().requires_grad_(), torch.view_as_complex(PAIR).detach().requires_grad_(),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_coefficients(name):
    function, leaves = getattr(api, name), COEFFICIENTS[name]
    options = {} if name == "discretize" else {"dtype": D}

    def run(*leaves: Tensor) -> Tensor:
        outputs = [x for x in function(*leaves, **options) if x is not None]
        return number([torch.view_as_real(x) if x.is_complex() else x for x in outputs])

    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, leaves)


def trained(made: Member, tensors: dict[str, Tensor]) -> list[tuple]:
    """Return the shapes and dtypes of the outputs of a call, and of the gradients of some of its tensors."""
    tensors = {key: x.requires_grad_(key in made.chosen) for key, x in tensors.items()}
    outputs = made.call(**tensors)
    used = [x for x in outputs if x.is_floating_point() and x.requires_grad]
    found = gradients(sum(x.sum() for x in used), [tensors[key] for key in made.chosen])
    return [(x.shape, x.dtype) for x in (*outputs, *found)]


@EACH
@given(data=st.data())
@settings(max_examples=3)
def test_without_values(operator, data):
    """Under `FakeTensorMode` and for meta tensors, the results have their shapes and dtypes."""
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    case = data.draw(random_cases(operator))
    made = member(replace(case, seed=2 * (case.seed or 0) + 1), dtype=dtype)  # has `max_seqlen`
    mode = FakeTensorMode()
    kinds = [lambda x: x, mode.from_tensor, lambda x: x.to("meta")]
    plain, fakes, metas = ({key: made_of(x.detach()) for key, x in made.tensors.items()} for made_of in kinds)
    expected = trained(made, plain)
    with mode:
        assert trained(made, fakes) == expected
    assert trained(made, metas) == expected


def other(name: str, x: Tensor) -> Tensor:
    """Return another value of a tensor: sequences in reverse order, other places of a mask, other numbers."""
    if name == "cu_seqlens":
        return x[-1] - x.flip(0)
    return 1.1 * x if x.is_floating_point() else x.roll(1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@EACH
@given(data=st.data())
@settings(max_examples=4)
def test_vmap_over_some_tensors(operator, data):
    """`vmap` over any dimension of any tensors: masks, counts, lengths, `cu_seqlens` and coefficients too."""
    case = data.draw(random_cases(operator, (2, 1, 5, 17)))
    case = replace(case, seed=2 * (case.seed or 0) + 1) if case.layout == "varlen" else case  # has `max_seqlen`
    rng, backend = random.Random(case.seed or 0), data.draw(st.sampled_from(["torch", "torch", "reference"]))
    made = member(case, backend, given=data.draw(st.booleans()))
    dims = [rng.choice((0, None) if x.dim() < 2 else (0, 1, None)) for x in made.tensors.values()]
    if "lengths" in made.tensors:  # the mask drops the positions that follow
        made.tensors["mask"] = torch.zeros_like(made.tensors["mask"])
        dims[list(made.tensors).index("mask")] = None
    dims[0] = dims[0] if any(dim is not None for dim in dims) else 0
    check_vmap(made, dims)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("operator", ON_NATIVE[:4])
def test_vmap_over_bounds_of_states(operator):
    case = Case(operator, sizes=SIZES, layout="varlen", lengths=(17, 5), stateful=True, seed=1)
    made = member(case)
    check_vmap(made, [0 if name == "cu_seqlens" else None for name in made.tensors])


def check_vmap(made: Member, dims: list[int | None]) -> None:
    names = list(made.tensors)
    values = [
        x if dim is None else torch.stack((x, other(name, x)), dim)
        for (name, x), dim in zip(made.tensors.items(), dims, strict=True)
    ]
    rows = [[x if dim is None else x.select(dim, i) for x, dim in zip(values, dims, strict=True)] for i in range(2)]
    chosen = tuple(map(names.index, made.chosen))

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        return made.call(**dict(zip(names, given, strict=True)))

    def scalar(*given: Tensor) -> Tensor:
        return number([x for x in run(*given) if x.is_floating_point()])

    for function in (run, grad(scalar, chosen)):
        expected = [torch.stack(x) for x in zip(*(function(*row) for row in rows), strict=True)]
        torch.testing.assert_close(list(vmap(function, tuple(dims))(*values)), expected, rtol=FLOAT64, atol=1e-8)


class Program(torch.nn.Module):
    """A member whose `weights` are parameters, which have static sizes in a compiled module."""

    def __init__(self, made: Member, weights: list[str]):
        super().__init__()
        self.call, self.weights = made.call, torch.nn.ParameterDict({key: made.tensors[key] for key in weights})

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        return self.call(**self.weights, **inputs)


@EACH
@given(data=st.data())
@settings(max_examples=2)
def test_programs_with_symbolic_sizes(operator, data):
    """Compare a program with eager calls: the sizes of inputs are symbols, and those of parameters are constants."""
    case = data.draw(random_cases(operator, (5, 17)))
    # Programs of Luna attention and truncation need `max_seqlen`, which the cases of odd seeds have.
    needed = "luna" in operator or case.options.get("truncation")
    case = replace(case, seed=2 * (case.seed or 0) + 1) if needed else case
    backend, results = data.draw(st.sampled_from(["torch", "auto"])), []
    made = member(case, backend, torch.float32 if backend == "auto" else D)
    weights = [key for key in made.chosen if data.draw(st.booleans())]
    program = Program(made, weights)
    torch.compiler.reset()
    with torch.fx.experimental._config.patch(use_duck_shape=data.draw(st.booleans())):
        mode = data.draw(st.sampled_from(["eager", "aot_eager"]))
        for run in (program, torch.compile(program, fullgraph=True, dynamic=True, backend=mode)):
            inputs = {key: x.clone() for key, x in made.tensors.items() if key not in weights}
            leaves = [x.requires_grad_() for key, x in inputs.items() if x.is_floating_point()]
            outputs = run(**inputs)
            total = number([x for x in outputs if x.is_floating_point()])
            results.append([*outputs, *gradients(total, [*leaves, *program.parameters()])])
    bounds = {"rtol": SINGLE, "atol": 1e-5} if backend == "auto" else {"rtol": FLOAT64, "atol": 1e-8}
    torch.testing.assert_close(*results, **bounds)
