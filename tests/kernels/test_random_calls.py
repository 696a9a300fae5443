"""Random calls of all operators: first and second derivatives for some tensors, `vmap`, and programs."""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from luna_mega.kernels import api
from luna_mega.kernels.moving_average import native
from tests.kernels.calls import CALLS, ON_NATIVE, Sizes
from tests.kernels.comparisons import assert_same
from tests.random_cases import in_blocks, run_block

TOKENS = ("query", "context", "value", "x", "pack_key", "key")
CLOSE, SINGLE = {"rtol": 1e-6, "atol": 1e-8}, {"rtol": 1e-4, "atol": 1e-5}


class Member(NamedTuple):
    """A call: its tensors by name, and a function of these and of the backend."""

    name: str
    tensors: dict[str, torch.Tensor]
    run: Callable[..., tuple[torch.Tensor, ...]]

    @property
    def differentiable(self) -> list[str]:
        return [name for name, x in self.tensors.items() if x.is_floating_point() or x.is_complex()]


def draw(rng, varlen=True, coefficients=True, lengths=(1, 2, 5, 16, 17, 33, 65)) -> Member:
    """Return a random call, with or without a mask, states, lengths, bounds, coefficients and the last parameter."""
    name = rng.choice([name for name in CALLS if varlen or "padding_free" not in name])
    kind, fixed, length = CALLS[name].func.__name__, CALLS[name].keywords, rng.choice(lengths)
    sizes = Sizes(rng.choice((1, 2, 3)), length, rng.choice((1, 2)), 2, 3, rng.choice((2, 4)), rng.choice((1, 3)), 2, 5)
    step, options = "step" in fixed, {}
    free = not {"step", "padding_free", "row_offset", "directions", "truncation"} & fixed.keys()
    if free and kind in ("_average", "_norm", "_causal"):
        options["stateful"] = rng.random() < 0.7
    if "masked" in fixed and kind != "_luna":
        options["masked"] = False  # another mask follows
    call, tensors, stateful = CALLS[name](sizes, **options), {}, options.get("stateful", False)
    tensors |= call.leaves
    if rng.random() < 0.4:
        tensors = {key: x for key, x in tensors.items() if key not in ("skip", "bias"[: 4 * (kind == "_gated")])}
    if varlen and stateful and rng.random() < 0.3:
        counts = torch.tensor([rng.randrange(1, length + 1), *(rng.randrange(length + 1) for _ in range(sizes[0] - 1))])
        real = torch.arange(length) < counts[:, None]
        tensors = {key: x[real][None] if key in TOKENS else x for key, x in tensors.items()}
        tensors["cu_seqlens"] = torch.tensor([0, *counts]).cumsum(0)
    elif kind == "_average" and stateful and rng.random() < 0.3:
        tensors["lengths"] = torch.tensor([rng.randrange(length + 1) for _ in range(sizes.batch)])
        tensors["mask"] = torch.arange(length) < tensors["lengths"][:, None]
    elif kind != "_luna" and (free or step) and rng.random() < 0.6:
        tensors["mask"] = torch.rand(sizes.batch, *(() if step and kind != "_gated" else (length,))) < 0.7
    if coefficients and kind == "_average" and step and rng.random() < 0.5:
        parameters = {"phase": None} | {key: x for key, x in call.leaves.items() if key not in ("x", "state", "skip")}
        parameters = parameters if "diagonal" in name else {key: x for key, x in parameters.items() if x is not None}
        make = getattr(api, name.partition("_step")[0].removeprefix("damped_") + "_coefficients")
        tensors |= {f"coefficient {i}": x for i, x in enumerate(make(**parameters, dtype=torch.float64))}

    def run(backend="torch", **given):
        made = tuple(given.pop(key) for key in list(given) if key.startswith("coefficient"))
        return call.run(**given, **({"coefficients": made} if made else {}), backend=backend)

    return Member(name, tensors, run)


def choose_backend(rng, member, others=("torch",)) -> str:
    """Return a backend; the tensors become float32 if it is the C library."""
    if member.name not in ON_NATIVE or native.missing() is not None or rng.random() < 0.5:
        return rng.choice(others)
    member.tensors.update({key: x.float() for key, x in member.tensors.items() if x.dtype == torch.float64})
    return "native"


def number(outputs):
    """Return one number, which is not linear in the outputs that require a gradient."""
    outputs = [torch.view_as_real(x) if x.is_complex() else x for x in outputs if not x.dtype == torch.int64]
    return sum((x * torch.linspace(1, 9, x.numel(), dtype=x.dtype).cos().view(x.shape)).sin().sum() for x in outputs)


def gradients(result, leaves, **options):
    if not result.requires_grad:
        return tuple(map(torch.zeros_like, leaves))
    return torch.autograd.grad(result, leaves, allow_unused=True, materialize_grads=True, **options)


def some(rng, values):
    return [value for value in values if rng.random() < 0.4] or [rng.choice(values)]


def check_derivatives(seed):
    """The other tensors are data, such as the states of truncated backpropagation; some outputs are read."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    member, results = draw(rng, coefficients=False), []
    chosen, places = some(rng, member.differentiable), some(rng, range(3))
    exact, chosen_backend = dict(member.tensors), choose_backend(rng, member)
    for backend, given in ((chosen_backend, member.tensors), ("reference", exact)):
        tensors = {key: x.clone().requires_grad_(key in chosen) for key, x in given.items()}
        outputs, leaves = member.run(**tensors, backend=backend), [tensors[key] for key in chosen]
        read = [outputs[place] for place in places if place < len(outputs)] or outputs[:1]
        first = gradients(number(read), leaves, create_graph=True)
        second = gradients(sum(x.sin().sum() + x.square().sum() for x in first), leaves)
        results.append((*outputs, *first, *second, *[torch.tensor(float(x.requires_grad)) for x in outputs]))
    if chosen_backend == "native":
        assert_same(*([x.detach() for x in result] for result in results), 1e-4)
    else:
        torch.testing.assert_close(*results, **CLOSE)


@in_blocks(fast=50, slow=400)
def test_first_and_second_derivatives_of_some_tensors(first):
    run_block(check_derivatives, first)


def check_vmap(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    member, backend = draw(rng, varlen=False, lengths=(1, 2, 5, 17)), rng.choice(("torch", "torch", "reference"))
    names, count = list(member.tensors), 2
    dims = [rng.choice((0, None) if x.dim() < 2 else (0, 1, None)) for x in member.tensors.values()]
    dims[0] = dims[0] if any(dim is not None for dim in dims) else 0
    values = [
        x if dim is None else torch.stack((x, x.roll(1) if x.dtype != torch.float64 else 1.1 * x), dim)
        for x, dim in zip(member.tensors.values(), dims, strict=True)
    ]
    chosen = tuple(names.index(key) for key in some(rng, member.differentiable))
    if "lengths" in names:  # the mask drops the positions that follow
        place = names.index("mask")
        dims[place], values[place] = None, torch.zeros_like(member.tensors["mask"])

    def run(*given):
        return member.run(**dict(zip(names, given, strict=True)), backend=backend)

    def scalar(*given):
        return number(run(*given))

    def forward(*given):
        def of_chosen(*x):
            return scalar(*(x[chosen.index(i)] if i in chosen else y for i, y in enumerate(given)))

        rows = tuple(given[i] for i in chosen)
        return jvp(of_chosen, rows, tuple(x.cos() for x in rows))[1]

    function = rng.choice((run, run, grad(scalar, chosen), forward))
    rows = [[x if dim is None else x.select(dim, i) for x, dim in zip(values, dims, strict=True)] for i in range(count)]
    expected = torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *(function(*row) for row in rows))
    torch.testing.assert_close(vmap(function, tuple(dims))(*values), expected, **CLOSE)
    if seed % 3 == 0:
        torch.testing.assert_close(jacfwd(run, chosen)(*rows[0]), jacrev(run, chosen)(*rows[0]), **CLOSE)
    if seed % 9 == 0:
        twice = jacrev(grad(scalar, chosen), chosen)(*rows[0])
        torch.testing.assert_close(hessian(scalar, chosen)(*rows[0]), twice, **CLOSE)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # `unfold_backward` of PyTorch
@in_blocks(fast=25, slow=300)
def test_vmap_over_some_tensors(first):
    run_block(check_vmap, first)


class Program(torch.nn.Module):
    """A member whose `weights` are parameters, which have static sizes in a compiled module."""

    def __init__(self, member, backend, weights):
        super().__init__()
        self.backend = backend
        self.member, self.weights = member, torch.nn.ParameterDict({key: member.tensors[key] for key in weights})

    def forward(self, **inputs):
        return self.member.run(**self.weights, **inputs, backend=self.backend)


def check_program(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    member, results = draw(rng, lengths=(5, 17)), []
    backend = choose_backend(rng, member)
    program = Program(member, backend, [key for key in member.differentiable if rng.random() < 0.5])
    torch.compiler.reset()
    with torch.fx.experimental._config.patch(use_duck_shape=rng.random() < 0.5):
        compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=rng.choice(("eager", "aot_eager")))
        for run in (program, compiled):
            inputs = {key: x.clone() for key, x in member.tensors.items() if key not in program.weights}
            leaves = [x.requires_grad_() for key, x in inputs.items() if key in member.differentiable]
            outputs = run(**inputs)
            results.append((outputs, gradients(number(outputs), [*leaves, *program.parameters()])))
    torch.testing.assert_close(*results, **(SINGLE if backend == "native" else CLOSE))


@in_blocks(fast=0, slow=100, total=200)
def test_programs_with_symbolic_sizes(first):
    """The sizes of inputs are symbols, and those of parameters are constants."""
    run_block(check_program, first)
