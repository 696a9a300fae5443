"""The error measure for the results of kernels."""

import torch

from luna_mega.kernels.common.comparison import row_error


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative norm of the error, or a quarter of the largest row error if that is greater.

    The norm over all positions hides one wrong position, and single rows have larger rounding errors than the total.
    Both errors are absolute for small results (with one key, the gradient of the query is 0).
    """
    total = ((actual.double() - exact).norm() / exact.norm().clamp(min=1.0)).item()
    return max(total, row_error(actual, exact, least=5e-2) / 4)
