"""Every comparison detects one wrong position among thousands: in tests, on GPUs, interpreted, and in tuning."""

import pytest
import torch

from tests.kernels.comparisons import assert_same

pytest.importorskip("triton", reason="Triton is not installed")

from luna_mega.kernels.common import triton_choice  # noqa: E402
from luna_mega.kernels.common.comparison import row_error  # noqa: E402
from tests.kernels import gpu  # noqa: E402
from tests.kernels.contract import BOUNDS, TRITON_BOUNDS  # noqa: E402


def on_a_gpu(actual, expected):
    gpu.check({"output": actual}, {"output": expected}, actual.dtype)


def contract(actual, expected):
    assert_same([actual], [expected], max(bounds[actual.dtype] for bounds in (BOUNDS, *TRITON_BOUNDS.values())))


def tuning(actual, expected):
    assert triton_choice.difference([actual], [expected.to(actual.dtype)]) is None


COMPARISONS = [on_a_gpu, contract, tuning]


def results(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rounded numbers `[1, 4000, 2, 16]` and the exact numbers, whose norms decrease by position."""
    generator, length = torch.Generator().manual_seed(0), 4000
    exact = torch.randn(1, length, 2, 16, dtype=torch.float64, generator=generator)
    exact /= torch.arange(1, length + 1)[:, None, None] ** 0.25
    noise = torch.randn(exact.shape, dtype=torch.float64, generator=generator)
    return (exact + torch.finfo(dtype).eps / 4 * exact.abs() * noise).to(dtype), exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compare", COMPARISONS)
def test_one_wrong_position(compare, dtype):
    right, exact = results(dtype)
    compare(right, exact)
    row = right[0, 1234, 1]
    for wrong in (0 * row, -row, row.roll(1), row * torch.nan):
        actual = right.clone()
        actual[0, 1234, 1] = wrong
        error = (actual.double() - exact).norm() / exact.norm()
        assert error < 3e-2 or error.isnan(), "the norm of all positions hides it"
        with pytest.raises(AssertionError):
            compare(actual, exact)


def test_error_of_a_row():
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4], [30.0, 40.0]])  # the median of the nonzero norms is 5
    for row, size in ((0, 5.0), (1, 5.0), (2, 5.0), (3, 50.0)):
        actual = exact.clone()
        actual[row, 0] += 1.0
        assert row_error(actual, exact) == pytest.approx(1 / size)
    assert row_error(exact, exact) == 0.0 and row_error(exact[:0], exact[:0]) == 0.0
    assert row_error(0 * exact + 1e-3, 0 * exact, least=1.0) == pytest.approx(1e-3)
    empty = torch.tensor([1.0, -torch.inf])  # -inf is the logarithm of an empty sum
    assert row_error(empty, empty) == 0.0 and row_error(torch.ones(2), empty) > 0.5
