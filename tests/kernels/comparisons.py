"""The error measure for the results of kernels."""

from collections.abc import Iterable

import torch

from luna_mega.kernels.common.comparison import row_error


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative norm of the error, or a quarter of the largest row error if that is greater.

    The norm over all positions hides one wrong position, and single rows have larger rounding errors than the total.
    Both errors are absolute for small results (with one key, the gradient of the query is 0).
    """
    total = ((actual.double() - exact).norm() / exact.norm().clamp(min=1.0)).item()
    return max(total, row_error(actual, exact, least=5e-2) / 4)


def assert_same(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], bound: float = 1e-12) -> None:
    """Check that the error of every tensor and of each of its rows is at most `bound`."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == b.shape, f"tensor {index}: shape {list(a.shape)} instead of {list(b.shape)}"
        error = relative_error(a, b.double())
        assert error <= bound, f"tensor {index}: error {error:.1e}"
