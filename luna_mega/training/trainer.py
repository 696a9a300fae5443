"""Trainer whose results do not depend on the number of processes or on interruptions, and its callbacks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler
from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from luna_mega.hub.folder import remove_truncation
from luna_mega.training.arguments import fail
from luna_mega.training.streams import SeededSampler, Stream, TokenBatches, order_seed

RUN_STATE_NAME = "run_state.pt"  # file in a checkpoint, see `OrderedTrainer.run_state`
DIVERGED = "Lower --learning_rate, raise --warmup_steps, or train in float32"


class OrderedTrainer(Trainer):
    """Trainer with predictions in the order of the dataset, and losses independent of the number of processes.

    It also supports a `Stream` as training data, and other schedules and rules of weight decay. Losses of a resumed run
    equal those of an uninterrupted run.

    transformers' Trainer also groups the evaluation set by length, so that predictions do not match their rows. Its
    `eval_loss` is the mean over batches and counts padded examples of the last batch twice.

    Attributes:
        schedule: Function that returns the schedule of the learning rate, instead of `lr_scheduler_type`, from the
            optimizer and the numbers of warmup steps and of all steps.
        decays: Function of the name and the value of a parameter that returns whether it has weight decay, instead of
            all except biases and norms.
        max_tokens: Maximum tokens of a training batch on each device. A `datasets.Dataset` needs a column `lengths`
            with the lengths of the sides of an example, and `per_device_train_batch_size` has no effect; the collator
            of other data shortens their batches.
    """

    first_step = 0  # step after which losses are summed
    schedule: Callable[[Optimizer, int, int], LRScheduler] | None = None
    decays: Callable[[str, torch.nn.Parameter], bool] | None = None
    max_tokens: int | None = None

    def __init__(self, model: torch.nn.Module, args: TrainingArguments, **options: Any):
        needed, split = args.train_batch_size * args.world_size, options.get("train_dataset")
        self.by_tokens = self.max_tokens is not None and isinstance(split, datasets.Dataset)
        if args.do_train and not self.by_tokens and args.world_size > 1 and has_length(split) and len(split) < needed:
            batch = f"{args.world_size} processes with --per_device_train_batch_size {args.per_device_train_batch_size}"
            fail(f"{batch} need {needed} examples for a batch; the split train has {len(split)}")
        super().__init__(model, args, **options)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        if self.schedule is not None and self.lr_scheduler is None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            self.lr_scheduler = self.schedule(optimizer or self.optimizer, warmup, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        if self.decays is None:
            return super().get_decay_parameter_names(model)
        return [name for name, parameter in model.named_parameters() if self.decays(name, parameter)]

    def get_train_dataloader(self) -> DataLoader:
        split, args = self.train_dataset, self.args
        if not self.by_tokens and not isinstance(split, Stream):
            return super().get_train_dataloader()
        collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
        options = {
            "collate_fn": collator,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
        }
        if not self.by_tokens:  # the stream is already distributed; Accelerate would distribute it again
            return DataLoader(split, args.train_batch_size, **options)
        lengths = np.asarray(split.with_format("numpy", columns=["lengths"])["lengths"][:])
        batches = TokenBatches(lengths, self.max_tokens * max(1, args.n_gpu), args.world_size, order_seed(args))
        # Accelerate of 2024 can make batches even only if they have one size; these are even.
        even, self.accelerator.even_batches = self.accelerator.even_batches, False
        try:
            return self.accelerator.prepare(DataLoader(split, batch_sampler=batches, **options))
        finally:
            self.accelerator.even_batches = even

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset = train_dataset or self.train_dataset
        # Lengths of the unchanged examples: changing all of them would take as long as an epoch.
        sampler = super()._get_train_sampler(getattr(dataset, "examples", dataset))
        # The order by length of Trainer, and Accelerate's without its own sampler, depend on all random numbers before.
        if isinstance(sampler, LengthGroupedSampler) or not self.args.accelerator_config.use_seedable_sampler:
            return SeededSampler(sampler, order_seed(self.args))
        return sampler

    def _get_dataloader(self, *args, is_training: bool = False, **kwargs) -> DataLoader:
        # Trainer's option would also leave out the last rows of evaluations and predictions.
        drops = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = drops and is_training
        try:
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_drop_last = drops

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        return SequentialSampler(eval_dataset)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        self.losses = [0.0, 0.0]  # sum and count
        averages, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            self.args.average_tokens_across_devices = averages
        loss, count = total(self.losses, self.args)
        if count:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / count
        return output

    def prediction_step(self, model, inputs, *args, **kwargs):
        labels = inputs.get("labels")
        count = kept = self._kept(labels)
        regression = labels is not None and labels.is_floating_point()
        if labels is not None and not regression:
            inputs["labels"] = labels = labels.clone()
            labels[kept:] = -100  # ignored by the loss
            count = int((labels != -100).sum())
        loss, logits, found = super().prediction_step(model, inputs, *args, **kwargs)
        logits = logits[0] if isinstance(logits, tuple) else logits  # without the states of an encoder, as of BART
        if count and loss is not None:
            if regression:
                loss = (logits[:kept].float().view_as(found[:kept]) - found[:kept]).square().mean()
            self.losses = [self.losses[0] + float(loss) * count, self.losses[1] + count]
        return loss, logits, found

    def _save(self, output_dir=None, state_dict=None):
        remove_truncation(self.processing_class)
        super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model, trial) -> None:
        check_model(self)  # Trainer also pushes checkpoints
        state = self.run_state()
        if self.args.should_save:
            folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / RUN_STATE_NAME)  # before Trainer writes the file that completes the checkpoint
        super()._save_checkpoint(model, trial)

    def run_state(self) -> dict[str, Any]:
        """Return what changes during training and is in no other file of a checkpoint: the sums of the losses."""
        since_log = total([float(self._tr_loss)], self.args)[0] / self.args.world_size
        return {"losses": (since_log, self._total_loss_scalar, self._globalstep_last_logged)}

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Continue with a state of `run_state`; it is empty for checkpoints of earlier versions."""
        self.first_step = 0 if state else self.state.global_step
        if state:
            since_log, self._total_loss_scalar, self._globalstep_last_logged = state["losses"]
            self._tr_loss.fill_(since_log)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "train_loss" in logs:  # Trainer's is the mean over the steps after resuming
            if self.max_tokens is not None:  # Trainer's number of samples is that of equal batches
                logs.pop("train_samples_per_second", None)
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step - self.first_step, 1)
        super().log(logs, *args, **kwargs)

    def report(self, scores: dict[str, float], prefix: str) -> dict[str, float]:
        """Log the scores of an evaluation, and return them with the prefix."""
        metrics = {f"{prefix}_{name}": value for name, value in scores.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _kept(self, labels: torch.Tensor | None) -> int:
        """Return the number of examples in a batch without those that Accelerate repeats to fill the last batch."""
        state, size = self.accelerator.gradient_state, 0 if labels is None else len(labels)
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return size
        return min(max(state.remainder - self.args.process_index * size, 0), size)


class DivergenceCallback(TrainerCallback):
    """Exit at the first logged gradient norm that is NaN."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        is_nan = math.isnan(float((logs or {}).get("grad_norm", 0.0)))
        if is_nan and not args.fp16:  # the gradient scaler skips such steps
            fail(f"the gradients are NaN at step {state.global_step}; no model was saved. {DIVERGED}")


class ProgressBar(ProgressCallback):
    """Progress bar that estimates the remaining time without the first step and the steps before a resumed run.

    The first step also loads libraries and allocates memory, and can take 20 times as long as the others.
    """

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero and self.current_step == 0:
            bar, self.current_step = self.training_bar, state.global_step
            bar.n = bar.last_print_n = bar.initial = state.global_step
            bar.unpause()
            bar.refresh()
        else:
            super().on_step_end(args, state, control, **kwargs)


class ResumeCallback(TrainerCallback):
    """Load the state of the run from a checkpoint when the training begins."""

    def __init__(self, trainer: OrderedTrainer, checkpoint: str):
        self.trainer, self.file = trainer, Path(checkpoint, RUN_STATE_NAME)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        saved = torch.load(self.file, map_location=args.device, weights_only=True) if self.file.exists() else {}
        self.trainer.load_run_state(saved)
        # Trainer requires the entry, which is missing if the run had no early stopping.
        state.stateful_callbacks.setdefault(EarlyStoppingCallback.__name__, {})


class EpochCallback(TrainerCallback):
    """Set the epoch of dataset and sampler, which Accelerate omits with several processes and in a resumed epoch.

    A checkpoint at the end of an epoch is saved after the logs and evaluations of that epoch, because a run that
    resumes there continues with the next epoch.
    """

    saves_epoch = False

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.saves_epoch = control.should_save and state.epoch == int(state.epoch)
        control.should_save = control.should_save and not self.saves_epoch

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        control.should_save = control.should_save or self.saves_epoch
        self.saves_epoch = False

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs) -> None:
        epoch = int(state.epoch + 1e-6)
        for part in (train_dataloader, train_dataloader.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


def check_model(trainer: Trainer) -> None:
    """Exit unless the training loss and all weights are finite."""
    losses = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    weights = trainer.model.state_dict().values()
    shards = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in weights]
    own = sum(not torch.isfinite(tensor).all() for tensor in shards if tensor.is_floating_point())
    (broken,) = total([float(own)], trainer.args)
    if broken or not all(map(math.isfinite, losses[-1:])):
        fail(
            f"the training diverged: train_loss={losses[-1] if losses else None} and {broken:.0f} tensors of weights "
            f"are not finite; no model was saved. {DIVERGED}"
        )


def total(values: list[float], training: TrainingArguments) -> list[float]:
    """Return the sums of `values` over all processes."""
    if training.world_size == 1:
        return values
    sums = torch.tensor(values, dtype=torch.float64, device=training.device)
    dist.all_reduce(sums)
    return sums.tolist()
