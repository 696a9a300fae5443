"""Apollo, and the clipping of gradients one by one, which Luna's translation models need and Trainer lacks."""

from typing import Any

from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainingArguments

from common.arguments import fail


def apollo(training: TrainingArguments) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return Apollo (Ma 2020) and its options, as Trainer takes them. It is not transformers' `apollo_adamw`.

    `adam_beta1` and `adam_epsilon` are its beta and epsilon; the weight decay is L2, as in its code.
    """
    try:
        from pytorch_optimizer import ApolloDQN
    except ImportError:
        fail("--apollo needs the package pytorch_optimizer: pip install 'pytorch_optimizer>=4.1'")
    options = {"lr": training.learning_rate, "beta": training.adam_beta1, "eps": training.adam_epsilon}
    return ApolloDQN, options | {"warmup_steps": 0}  # its own warm-up would win over the schedule


class ClipEach(TrainerCallback):
    """Clipping of every parameter's gradient to the norm `limit`, each by itself."""

    def __init__(self, limit: float):
        self.limit = limit

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                clip_grad_norm_(parameter, self.limit)
