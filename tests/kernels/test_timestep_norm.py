"""`timestep_norm`: Triton, large values, long states, mixed dtypes, invalid arguments."""

import pytest
import torch

from luna_mega.kernels.api import (
    TimestepNormState,
    timestep_norm,
    timestep_norm_step,
)
from luna_mega.kernels.timestep_norm import torch_backend, torch_passes
from tests.kernels.comparisons import assert_same, relative_error
from tests.kernels.leaves import MASKS, Leaves, random_mask

KINDS = ["plain", "states"]
FORMS = ["cache", "complete", "program"]
# The variance of a group of one feature is 0 at the first position: its rounding errors are divided by sqrt(eps).
FLOAT32, ONE_FEATURE = 2e-6, 1e-5


class Inputs(Leaves):
    """The leaves of a call: x, weight, bias, and mean and variance of the state."""

    def __init__(
        self, length, kind="plain", masking="none", groups=3, width=4, batch=2, affine=True, offset=0.5, dtype=None
    ):
        generator = torch.Generator().manual_seed(100 * length + groups)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        features = groups * width
        tensors = [normal(batch, length, features) * 1.5 + offset]
        tensors += [normal(features), normal(features)] if affine else []
        self.mask = random_mask(masking, batch, length, generator)
        self.groups, self.affine, self.states = groups, affine, 2 if kind == "states" else 0
        if self.states:
            tensors += [normal(batch, groups) + offset, normal(batch, groups).square() + 0.1]
            self.count = torch.tensor([3, 1000][:batch])
        self.leaves = [tensor.requires_grad_() for tensor in tensors]
        if dtype is not None:
            self.to(dtype)

    def to(self, dtype):
        """Convert all tensors except the state, which stays float64."""
        state = self.leaves[-2:] if self.states else []
        super().to(dtype)
        self.leaves = self.leaves[: len(self.leaves) - len(state)] + [part.detach().requires_grad_() for part in state]
        return self

    def arguments(self, *leaves):
        """Return the arguments of a call, and the initial state."""
        x, *rest = leaves
        state = TimestepNormState(self.count, *rest[-2:]) if self.states else None
        return (x, self.groups, *(rest[:2] if self.affine else (None, None))), state

    def call(self, *leaves, **options):
        """Return the output, or the tuple of the output and the final mean and variance."""
        arguments, state = self.arguments(*leaves)
        options = {"mask": self.mask, "initial_state": state, "return_state": True} | options
        result = timestep_norm(*arguments, **options)
        return (result[0], *result[1][1:]) if options["return_state"] else result


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of 32 elements and of 8 positions, and two tiles per program."""
    from luna_mega.kernels.timestep_norm import triton_kernels

    monkeypatch.setattr(triton_kernels, "TILE", 32)
    monkeypatch.setattr(triton_kernels, "TILES", 2)
    monkeypatch.setattr(triton_kernels, "BLOCK_T", 8)


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Run the test with blocks of a few positions, with one block, and with the code path of exported programs."""
    choose_form(request.param, monkeypatch)


def choose_form(name, monkeypatch):
    monkeypatch.setattr(torch_passes, "BLOCK", 1 << 40 if name == "complete" else 80)
    if name == "program":
        monkeypatch.setattr(torch_backend, "operator", torch_backend._in_parts)


@pytest.mark.triton
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("length, groups, width", [(1, 1, 1), (3, 5, 1), (7, 1, 48), (13, 3, 7), (19, 2, 16)])
def test_forward_and_gradients(device, length, groups, width, kind, masking):
    inputs = Inputs(length, kind, masking, groups, width, affine=masking != "some")
    exact = inputs.exact()
    assert_same(inputs.run(device=device, backend="triton"), exact, ONE_FEATURE if width == 1 else FLOAT32)


def test_values_far_from_zero(form):
    """With a mean of 1e4 standard deviations, errors stay below 2e-3; float32 rounding of x loses 1e-3."""
    inputs = Inputs(100, offset=1e4)
    exact = inputs.exact()
    for actual, expected in zip(inputs.run(), exact, strict=True):
        assert relative_error(actual, expected) <= 2e-3


def test_a_million_positions():
    """Single steps equal one call up to 1e-5, also after a state of a million positions.

    The means drift, so constant statistics would have much larger errors.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1000, 8, generator=generator) + torch.linspace(0, 1, 1000)[:, None]
    state = TimestepNormState(torch.tensor([1_000_000]), *(torch.full((1, 2), v).double() for v in (0.25, 1.75)))
    output, last = timestep_norm(x, 2, initial_state=state, return_state=True)
    steps, single = [], state
    for position in x.unbind(1):
        y, single = timestep_norm_step(position, single, 2)
        steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), output, rtol=1e-5, atol=1e-5)
    rows = x.double().unflatten(2, (2, 4))
    count = 1_000_000 + 1000
    mean = (0.25 * 1e6 + rows.mean((1, 3)) * 1000) / count
    variance = (
        1e6 * (1.75 + (0.25 - mean) ** 2) + 1000 * (rows - mean[:, None, :, None]).square().mean((1, 3))
    ) / count
    for statistics in (last, single):
        assert statistics.count.tolist() == [count]
        torch.testing.assert_close(statistics.mean, mean, rtol=1e-8, atol=0)
        torch.testing.assert_close(statistics.variance, variance, rtol=1e-7, atol=0)


def test_state_with_count_0_is_ignored(form):
    inputs = Inputs(11, "states")
    expected = Inputs(11).call(*inputs.leaves[:3])
    inputs.count.zero_()
    inputs.leaves[3:] = [torch.full((2, 3), float("nan"), requires_grad=True) for _ in range(2)]
    assert_same(inputs.call(*inputs.leaves), expected)


def test_a_group_of_equal_features(form):
    """If the variance is 0, the result is 0 instead of NaN, and gradients are finite."""
    x = torch.full((1, 50, 6), 3.3, requires_grad=True)
    output = timestep_norm(x, 2)
    assert output.abs().max() <= 1e-3
    assert torch.isfinite(torch.autograd.grad(output.sum(), x)[0]).all()


def test_autocast_and_mixed_dtypes(form):
    inputs = Inputs(40, "states", dtype=torch.float32)

    def autocast(*leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return inputs.call(*leaves)

    assert all(torch.equal(a, b) for a, b in zip(inputs.run(autocast), inputs.run(), strict=True))
    x, weight, bias, *state = inputs.leaves
    exact = inputs.call(*(tensor.double() for tensor in inputs.leaves), backend="reference")
    assert_same(inputs.call(x.double(), weight, bias, *state), exact)
    assert inputs.call(x.bfloat16(), weight, bias, *state)[0].dtype == torch.bfloat16
    low = inputs.call(x, weight, bias, *(part.float() for part in state))
    assert low[1].dtype == torch.float64
    assert_same(low, exact, 1e-6)


def state(batch=2, groups=3, dtype=torch.float32, count=torch.int64):
    return TimestepNormState(torch.ones(batch, dtype=count), *(torch.ones(batch, groups, dtype=dtype),) * 2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 12)}, "batch, length, features"),
        ({"x": torch.zeros(2, 0, 12)}, "length 1 or more"),
        ({"x": torch.zeros(2, 6, 12, dtype=torch.int64)}, "floating-point"),
        ({"groups": 5}, "5 groups do not divide 12 features"),
        ({"groups": 0}, "0 groups"),
        ({"weight": torch.zeros(11)}, "weight of shape .12."),
        ({"bias": torch.zeros(12, 1)}, "bias of shape .12."),
        ({"mask": torch.ones(2, 6)}, "bool mask"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, "bool mask"),
        ({"initial_state": state(batch=1)}, r"mean and variance \[\[2\], \[2, 3\], \[2, 3\]\]"),
        ({"initial_state": state(groups=4)}, "mean and variance"),
        ({"initial_state": state(dtype=torch.float16)}, "float32 or float64"),
        ({"initial_state": state(count=torch.float32)}, "integer count"),
        ({"cu_seqlens": torch.tensor([0, 6])}, r"x \[1, total, features\]"),
        ({"max_seqlen": 6}, "max_seqlen requires cu_seqlens"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        timestep_norm(**{"x": torch.zeros(2, 6, 12), "groups": 3} | change)


def test_bad_arguments_of_a_step():
    with pytest.raises(ValueError, match=r"x \[batch, features\]"):
        timestep_norm_step(torch.zeros(2, 6, 12), None, 3)
    with pytest.raises(ValueError, match="mean and variance"):
        timestep_norm_step(torch.zeros(2, 12), state(batch=3), 3)
    with pytest.raises(ValueError, match="bool mask"):
        timestep_norm_step(torch.zeros(2, 12), None, 3, mask=torch.ones(2))
