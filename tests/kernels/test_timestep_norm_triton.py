"""`timestep_norm` and its step in Triton against the reference in float64; interpreted if there is no GPU."""

import copy

import pytest
import torch
from torch.library import opcheck

from luna_mega.kernels.api import TimestepNormState, timestep_norm_step
from tests.kernels.errors import relative_error
from tests.kernels.test_damped_ema import MASKS, assert_same
from tests.kernels.test_timestep_norm import KINDS, Inputs

FLOAT32 = 2e-6
# At the first position a group of one feature has a variance of 0: its rounding errors are divided by sqrt(eps).
ONE_FEATURE = 1e-5

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def device(triton_device, monkeypatch):
    """Tiles of 32 elements, two of them in a program."""
    from luna_mega.kernels.timestep_norm import triton_kernels

    monkeypatch.setattr(triton_kernels, "TILE", 32)
    monkeypatch.setattr(triton_kernels, "TILES", 2)
    return triton_device


def run(inputs, device="cpu", function=None, **options):
    """Return outputs and gradients of a fixed random projection, on the CPU."""
    moved = copy.copy(inputs)
    moved.leaves = [leaf.detach().to(device).requires_grad_() for leaf in inputs.leaves]
    moved.mask, moved.count = (None if t is None else t.to(device) for t in (inputs.mask, inputs.count))
    return [tensor.cpu() for tensor in moved.run(function, **options)]


def exact_and_float32(*arguments, **options):
    """Return the results of the reference for inputs in float64, and the inputs in float32."""
    inputs = Inputs(*arguments, **options).to(torch.float32).to(torch.float64)
    return run(inputs, backend="reference"), copy.copy(inputs).to(torch.float32)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("length, groups, width", [(1, 1, 1), (3, 5, 1), (7, 1, 48), (13, 3, 7), (19, 2, 16)])
def test_forward_and_gradients(device, length, groups, width, kind, masking):
    exact, inputs = exact_and_float32(length, kind, masking, groups, width, affine=masking != "some")
    assert_same(run(inputs, device, backend="triton"), exact, ONE_FEATURE if width == 1 else FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_deterministic(device, dtype):
    inputs = Inputs(10, "states", "some").to(dtype).to(torch.float64)
    exact = run(inputs, backend="reference")
    actual, again = (run(inputs.to(dtype), device, backend="triton") for _ in range(2))
    for a, b, expected in zip(actual, again, exact, strict=True):
        assert torch.equal(a, b)
        assert relative_error(a, expected) <= {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.slow
def test_padding_may_be_nan(device):
    exact, inputs = exact_and_float32(10, "states", "some")
    inputs.leaves[0] = inputs.leaves[0].detach().masked_fill(~inputs.mask[..., None], float("nan"))
    assert_same(run(inputs, device, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
def test_varlen_sequences(device):
    """Compared with the reference, which also pads the sequences."""
    exact, inputs = exact_and_float32(21, masking="some", batch=1)
    bounds = torch.tensor([0, 3, 3, 20, 21])
    double = copy.copy(inputs).to(torch.float64)
    exact = run(double, backend="reference", cu_seqlens=bounds)
    assert_same(run(inputs.to(torch.float32), device, backend="triton", cu_seqlens=bounds.to(device)), exact, FLOAT32)


@pytest.mark.covering(1)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups, width", [(3, 7), (70, 2)])
def test_step(device, masked, groups, width):
    """In one launch, and with gradients."""
    exact, inputs = exact_and_float32(1, "states", groups=groups, width=width)
    mask = torch.tensor([[True], [False]]) if masked else None
    inputs.mask = mask
    double = copy.copy(inputs).to(torch.float64)
    exact = run(double, backend="reference")
    inputs.to(torch.float32)
    assert_same(run(inputs, device, backend="triton"), exact, FLOAT32)
    (x, *rest), state = inputs.arguments(*(leaf.detach().to(device) for leaf in inputs.leaves))
    rest = [t.to(device) if isinstance(t, torch.Tensor) else t for t in rest]
    state = TimestepNormState(*(t.to(device) for t in state))
    mask = None if mask is None else mask[:, 0].to(device)
    y, following = timestep_norm_step(x[:, 0], state, *rest, mask=mask, backend="triton")
    assert following.count.tolist() == [4, 1000 if masked else 1001]
    assert_same([y[:, None].cpu(), *(t.cpu() for t in following[1:])], exact[:3], FLOAT32)


@pytest.mark.slow
def test_operator(device):
    from luna_mega.kernels.timestep_norm import triton_ops  # noqa: F401, registers the operators

    inputs = Inputs(10, "states", "some", dtype=torch.float32)
    (x, groups, weight, bias), state = inputs.arguments(*(leaf.detach().to(device) for leaf in inputs.leaves))
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    mask, count = inputs.mask.to(device), inputs.count.to(device)
    leaves = [t.requires_grad_() for t in (x, weight, bias, *state[1:])]
    x, weight, bias, mean, variance = leaves
    opcheck(
        torch.ops.luna_mega.timestep_norm_triton,
        (x, weight, bias, mask, count, mean, variance, groups, 1e-5),
        test_utils=tests,
    )


@pytest.mark.slow
def test_compile(device):
    inputs = Inputs(10, "states", "some", dtype=torch.float32)
    expected = run(inputs, device, backend="triton")
    compiled = torch.compile(inputs.call, fullgraph=True, backend="aot_eager")
    assert_same(run(inputs, device, compiled, backend="triton"), expected, 1e-6)
