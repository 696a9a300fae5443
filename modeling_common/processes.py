"""The data-parallel processes of a training run."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function


def are_joined() -> bool:
    """Return whether the default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def has_peers() -> bool:
    """Return whether the default process group has more than one process."""
    return are_joined() and dist.get_world_size() > 1


def all_reduce_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of `x` over the default process group. The backward sums the gradients."""
    return _AllReduceSum.apply(x)


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _AllReduceSum.apply(grad)
