"""Every operator returns the metadata of its fake, including strides, because Inductor relies on it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega.kernels import api
from tests.kernels.backends import NATIVE, TRITON, OperatorCalls, graded, on_backends
from tests.kernels.calls import CALLS, ON_NATIVE, Sizes

SIZES = Sizes(2, 20, 2, 8, 5, 8, 4, 2, 24)
NAMES = [name for name in CALLS if name != "damped_ema truncated"]  # not on Triton
# Each operator with most of its options; the other calls are exhaustive.
MAIN = [
    *(name for name in NAMES if name.endswith("masked, stateful")), "luna_attention padding_free", "luna_unpack",
    "gated_attention short chunks", "gated_attention row_offset", "damped_ema directions=2, shifted",
    *(name for name in NAMES if name.endswith("_step")),
]  # fmt: skip


def described(x):
    """Return the metadata that a compiler relies on; strides of dimensions of size 1 are omitted."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]
    return x.dtype, x.shape, strides, x.storage_offset()


class Promises(TorchDispatchMode):
    """Compare the results of this package's operators with their fakes."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        results = operator(*arguments, **(options or {}))
        if operator.namespace == "luna_mega":
            with FakeTensorMode() as mode:
                fakes = operator(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments))
            for number, pair in enumerate(zip(*map(torch.utils._pytree.tree_leaves, (results, fakes)), strict=True)):
                result, promise = map(described, pair)
                assert result == promise, f"{operator}, result {number}: {result} is promised as {promise}"
        return results


def views(name, backend, device):
    """Return a call and its leaves: positions and heads, or positions and sequences, are transposed views."""
    call = CALLS[name](SIZES)
    leaves = [x.float().to(device) for x in call.leaves.values()]
    leaves = [x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 2 else x for x in leaves]
    leaves = dict(zip(call.leaves, (x.requires_grad_() for x in leaves), strict=True))
    options = {"backend": backend} | ({"dropout": 0.1} if "luna" in name or "gated" in name else {})
    return lambda: call.run(**leaves, **options), list(leaves.values())


def train(run, leaves):
    """Return the loss and the gradients of a call."""
    torch.manual_seed(0)
    loss = sum(x.square().sum() for x in run())
    return loss, *(x for x in torch.autograd.grad(loss, leaves, allow_unused=True) if x is not None)


@pytest.mark.parametrize(
    "name, backend", [*on_backends(graded([], MAIN, NAMES), ["torch", TRITON]), *on_backends(NAMES, [NATIVE])]
)
def test_results_are_what_the_fakes_promise(triton_device, monkeypatch, name, backend):
    if backend == "triton":
        from luna_mega.kernels.luna_causal_attention import triton_forward

        monkeypatch.setattr(triton_forward, "MIN_SEGMENT", 16)
    run, leaves = views(name, backend, triton_device)
    results = train(run, leaves)
    with Promises():
        assert all(map(torch.equal, results, train(run, leaves))), "a call under a mode has other results"
    assert len(results) > 2


def registered(backend):
    """Return the names of the operators of a backend."""
    names = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("luna_mega::")
    }
    return {name for name in names if backend == next((b for b in ("triton", "native") if b in name), "torch")}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", NATIVE, TRITON])
def test_opcheck(triton_device, backend):
    """PyTorch's checks of custom operators pass for all operators, with the arguments of the calls above."""
    seen = set()
    for name in [name for name in MAIN if name in ON_NATIVE] if backend == "native" else (*MAIN, "luna_pack masked"):
        run, leaves = views(name, backend, triton_device)
        with OperatorCalls() as mode:
            train(run, leaves)
            if backend == "torch" and name == "luna_pack masked":  # compiled programs call this operator
                pack, context = leaves
                torch.ops.luna_mega.attend(pack, context, context, None, 0.5)[0].sum().backward()
            with torch.no_grad():
                run()
        for operator, arguments in zip(mode.operators, mode.calls, strict=True):
            backward = operator._schema.name.endswith("_backward")
            arguments = tuple(
                x.detach().clone().requires_grad_(x.is_floating_point() and not backward) if torch.is_tensor(x) else x
                for x in arguments
            )
            tests = ("test_schema", "test_faketensor", *(() if backward else ("test_autograd_registration",)))
            tests += () if backend == "triton" or backward else ("test_aot_dispatch_dynamic",)
            opcheck(operator, arguments, test_utils=tests)
            seen.add(operator._schema.name.partition("::")[2])
    assert seen == registered(backend)


class Program(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, leaves):
        return self.call.run(**leaves)


def example(name, length):
    leaves = {key: x.float() for key, x in CALLS[name](SIZES._replace(length=length)).leaves.items()}
    if "gated" in name and "chunk" not in name:
        leaves["bias"] = torch.linspace(-1.0, 1.0, 199)
    return leaves


EXPORTED = [name for name in CALLS if "_step" not in name and "padding_free" not in name]


@pytest.mark.parametrize("name", graded(["luna_unpack", "gated_attention short chunks"], MAIN, EXPORTED))
def test_export(name):
    """One exported program without custom operators supports lengths below a chunk and between multiples of it."""
    program, leaves, length = Program(CALLS[name](SIZES)), example(name, 40), torch.export.Dim("length", min=2, max=99)
    dynamic = {key: {1: length} if x.dim() > 1 and x.shape[1] == 40 else None for key, x in leaves.items()}
    exported = torch.export.export(program, (leaves,), dynamic_shapes=(dynamic,))
    assert "luna_mega" not in exported.graph_module.code
    for other in (2, 40, 75):
        leaves = example(name, other)
        torch.testing.assert_close(exported.module()(leaves), program(leaves), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_inductor_trains(triton_device):
    """One program with all ops compiles with Inductor, and trains with inputs that have the strides of views."""
    backend = "triton"

    def loss(*x):
        result = api.luna_causal_attention(x[0], x[1], *[x[0]] * 3, backend=backend)
        result = api.luna_unpack(
            result, *[api.luna_pack(x[1], x[0], x[0], backend=backend)] * 2, backend=backend
        ).flatten(2)
        result = api.damped_ema(result.flatten(2), *x[2:6], backend=backend)
        return api.gated_attention(result, result, result, x[6], function="laplace", backend=backend).square().sum()

    torch.compiler.reset()
    parameters = [torch.randn(24, 4) for _ in range(4)]
    heads_first = [torch.randn(2, 3, length, 8).transpose(1, 2) for length in (20, 5)]
    leaves = [x.detach().to(triton_device).requires_grad_() for x in (*heads_first, *parameters, torch.randn(39))]
    gradients = [torch.autograd.grad(run(*leaves), leaves) for run in (torch.compile(loss, fullgraph=True), loss)]
    for compiled, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-3)
