"""Learning-rate schedules that transformers does not have."""

from bisect import bisect_right

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def milestone_schedule(optimizer: Optimizer, warmup_steps: int, milestones: list[int], factor: float) -> LambdaLR:
    """Warm up linearly from 0, then stay constant, multiplied by `factor` at each of `milestones` (steps in order)."""
    return LambdaLR(
        optimizer, lambda step: min(1.0, step / max(1, warmup_steps)) * factor ** bisect_right(milestones, step)
    )
