"""Compare tensors position by position."""

import math

import torch
from torch import Tensor

# The greatest error of a row: a few roundings of results and of intermediate values.
ROUNDING = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 3e-2}


def row_error(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the largest error of a row `[..., position, :]`; NaN if one is NaN.

    The norm of all positions hides a lost one: of 1,000 positions, it is off by 3 %. An error is relative to the norm
    of its row, but at least to the median of all rows that are not 0, and to `least` per element. Infinities are 0.
    """
    dtype = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
    pair = (torch.nan_to_num(x.detach().to(dtype), nan=math.nan, posinf=0.0, neginf=0.0) for x in (actual, expected))
    actual, expected = (x.reshape(-1, x.shape[-1] if x.dim() else 1) for x in pair)
    if not expected.numel():
        return 0.0
    sizes = expected.norm(dim=1)
    used = sizes[sizes > 0]
    typical = used.median() if used.numel() else sizes.new_zeros(())
    smallest = max(typical.item(), least * expected.shape[1] ** 0.5, torch.finfo(dtype).tiny)
    return ((actual - expected).norm(dim=1) / sizes.clamp(min=smallest)).max().item()
