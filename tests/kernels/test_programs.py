"""Operators in programs: they return the metadata of their fakes, and are exported and compiled."""

import importlib.util
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega.kernels import _mode, api
from tests.kernels.backends import TRITON, on_native, on_triton, shrink_blocks
from tests.kernels.calls import OPERATORS, Sizes, calls
from tests.kernels.contract import Case, Inputs, results
from tests.kernels.test_contract import matrix


def first_of_each_layout(backend: str) -> dict[str, Case]:
    """Return the first case of each operator and layout of the contract in float32, with views of heads first."""
    found: dict[str, Case] = {}
    for row in matrix(backend):
        (case,) = row.values
        changed = replace(case, dtype=torch.float32, places="heads", garbage=False)
        found.setdefault(f"{case.operator}, {case.layout}", changed)
    return found


CASES = {backend: first_of_each_layout(backend) for backend in ("torch", "native", "triton")}


def described(x):
    """Return the metadata that a compiler relies on; strides of dimensions of size 1 are omitted."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]
    return x.dtype, x.shape, strides, x.storage_offset()


def storages(tensors):
    leaves = torch.utils._pytree.tree_leaves(tensors)
    return {x.untyped_storage().data_ptr() for x in leaves if torch.is_tensor(x) and x.numel()}


class Promises(TorchDispatchMode):
    """Compare the results of this package's operators with their fakes; no result may be a view of an argument."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        results = operator(*arguments, **(options or {}))
        if operator.namespace == "luna_mega":
            with FakeTensorMode() as mode:
                fakes = operator(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments))
            for number, pair in enumerate(zip(*map(torch.utils._pytree.tree_leaves, (results, fakes)), strict=True)):
                result, promise = map(described, pair)
                assert result == promise, f"{operator}, result {number}: {result} is promised as {promise}"
            places = [storages(tensors) for tensors in (results, arguments)]
            assert places[0].isdisjoint(places[1]), f"{operator} returns a view of an argument"
        return results


def trained(case: Case, backend: str, device: torch.device):
    """Return a function that returns the outputs and gradients of a case with dropout."""
    inputs = Inputs(case)
    leaves = inputs.given(case.dtype, device)
    dropout = {"dropout": 0.1} if "luna" in case.operator or "gated" in case.operator else {}

    def run(**tensors):
        tensors, options = inputs.arguments(backend, **tensors)
        return inputs.call.run(**tensors, **options, **dropout, backend=backend)

    def train():
        torch.manual_seed(0)
        return results(inputs, run, leaves)

    return train, partial(torch.no_grad()(run), **leaves)


@pytest.mark.parametrize(
    ("backend", "name"),
    [("torch", name) for name in CASES["torch"]]
    + [on_native(name) for name in CASES["native"]]
    + [on_triton(name, slow="norm_step" not in name) for name in CASES["triton"]],
)
def test_results_are_what_the_fakes_promise(triton_device, monkeypatch, backend, name):
    """The strides too, because Inductor relies on them."""
    shrink_blocks(monkeypatch, "small", backend == "triton")
    device = triton_device if backend == "triton" else torch.device("cpu")
    train, infer = trained(CASES[backend][name], backend, device)
    expected = train()
    with Promises():
        assert all(map(torch.equal, train(), expected)), "a call under a mode has other results"
        infer()  # also calls operators that have no gradients


class Program(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, leaves):
        return self.call.run(**leaves)


def exported(operator, length, options):
    """Return a call and its tensors: with a state if it has no options, and a mask if there can be one."""
    row = OPERATORS[operator]
    stateful = {"stateful": True} if row.stateful and not options else {}
    call = row.make(Sizes(2, length, 2, 8, 5, 8, 4, 2, 24), **options, **stateful)
    leaves = {key: x.float() for key, x in call.leaves.items()}
    leaves |= {"mask": (torch.arange(length) != 1).expand(2, -1)} if "mask" in row.layouts else {}
    if "gated" in operator and not options.get("chunk"):
        leaves["bias"] = torch.linspace(-1.0, 1.0, 199)
    return call, leaves


UNPACK, GATED = ("luna_unpack", {}), ("gated_attention", {"function": "laplace", "chunk": 8, "causal": True})
# Operators with the first and the last of their options.
EXPORTED = [
    (name, {key: values[-1] for key, values in row.choices.items()} if last else {})
    for name, row in OPERATORS.items() for last in (False, True) if "_step" not in name and "other keys" not in name
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "options"), [UNPACK, GATED, *(pytest.param(*row, marks=pytest.mark.slow) for row in EXPORTED)]
)
def test_export(operator, options):
    """One exported program without custom operators supports lengths below a chunk and between multiples of it."""
    (call, leaves), length = exported(operator, 40, options), torch.export.Dim("length", min=2, max=99)
    program = Program(call)
    dynamic = {key: {1: length} if x.dim() > 1 and x.shape[1] == 40 else None for key, x in leaves.items()}
    made = torch.export.export(program, (leaves,), dynamic_shapes=(dynamic,))
    assert "luna_mega" not in made.graph_module.code
    for other in (2, 40, 75):
        _, leaves = exported(operator, other, options)
        torch.testing.assert_close(made.module()(leaves), program(leaves), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_inductor_trains(triton_device, backend):
    """One program with all ops compiles with Inductor, and trains with inputs that have the strides of views."""

    def loss(*x):
        result = api.luna_causal_attention(x[0], x[1], *[x[0]] * 3, backend=backend)
        result = api.luna_unpack(
            result, *[api.luna_pack(x[1], x[0], x[0], backend=backend)] * 2, backend=backend
        ).flatten(2)
        result = api.damped_ema(result.flatten(2), *x[2:6], backend=backend)
        for weight in (x[7], torch.view_as_complex(x[7])):
            result = api.diagonal_ssm(result, -x[2].exp(), x[3], weight, backend=backend)
        result = api.timestep_norm(result, 2, backend=backend)
        return api.gated_attention(result, result, result, x[6], function="laplace", backend=backend).square().sum()

    torch.compiler.reset()
    parameters = [*(torch.randn(24, 4) for _ in range(4)), torch.randn(39), torch.randn(24, 4, 2)]
    heads_first = [torch.randn(2, 3, length, 8).transpose(1, 2) for length in (20, 5)]
    device = triton_device if backend == "triton" else torch.device("cpu")
    leaves = [x.detach().to(device).requires_grad_() for x in (*heads_first, *parameters)]
    gradients = [torch.autograd.grad(run(*leaves), leaves) for run in (torch.compile(loss, fullgraph=True), loss)]
    for compiled, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-3)


def test_a_compiled_program_of_no_sequences():
    x = torch.randn(0, 40, 2, 8, requires_grad=True)
    output = torch.compile(api.luna_causal_attention, fullgraph=True, backend="aot_eager")(x, x[:, :5], x, x, x)
    assert output.shape == x.shape and torch.autograd.grad(output.sum(), x)[0].shape == x.shape


def test_a_compiled_program_checks_its_bounds(triton_device):
    query, key = torch.randn(2, 3, 1, 8, device=triton_device), torch.randn(1, 10, 1, 8, device=triton_device)

    def pack(cu_seqlens):
        return api.luna_pack(query, key, key, cu_seqlens=cu_seqlens, max_seqlen=6, backend="triton")

    compiled = torch.compile(pack, fullgraph=True, backend="aot_eager")
    right = torch.tensor([0, 4, 10], device=triton_device)
    assert torch.equal(compiled(right), pack(right))
    if triton_device.type == "cpu":  # on a GPU, the failed assertion ends the process
        with pytest.raises(RuntimeError, match="luna_pack: cu_seqlens must increase from 0"):
            compiled(torch.tensor([0, 4, 9]))


NEEDS_LONGEST = [("luna_pack", {}), ("luna_unpack", {}), ("luna_attention", {}), ("gated_attention", {})]
NEEDS_LONGEST += [("damped_ema", {"truncation": 3})]


@pytest.mark.parametrize(("operator", "options"), NEEDS_LONGEST)
def test_calls_that_need_max_seqlen(operator, options):
    """These calls compare `max_seqlen` with other lengths, which a program cannot do with a value of a tensor."""
    inputs = Inputs(Case(operator, options, layout="varlen", lengths=(4, 1)))
    leaves, options = inputs.arguments("torch", **inputs.leaves)
    program = torch.compile(inputs.call.run, backend="eager")
    with pytest.raises(RuntimeError, match="needs max_seqlen in a compiled program; pass max_seqlen$"):
        program(**leaves, **options)
    with pytest.raises(RuntimeError, match="cu_seqlens has no values here .*; pass max_seqlen$"):
        torch.vmap(lambda bounds: inputs.call.run(**leaves, cu_seqlens=bounds)[0])(options["cu_seqlens"][None])


@pytest.mark.filterwarnings("ignore")  # warnings of the tracer
@pytest.mark.parametrize("call", [pytest.param(make, id=name) for name, make in calls(24, True)])
def test_tracing_raises_an_error(call):
    made = call()
    names = made.leaves.keys()
    with pytest.raises(RuntimeError, match="^`torch.jit.trace` is not supported; use `torch.export.export`$"):
        torch.jit.trace(lambda *given: made.run(**dict(zip(names, given, strict=True))), tuple(made.leaves.values()))


@pytest.mark.parametrize(
    "missing",
    ["_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_current_level"]
    + ["_dispatch_key_parse", "_dispatch_keys"],
)
def test_private_names_may_be_missing(monkeypatch, missing):
    """Without one of the private names of PyTorch, the package is imported, and no call may use any of them."""
    monkeypatch.delattr(forward_ad if missing == "_current_level" else torch._C, missing)
    spec = importlib.util.spec_from_file_location("without_a_name", _mode.__file__)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    if "_dispatch_key" in missing:
        assert module.HAS_NAMES and not module.is_batched(torch.ones(()))
    else:
        assert not module.HAS_NAMES and module.mode() == module.DISPATCHED
