"""Triton kernels of `luna_causal_attention` against the reference in float64; interpreted if there is no GPU."""

import copy
import math

import pytest
import torch

from luna_mega.kernels.api import (
    luna_causal_attention,
)
from luna_mega.kernels.luna_causal_attention import reference
from tests.kernels.backends import graded
from tests.kernels.comparisons import assert_same
from tests.kernels.test_luna_causal_attention import FUSED, SCANS, Inputs, small_tiles  # noqa: F401, a fixture

pytestmark = pytest.mark.triton

# Maximum relative errors. The interpreter truncates float32 to bfloat16; a GPU rounds. For float16 inputs, a GPU
# multiplies converted float32 operands in TF32, truncated to 10 bits; the interpreter multiplies in float32.
GPU = torch.cuda.is_available()
BOUNDS = {torch.float32: 1e-5, torch.float16: 5e-3 if GPU else 1e-3, torch.bfloat16: 1e-2 if GPU else 3e-2}
DTYPES = tuple(BOUNDS)


def on(device, inputs, **options):
    """Return a function that runs `inputs.call` on Triton; its leaves and outputs are on the CPU."""
    moved = inputs.on(device)

    def call(*leaves, **more):
        outputs = moved.call(*(leaf.to(device) for leaf in leaves), **{"backend": "triton", **options, **more})
        return [x.cpu() for x in outputs]

    return call


def check(device, inputs, dtype, **options):
    exact = inputs.exact(dtype, **options)
    actual = inputs.run(device=device, backend="triton", **options)
    assert_same(actual, exact, BOUNDS[dtype])
    state = torch.float32
    assert [x.dtype for x in actual] == [dtype, state, state, *[dtype] * 5, *[state] * inputs.states]
    return actual


# The first cases have each mask, and all kernels.
FORWARD = [
    (1, "all of one row", True, True, (5, 6, 4)),
    (2, "left", True, False, (16, 16, 16)),
    (17, "middle", False, False, (5, 33, 17)),
    (40, "middle", True, True, (5, 6, SCANS)),
    (1, "none", False, False, (5, 6, 4)),
    (15, "right", False, True, (24, 5, 3)),
    (63, "left", True, True, (5, 6, 4)),
    (64, "none", False, False, (32, 32, 33)),
    (65, "all of one row", True, True, (5, 6, 4)),
    (65, "none", False, False, (20, 40, SCANS)),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "length, masking, stateful, pack_masked, sizes",
    graded(FORWARD[:4], FORWARD[-2:], FORWARD),
)
def test_forward_and_gradients(device, length, masking, stateful, pack_masked, sizes, dtype):
    """Output, both means and all gradients equal the reference."""
    size, width, rows = sizes
    heads = 3 if length < 20 else 1
    inputs = Inputs(length, masking, stateful, pack_masked, heads=heads, size=size, width=width, rows=rows)
    check(device, inputs, dtype, activation="elu" if stateful else "softplus")


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, rows, dtype", [(140, FUSED, torch.float32), (200, FUSED, torch.bfloat16), (140, SCANS, torch.float16)]
)
def test_many_segments(device, length, rows, dtype):
    check(device, Inputs(length, "middle", stateful=True, heads=1, rows=rows), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_segment_of_several_chunks(monkeypatch, device, dtype):
    from luna_mega.kernels.luna_causal_attention import triton_forward

    monkeypatch.setattr(triton_forward, "MIN_SEGMENT", 1 << 20)
    check(device, Inputs(130, "right", stateful=True, heads=1), dtype)


@pytest.mark.slow
def test_one_segment_in_two_scans(monkeypatch, device):
    from luna_mega.kernels.luna_causal_attention import triton_forward

    monkeypatch.setattr(triton_forward, "MIN_SEGMENT", 1 << 20)
    check(device, Inputs(130, "right", heads=1, rows=SCANS), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("rows, dtype", [(64, torch.float32), (256, torch.bfloat16)])
def test_largest_tiles(device, rows, dtype):
    check(device, Inputs(33, "left", True, heads=1, size=128, width=100, rows=rows), dtype)


@pytest.mark.slow
@pytest.mark.skipif(GPU, reason="looks at the target of interpreted kernels")
@pytest.mark.parametrize("rows", [FUSED, 48, SCANS])
def test_configurations_of_sm_80(monkeypatch, device, rows):
    from luna_mega.kernels.common import triton_launch

    monkeypatch.setattr(triton_launch, "_target", triton_launch.Target((8, 0), 108))
    check(device, Inputs(90, "left", True, heads=1, rows=rows, size=48), torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 96, 200, 1000])
def test_segments_fill_the_device_in_two_waves(device, heads):
    from luna_mega.kernels.luna_causal_attention import triton_forward

    processors = triton_forward.triton_launch.target(device).processors
    segments = math.ceil(2**20 / triton_forward.segment_length(1, heads, 2**20, 64, device))
    assert segments == 1 if heads == 1000 else 3 * processors < heads * segments <= 4 * processors


@pytest.mark.slow
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_in_both_tails(device, activation):
    """Activations are exact for large and small scores.

    If all values are 1, the mean value after one token is the pack weight.
    """
    numbers = [-90.0, -80.0, -40.0, -9.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 9.0, 29.0, 58.0, 100.0, 1e4]
    scores = torch.tensor(numbers).view(1, -1, 1, 1)
    one = torch.ones(1, 1, 1, 1)
    right = reference.activate(scores.double().flatten(), activation)
    tolerance = 1e-6 * scores.flatten().abs().clamp(min=1.0) * right
    for length in (1, 2):
        tokens = [one.expand(1, length, 1, 1).to(device)] * 3
        options = {"activation": activation, "return_state": True, "backend": "triton"}
        _, state = luna_causal_attention(tokens[0], scores.to(device), *tokens, **options)
        assert ((state.value_mean.flatten().cpu() - right).abs() <= tolerance).all()


@pytest.mark.slow
@pytest.mark.parametrize("length, rows", [(1, 24), (40, 24), (20, 100)])
def test_dropout(monkeypatch, device, length, rows):
    """Outputs and gradients equal those of the reference with the same dropped weights, also with two segments."""
    from luna_mega.kernels.luna_causal_attention import triton_forward

    monkeypatch.setattr(triton_forward, "MIN_SEGMENT", 32)
    inputs = Inputs(length, heads=2, rows=rows, stateful=True).to(torch.float32)

    def call(leaves, **options):
        torch.manual_seed(5)
        return on(device, inputs, dropout=0.5, **options)(*leaves)

    def tokens(*last):
        return torch.ones(2, length, 2, *last)

    # If the values are an identity, their mean is the pack weights. If the mean is an identity, the output is the
    # unpack weights.
    ones, no_mean = tokens(1), torch.zeros(2, 2, 1, rows)
    inputs.count = torch.zeros(2, dtype=torch.int64)
    identity = torch.eye(length)[None, :, None].expand(2, -1, 2, -1)
    flat = [ones, torch.zeros(2, rows, 2, 1), ones, ones]
    packed = call([*flat, identity, no_mean, torch.zeros(2, 2, rows, length)])[2].mT * length
    inputs.count = torch.full((2,), 1 << 40)
    mean = torch.eye(rows).expand(2, 2, -1, -1)
    unpacked = call([*flat, tokens(rows), no_mean, mean])[0].transpose(1, 2) * rows
    factors = [x.double().round() for x in (packed, unpacked)]
    for factor in factors:
        assert set(factor.unique().tolist()) == {0.0, 2.0}
        assert abs((factor == 0).double().mean() - 0.5) < 5 * math.sqrt(0.25 / factor.numel())
    assert not torch.equal(*factors)

    inputs = Inputs(length, "left", heads=2, rows=rows, stateful=True).to(torch.float32)
    actual = inputs.run(lambda *leaves: call(leaves))
    left = list(factors)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "dropout", lambda x, *_, **__: x * left.pop(0))
        assert_same(actual, inputs.exact(), 1e-5)
    assert not left


@pytest.mark.slow
def test_autocast_and_mixed_states(device):
    inputs = Inputs(20, "left", stateful=True, heads=1).to(torch.float32)
    expected = inputs.run(on(device, inputs))
    with torch.autocast(device.type, torch.bfloat16):
        assert all(map(torch.equal, inputs.run(on(device, inputs)), expected))
    inputs.leaves[5:] = [x.detach().double().requires_grad_() for x in inputs.leaves[5:]]
    for length in (1, 20):
        part = [x[:, :length] if index in (0, 2, 3, 4) else x for index, x in enumerate(inputs.leaves)]
        other = copy.copy(inputs)
        other.mask = inputs.mask[:, :length]
        outputs = on(device, other)(*part)
        gradients = torch.autograd.grad(outputs[0].sum(), inputs.leaves[5:])
        assert all(x.dtype == torch.float32 for x in outputs) and all(x.dtype == torch.float64 for x in gradients)
