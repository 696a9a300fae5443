"""An exponential moving average of the weights, kept beside a training run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from common.arguments import fail

FILE_NAME = "weight_average.pt"


def add_average(trainer: Trainer, decay: float, checkpoint: str | None) -> None:
    """Let a trainer that can evaluate the average (OrderedTrainer) keep it; `checkpoint` is the one that is resumed."""
    if not hasattr(trainer, "weight_average"):
        fail(f"--ema_decay {decay}: {type(trainer).__name__} evaluates the weights as they are; leave it out")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        fail(f"--ema_decay {decay}: not where the weights are sharded; train with DDP, or without it")
    trainer.weight_average = WeightAverage(decay, checkpoint)
    trainer.add_callback(trainer.weight_average)


class WeightAverage(TrainerCallback):
    """Updates the average after every step, saves it with every checkpoint, and leaves it in the model at the end."""

    def __init__(self, decay: float, checkpoint: str | None):
        self.decay, self.checkpoint = decay, checkpoint
        self.average: AveragedModel | None = None

    def on_train_begin(self, args, state, control, model: nn.Module, **kwargs):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay), use_buffers=True)
        if self.checkpoint is not None:
            self.average.load_state_dict(torch.load(Path(self.checkpoint, FILE_NAME), weights_only=True))

    def on_step_end(self, args, state, control, model: nn.Module, **kwargs):
        self.average.update_parameters(model)

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            torch.save(self.average.state_dict(), folder / FILE_NAME)

    def on_train_end(self, args, state, control, model: nn.Module, **kwargs):
        model.load_state_dict(self.average.module.state_dict())
        self.average = None

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Put the average into `model` inside the block."""
        if self.average is None:
            yield
            return
        trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(self.average.module.state_dict())
        try:
            yield
        finally:
            model.load_state_dict(trained)
