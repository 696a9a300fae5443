"""Data-parallel processes of a training run."""

import torch.distributed as dist


def are_joined() -> bool:
    """Return whether the default process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def has_peers() -> bool:
    """Return whether the default process group has more than one process."""
    return are_joined() and dist.get_world_size() > 1
