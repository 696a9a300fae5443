"""Direct calls in eager mode run a plain function; all other calls run an operator."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from luna_mega.kernels import _export
from luna_mega.kernels.api import damped_ema, timestep_norm, use_backend
from tests.kernels.backends import NATIVE, OperatorCalls
from tests.kernels.calls import calls

OPERATORS = {"torch": "luna_mega::moving_average", "native": "luna_mega::damped_ema_native"}


@pytest.fixture(params=["torch", NATIVE])
def names(request):
    """Choose a backend, and return the names of its operators."""
    name = OPERATORS[request.param]
    with use_backend(request.param):
        yield {name, f"{name}_backward"}


class Subclass(torch.Tensor):
    pass


def leaves():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 40, 3), *[(3, 4)] * 4, (3,))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def operators(run):
    """Return the names of this package's operators that PyTorch called during `run`."""
    with torch.profiler.profile() as profile:
        run()
    return {event.key for event in profile.key_averages() if event.key.startswith("luna_mega::")}


def train(*inputs, **options):
    return torch.autograd.grad(damped_ema(*inputs).sum(), inputs, **options)


@pytest.mark.usefixtures("names")
def test_eager_mode_calls_no_operator():
    inputs = leaves()
    inputs[0] = nn.Parameter(inputs[0].detach())
    assert operators(lambda: train(*inputs)) == set()
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with context:
            assert operators(lambda: damped_ema(*inputs)) == set()


@pytest.mark.usefixtures("names")
def test_operators_compute_the_same():
    results = train(*leaves()), damped_ema(*leaves())
    with OperatorCalls() as mode:
        expected = train(*leaves()), damped_ema(*leaves())
    assert len(mode.calls) == 3
    for result, right in zip((*results[0], results[1]), (*expected[0], expected[1]), strict=True):
        assert torch.equal(result, right)


def call_subclass(inputs):
    damped_ema(inputs[0].as_subclass(Subclass), *inputs[1:]).sum().backward()


def call_under_mode(inputs):
    with FlopCounterMode(display=False):
        train(*inputs)


@pytest.mark.parametrize(
    "run, called",
    [
        (call_subclass, True),
        (call_under_mode, True),
        (lambda inputs: train(*inputs, create_graph=True), False),
        (lambda inputs: torch.vmap(lambda x: timestep_norm(x[None], 1))(inputs[0]), False),
        (lambda inputs: torch.compile(damped_ema, backend="aot_eager", fullgraph=True)(*inputs), True),
    ],
    ids=["subclass", "mode", "create_graph", "vmap", "compile"],
)
def test_other_calls_are_operators_or_formulas_of_pytorch(run, called, names):
    torch.compiler.reset()
    assert operators(lambda: run(leaves())) == (names if called else set())


@pytest.mark.filterwarnings("ignore")  # warnings of the tracer
@pytest.mark.parametrize("call", [pytest.param(make, id=name) for name, make in calls(24, True)])
def test_tracing_raises_an_error(call):
    made = call()
    names = made.leaves.keys()
    with pytest.raises(RuntimeError, match="^`torch.jit.trace` is not supported; use `torch.export.export`$"):
        torch.jit.trace(lambda *given: made.run(**dict(zip(names, given, strict=True))), tuple(made.leaves.values()))


@pytest.mark.parametrize("missing", ["_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_current_level"])
def test_every_call_is_an_operator_if_a_private_name_is_missing(monkeypatch, missing, names):
    with monkeypatch.context() as patch:
        patch.delattr(forward_ad if missing == "_current_level" else torch._C, missing)
        spec = importlib.util.spec_from_file_location("without_a_name", _export.__file__)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    assert not module.HAS_NAMES
    monkeypatch.setattr(_export, "HAS_NAMES", False)
    assert operators(lambda: train(*leaves())) == names
