"""Averages of weights: an exponential moving average during training, and the mean of several checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import SAFE_WEIGHTS_NAME

from luna_mega.training.arguments import fail

FILE_NAME = "weight_average.pt"


def add_average(trainer: Trainer, decay: float, checkpoint: str | None) -> None:
    """Add a `WeightAverage` to an `OrderedTrainer`; `checkpoint` is the one to resume from."""
    if not hasattr(trainer, "weight_average"):
        fail(f"--ema_decay {decay}: {type(trainer).__name__} does not support weight averages; remove it")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        fail(f"--ema_decay {decay}: sharded weights are not supported; train with DDP, or remove it")
    trainer.weight_average = WeightAverage(decay, checkpoint)
    trainer.add_callback(trainer.weight_average)


class WeightAverage(TrainerCallback):
    """Update the average after each step, save it with each checkpoint, and copy it to the model after training."""

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
        """Context in which `model` has the averaged weights."""
        if self.average is None:
            yield
            return
        trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(self.average.module.state_dict())
        try:
            yield
        finally:
            model.load_state_dict(trained)


def choose_checkpoints(folder: str, count: int, metric: str | None) -> list[Path]:
    """Return the last `count` checkpoints in `folder` or, with a `metric`, the best ones.

    Higher values are better unless the name ends with "loss".
    """
    checkpoints = [path for path in map(Path, sort_checkpoints(folder)) if (path / SAFE_WEIGHTS_NAME).is_file()]
    if len(checkpoints) < count:
        fail(f"{folder} has {len(checkpoints)} checkpoints, too few for --average_checkpoints {count}")
    if metric is not None:
        history = TrainerState.load_from_json(str(checkpoints[-1] / TRAINER_STATE_NAME)).log_history
        scores = {f"{PREFIX_CHECKPOINT_DIR}-{entry['step']}": entry[metric] for entry in history if metric in entry}
        if unknown := [path.name for path in checkpoints if path.name not in scores]:
            fail(f"{unknown[0]} has no {metric}; evaluate whenever a checkpoint is saved")
        checkpoints.sort(key=lambda path: scores[path.name], reverse=metric.endswith("loss"))
    return checkpoints[-count:]


def average(checkpoints: list[Path]) -> dict[str, torch.Tensor]:
    """Return the mean of the weights, summed in float32; integer tensors come from the last checkpoint."""
    total: dict[str, torch.Tensor] = {}
    for path in checkpoints:
        weights = load_file(path / SAFE_WEIGHTS_NAME)
        if total and total.keys() != weights.keys():
            fail(f"{path} contains another model than {checkpoints[0]}")
        for name, tensor in weights.items():
            summed = tensor.is_floating_point() and name in total
            total[name] = total[name] + tensor.float() if summed else tensor
    return {
        name: (total[name] / len(checkpoints)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
