"""`complex_ema` and its step in Triton against the reference in float64; interpreted if there is no GPU."""

import copy

import pytest
import torch
from torch.library import opcheck

from luna_mega.kernels.api import complex_ema, complex_ema_step
from luna_mega.kernels.moving_average import coefficients
from tests.kernels.errors import relative_error
from tests.kernels.test_complex_ema import KINDS, Inputs, saturated
from tests.kernels.test_damped_ema import MASKS, assert_same

CHUNK = 8
FLOAT32 = 5e-6

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def device(triton_device, monkeypatch):
    """Chunks of 8 positions, however many processors there are."""
    from luna_mega.kernels.moving_average import triton_damped_forward as triton_forward

    monkeypatch.setattr(triton_forward, "SHORTEST_CHUNK", CHUNK)
    monkeypatch.setattr(triton_forward, "CONFIGURATIONS", (triton_forward.Configuration(1 << 20, 8),))
    return triton_device


def run(inputs, device="cpu", function=None, **options):
    """Return outputs and gradients of a fixed random projection, on the CPU."""
    moved = copy.copy(inputs)
    moved.leaves = [leaf.detach().to(device).requires_grad_() for leaf in inputs.leaves]
    moved.mask = None if inputs.mask is None else inputs.mask.to(device)
    return [tensor.cpu() for tensor in moved.run(function, **options)]


def exact_and_float32(*arguments, **options):
    """Return inputs in float64, the results of the reference for them, and the inputs in float32."""
    inputs = Inputs(*arguments, **options).to(torch.float32).to(torch.float64)
    return inputs, run(inputs, backend="reference"), copy.copy(inputs).to(torch.float32)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("length, states", [(1, 1), (CHUNK - 1, 3), (CHUNK + 1, 16), (19, 2)])
def test_forward_and_gradients(device, length, states, masking, kind):
    _, exact, inputs = exact_and_float32(length, kind, masking, states, skip=masking != "some")
    assert_same(run(inputs, device, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_chunk(triton_device, kind):
    _, exact, inputs = exact_and_float32(11, kind, "some")
    assert_same(run(inputs, triton_device, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("channels, states", [(37, 9), (10, 32)])
def test_blocks_of_channels(device, channels, states):
    _, exact, inputs = exact_and_float32(10, "states", "some", states, batch=1, channels=channels)
    assert_same(run(inputs, device, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
def test_long(triton_device):
    """500 positions in chunks of 64, decays from 1 - q = 1e-5, complete turns: within 4e-6; one gradient 2e-5."""
    inputs = Inputs(500, "states", states=4, channels=3, batch=1)
    with torch.no_grad():
        inputs.leaves[1].copy_(torch.linspace(-12.0, -1.0, 12).view(3, 4))
        inputs.leaves[2].fill_(0.5)
        inputs.leaves[3].copy_(torch.tensor([0.0, 1.5, 1e4]))
    inputs.to(torch.float32).to(torch.float64)
    exact = run(inputs, backend="reference")
    actual = run(inputs.to(torch.float32), triton_device, backend="triton")
    for index, (a, b) in enumerate(zip(actual, exact, strict=True)):
        # Rounding a phase to float32 rotates states that persist for all positions.
        assert (a - b).abs().max() <= (2e-5 if index == 5 else 4e-6) * b.abs().max(), index


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_deterministic_and_no_worse(device, dtype):
    inputs = Inputs(10, "states", "some", batch=1)
    exact = run(inputs, backend="reference")
    inputs.to(dtype)
    plain = run(inputs, backend="reference")
    actual, again = (run(inputs, device, backend="triton") for _ in range(2))
    floor = {torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    for index, (low, a, b, expected) in enumerate(zip(plain, actual, again, exact, strict=True)):
        assert a.dtype == low.dtype and torch.equal(a, b), index
        assert relative_error(a, expected) <= max(floor, 2 * relative_error(low, expected)), index


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_be_nan(device, kind):
    _, exact, inputs = exact_and_float32(10, kind, "some")
    x = inputs.leaves[0].detach().masked_fill(~inputs.mask[..., None], float("nan"))
    inputs.leaves[0] = x
    assert_same(run(inputs, device, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_varlen_sequences(device, kind):
    """Every sequence matches the reference, which processes the sequences one at a time."""
    bounds = torch.tensor([0, 3, 3, 13, 14, 32])
    inputs, _, low = exact_and_float32(32, kind, "some", batch=1)
    if kind == "states":
        state = torch.randn(5, *inputs.leaves[-1].shape[1:])
        inputs.leaves[-1], low.leaves[-1] = state.double(), state
    exact = run(inputs, backend="reference", cu_seqlens=bounds)
    assert_same(run(low, device, backend="triton", cu_seqlens=bounds.to(device)), exact, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("output", [0, 1])
def test_one_of_two_outputs(device, output):
    """The gradient of only the result and of only the states, without initial states."""
    _, _, inputs = exact_and_float32(10, masking="some")
    gradients = []
    for leaves, backend in ((inputs.leaves, "triton"), ([leaf.double() for leaf in inputs.leaves], "reference")):
        leaves = [leaf.detach().to(device).requires_grad_() for leaf in leaves]
        chosen = complex_ema(*leaves, mask=inputs.mask.to(device), return_state=True, backend=backend)[output]
        gradients.append(torch.autograd.grad((chosen * chosen).sum(), leaves, materialize_grads=True))
    assert_same(*gradients, FLOAT32)


@pytest.mark.slow
def test_views(device):
    """Non-contiguous x and gradients of the result."""
    _, exact, inputs = exact_and_float32(10, masking="some")

    def call(x, *rest, **options):
        wide = torch.stack([x, x], -1).permute(2, 0, 1, 3).contiguous()
        return inputs.call(wide.permute(1, 2, 0, 3)[..., 1], *rest, **options).mT.contiguous().mT

    inputs.mask = inputs.mask.to(device)
    assert_same(run(inputs, device, call, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
def test_saturated_logits(device):
    inputs = saturated(10, "states")
    exact = run(inputs, backend="reference")
    assert_same(run(inputs.to(torch.float32), device, backend="triton"), exact, FLOAT32)


@pytest.mark.covering(1)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_step(device, masked, skip):
    inputs = Inputs(1, "states", states=5, channels=37, batch=3, skip=skip, dtype=torch.float32)
    mask = torch.tensor([True, False, True], device=device) if masked else None
    results = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference")):
        leaves = [leaf.detach().to(device, dtype).requires_grad_() for leaf in inputs.leaves]
        (x, *parameters), state = inputs.arguments(*leaves)
        outputs = complex_ema_step(x[:, 0], state, *parameters, mask=mask, backend=backend)
        loss = outputs[0].sin().sum() + outputs[1].square().sum()
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    assert_same(*results, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_operator(device, kind):
    from luna_mega.kernels.moving_average import triton_ops  # noqa: F401, registers the operators

    inputs = Inputs(10, kind, "some", dtype=torch.float32)
    (x, *parameters, skip), state = inputs.arguments(*(leaf.detach().to(device) for leaf in inputs.leaves))
    made = coefficients.complex_coefficients(*parameters)
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, skip, *made, state)]
    arguments = (leaves[0], inputs.mask.to(device), *leaves[1:], kind == "states", None, 10)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(torch.ops.luna_mega.complex_ema_triton, arguments, test_utils=tests)


@pytest.mark.slow
def test_compile(device):
    inputs = Inputs(10, "states", "some", dtype=torch.float32)
    expected = run(inputs, device, backend="triton")
    on_device = copy.copy(inputs)
    on_device.mask = inputs.mask.to(device)
    compiled = torch.compile(on_device.call, fullgraph=True, backend="aot_eager")
    assert_same(run(inputs, device, compiled, backend="triton"), expected, 1e-6)
