"""The processes of a training run, beside those that share sequences: whether there are others, and sums over all."""

import torch
import torch.distributed as dist
from torch.autograd import Function


def are_joined() -> bool:
    """Return whether a default group of processes exists."""
    return dist.is_available() and dist.is_initialized()


def has_peers() -> bool:
    """Return whether there are other processes."""
    return are_joined() and dist.get_world_size() > 1


class _SumOverProcesses(Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return _SumOverProcesses.apply(grad)


def sum_over_processes(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of `x` over all processes of the default group; its gradient is summed as well."""
    return _SumOverProcesses.apply(x)
