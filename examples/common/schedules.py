"""Learning-rate schedules that transformers does not have."""

from bisect import bisect_right

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def milestone_schedule(
    optimizer: Optimizer, warmup_steps: int, milestones: list[int], factor: float, start: float = 0.0
) -> LambdaLR:
    """Warm up linearly, then stay constant, multiplied by `factor` at each of `milestones` (steps in order).

    The warm-up begins at the share `start` of the learning rate.
    """

    def share(step: int) -> float:
        warm = min(1.0, start + (1 - start) * step / max(1, warmup_steps))
        return warm * factor ** bisect_right(milestones, step)

    return LambdaLR(optimizer, share)


def power_warmup_schedule(optimizer: Optimizer, warmup_steps: int, total_steps: int, power: float) -> LambdaLR:
    """Warm up from 0 with the `power` of the step, then fall linearly to 0 at `total_steps`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step / warmup_steps) ** power
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    return LambdaLR(optimizer, factor)
