"""Every operator returns the metadata of its fake, including strides, because Inductor relies on it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega.kernels.api import (
    complex_ema,
    complex_ema_step,
    damped_ema,
    damped_ema_step,
    diagonal_ssm,
    diagonal_ssm_step,
    gated_attention,
    luna_causal_attention,
    luna_causal_attention_step,
    luna_pack,
    luna_unpack,
    timestep_norm,
    timestep_norm_step,
)
from tests.kernels.backends import TRITON
from tests.kernels.operators import OperatorCalls


def described(x):
    """Return the metadata that a compiler relies on; strides of dimensions of size 1 are omitted."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]
    return x.dtype, x.shape, strides, x.storage_offset()


class Promises(TorchDispatchMode):
    """Compare the results of this package's operators with their fakes."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        results = operator(*arguments, **(options or {}))
        if operator.namespace == "luna_mega":
            self.seen.add(operator._schema.name.partition("::")[2])
            with FakeTensorMode() as mode:
                fakes = operator(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments))
            for number, pair in enumerate(zip(*map(torch.utils._pytree.tree_leaves, (results, fakes)), strict=True)):
                result, promise = map(described, pair)
                assert result == promise, f"{operator}, result {number}: {result} is promised as {promise}"
        return results


def leaves_of(loss):
    """Return the leaves of the autograd graph of a loss."""
    nodes, leaves = [loss.grad_fn], {}
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        nodes += [following for following, _ in node.next_functions if following is not None]
    return list(leaves.values())


def heads_first(*shape):
    """Return a leaf with heads `[B, T, H, K]` that is a transposed view of contiguous memory."""
    return torch.randn(*shape).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


def causal(backend, rows):
    tokens = [heads_first(2, 20, 2, 8) for _ in range(4)]
    pack_query = heads_first(2, rows, 2, 8)
    options = {"mask": torch.arange(20) < torch.tensor([[20], [11]]), "backend": backend}
    state = luna_causal_attention(tokens[0], pack_query, *tokens[1:], return_state=True, **options)[1]
    result, state = luna_causal_attention(
        tokens[0], pack_query, *tokens[1:], state=state, return_state=True, dropout=0.1, **options
    )
    one, state = luna_causal_attention_step(
        tokens[0][:, 0], pack_query, *(x[:, 0] for x in tokens[1:]), state, backend=backend
    )
    return result, one, *state[:2]


def packed(backend, tied):
    key, value, few = (heads_first(2, length, 3, 8) for length in (40, 40, 5))
    value = key if tied else value
    if backend == "torch":  # compiled programs call this operator
        return torch.ops.luna_mega.attend(few, key, value, None, 0.5)[:1]
    result = luna_pack(few, key, value, torch.arange(40) < torch.tensor([[40], [11]]), backend=backend)
    return result, luna_unpack(key, few, few if tied else result, backend=backend)


def gated(backend, function):
    query, key = (torch.randn(20, 2, 8, requires_grad=True).transpose(0, 1) for _ in range(2))
    value, bias = torch.randn(2, 20, 24, requires_grad=True)[..., 1:], torch.randn(63, requires_grad=True)
    mask = torch.arange(20) < torch.tensor([[20], [11]])
    options = {"function": function, "causal": function == "softmax", "chunk_size": 8, "backend": backend}
    return (gated_attention(query, key, value, bias, mask=mask, **options),)


def average(backend, bidirectional):
    x = torch.randn(20, 2, 8, requires_grad=True).transpose(0, 1)
    shape = 16 if bidirectional else 8, 4
    parameters = [torch.randn(*shape, requires_grad=True) for _ in range(4)]
    skip, options = torch.randn(8, requires_grad=True), {"backend": backend}
    if bidirectional:
        return (damped_ema(x, *parameters, skip=skip, **options),)
    result, state = damped_ema(x, *parameters, skip=skip, return_state=True, **options)
    return result, *damped_ema_step(x[:, 0], state, *parameters, skip=skip, **options)


def complex_average(backend, stateful):
    x = torch.randn(20, 2, 8, requires_grad=True).transpose(0, 1)
    shapes = (8, 4), (8, 4), (8,), (8, 4, 2), (8,)
    parameters, options = [torch.randn(*shape, requires_grad=True) for shape in shapes], {"backend": backend}
    if not stateful:
        return (complex_ema(x, *parameters, **options),)
    result, state = complex_ema(x, *parameters, return_state=True, **options)
    return result, *complex_ema_step(x[:, 0], state, *parameters, **options)


def diagonal(backend, directions):
    x = torch.randn(20, 2, 8, requires_grad=True).transpose(0, 1)
    shapes = *[(8 * directions, 4)] * 2, (8 * directions, 4, 2), (8,)
    log_decay, *rest = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    options = {"backend": backend}
    if directions == 2:
        return (diagonal_ssm(x, -log_decay.exp(), None, rest[0], rest[2], **options),)
    result, state = diagonal_ssm(x, -log_decay.exp(), *rest, return_state=True, **options)
    return result, *diagonal_ssm_step(x[:, 0], state, -log_decay.exp(), *rest, **options)


def norm_over_time(backend, masked):
    x = torch.randn(20, 2, 8, requires_grad=True).transpose(0, 1)
    mask = torch.arange(20) < torch.tensor([[20], [11]]) if masked else None
    result, state = timestep_norm(
        x, 2, torch.ones(8, requires_grad=True), mask=mask, return_state=True, backend=backend
    )
    return result, timestep_norm_step(x[:, 0], state, 2, backend=backend)[0]


CALLS = [
    *((causal, rows) for rows in (5, 70)),
    *((packed, tied) for tied in (True, False)),
    *((gated, function) for function in ("softmax", "laplace")),
    *((call, option) for call in (average, complex_average, norm_over_time) for option in (True, False)),
    *((diagonal, directions) for directions in (1, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", TRITON])
@pytest.mark.parametrize("call, option", CALLS)
def test_results_are_what_the_fakes_promise(triton_device, monkeypatch, call, option, backend):
    if backend == "triton":
        from luna_mega.kernels.luna_causal_attention import triton_forward

        monkeypatch.setattr(triton_forward, "MIN_SEGMENT", 16)

    def train():
        torch.manual_seed(0)
        loss = sum(x.square().sum() for x in call(backend, option))
        return loss, *torch.autograd.grad(loss, leaves_of(loss))

    with torch.device(triton_device):
        results = train()
        with Promises() as promises:
            assert all(map(torch.equal, results, train())), "a call under a mode has other results"
    assert len(results) > 2 and any("backward" in name for name in promises.seen), promises.seen


def registered(backend):
    """Return the names of the operators of a backend."""
    names = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("luna_mega::")
    }
    return {name for name in names if ("triton" in name) == (backend == "triton")}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", TRITON])
def test_opcheck(triton_device, backend):
    """PyTorch's checks of custom operators pass for all operators, with the arguments of the calls above."""
    seen = set()
    for call, option in CALLS:
        with torch.device(triton_device), OperatorCalls() as mode:
            loss = sum(x.square().sum() for x in call(backend, option))
            torch.autograd.grad(loss, leaves_of(loss))
            with torch.no_grad():
                call(backend, option)
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


@pytest.mark.slow
def test_inductor_trains(triton_device):
    """One program with all ops compiles with Inductor, and trains with inputs that have the strides of views."""
    backend = "triton"

    def loss(*x):
        result = luna_causal_attention(x[0], x[1], *[x[0]] * 3, backend=backend)
        result = luna_unpack(result, *[luna_pack(x[1], x[0], x[0], backend=backend)] * 2, backend=backend).flatten(2)
        result = damped_ema(result, *x[2:6], backend=backend)
        return gated_attention(result, result, result, x[6], function="laplace", backend=backend).square().sum()

    torch.compiler.reset()
    parameters = [torch.randn(24, 4, requires_grad=True) for _ in range(4)]
    leaves = [heads_first(2, 20, 3, 8), heads_first(2, 5, 3, 8), *parameters, torch.randn(39, requires_grad=True)]
    leaves = [x.detach().to(triton_device).requires_grad_() for x in leaves]
    gradients = [torch.autograd.grad(run(*leaves), leaves) for run in (torch.compile(loss, fullgraph=True), loss)]
    for compiled, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-3)
