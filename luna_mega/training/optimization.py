"""Optimizers, gradient clipping and learning-rate schedules that transformers does not provide."""

from bisect import bisect_right
from typing import Any

from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainingArguments

from luna_mega.training.arguments import one_line


def milestone_schedule(
    optimizer: Optimizer, warmup_steps: int, milestones: list[int], factor: float, start: float = 0.0
) -> LambdaLR:
    """Return a schedule with linear warmup from `start`, multiplied by `factor` at each milestone."""

    def share(step: int) -> float:
        warm = min(1.0, start + (1 - start) * step / max(1, warmup_steps))
        return warm * factor ** bisect_right(milestones, step)

    return LambdaLR(optimizer, share)


def power_warmup_schedule(optimizer: Optimizer, warmup_steps: int, total_steps: int, power: float) -> LambdaLR:
    """Return a schedule with warmup by the `power` of the step, then linear decay to 0 at `total_steps`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step / warmup_steps) ** power
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))

    return LambdaLR(optimizer, factor)


def apollo(training: TrainingArguments) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class and the options of the optimizer Apollo (Ma 2020), which is not transformers' `apollo_adamw`.

    `adam_beta1` and `adam_epsilon` are its beta and epsilon. Weight decay is L2, as in its code.
    """
    with one_line("--apollo requires `pip install 'pytorch_optimizer>=4.1'`"):
        from pytorch_optimizer import ApolloDQN
    options = {"lr": training.learning_rate, "beta": training.adam_beta1, "eps": training.adam_epsilon}
    return ApolloDQN, options | {"warmup_steps": 0}  # its warmup would replace the schedule


class ClipEach(TrainerCallback):
    """Clip the gradient of each parameter separately to the norm `limit`."""

    def __init__(self, limit: float):
        self.limit = limit

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                clip_grad_norm_(parameter, self.limit)
