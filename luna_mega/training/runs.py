"""Steps of a training script: checks of the options, training, evaluation and output files."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

from luna_mega.hub.bundle import register_for_auto_class
from luna_mega.training.arguments import RunArguments, check_launch, check_least, fail
from luna_mega.training.hub import check_hub, describe_source
from luna_mega.training.models import CheckpointArguments
from luna_mega.training.resuming import find_checkpoint, load_finished
from luna_mega.training.seeded import SeededSampler
from luna_mega.training.tokenizers import remove_truncation
from luna_mega.training.weight_average import add_average

DIVERGED = "Lower --learning_rate, raise --warmup_steps, or train in float32"


class OrderedTrainer(Trainer):
    """Trainer with predictions in the order of the dataset, and losses independent of the number of processes.

    transformers' Trainer also groups the evaluation set by length, so that predictions do not match their rows. Its
    `eval_loss` is the mean over batches and counts padded examples of the last batch twice.

    Attributes:
        weight_average: `WeightAverage` that is evaluated instead of the weights.
    """

    weight_average = None

    def __init__(self, model: torch.nn.Module, args: TrainingArguments, **options: Any):
        needed, split = args.train_batch_size * args.world_size, options.get("train_dataset")
        if args.do_train and args.world_size > 1 and has_length(split) and len(split) < needed:
            batch = f"{args.world_size} processes with --per_device_train_batch_size {args.per_device_train_batch_size}"
            fail(f"{batch} need {needed} examples for a batch; the split train has {len(split)}")
        if args.push_to_hub:
            with suppress(ValueError):  # other models, and classes without an Auto class
                register_for_auto_class(model)
        super().__init__(model, args, **options)

    def averaged(self) -> AbstractContextManager:
        """Return a context in which the model has the averaged weights, if they exist."""
        return nullcontext() if self.weight_average is None else self.weight_average.in_place(self.model)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset = train_dataset or self.train_dataset
        # Lengths of the unchanged examples: changing all of them would take as long as an epoch.
        sampler = super()._get_train_sampler(getattr(dataset, "examples", dataset))
        # The order by length of Trainer depends on all random numbers drawn before.
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        return SeededSampler(sampler, self.args.seed)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        return SequentialSampler(eval_dataset)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        self.losses = [0.0, 0.0]  # sum and count
        averages, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            with self.averaged():
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
        super()._save_checkpoint(model, trial)

    def report(self, scores: dict[str, float], prefix: str) -> dict[str, float]:
        """Log the scores of an evaluation, and return them with the prefix."""
        metrics = {f"{prefix}_{name}": value for name, value in scores.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _kept(self, labels: torch.Tensor | None) -> int:
        """Return the number of examples of a batch without those that Accelerate repeats to fill the last batch."""
        state, size = self.accelerator.gradient_state, 0 if labels is None else len(labels)
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return size
        return min(max(state.remainder - self.args.process_index * size, 0), size)


def check_run(
    title: str,
    data: object,
    model: CheckpointArguments,
    training: TrainingArguments,
    run: RunArguments,
    streams: bool = False,
    predicts: bool = True,
) -> None:
    """Prepare the processes, and exit if options contradict each other.

    `streams` and `predicts` specify whether the task `title` supports `--streaming` and `--do_predict`.
    """
    check_launch(training.world_size)
    if training.world_size > 1 and training.device.type == "cpu":  # Trainer sets ddp_timeout only for accelerators
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=training.ddp_timeout))
    if training.do_predict and not predicts:
        fail(f"--do_predict: a {title} has no test predictions; pass --do_eval")
    if not (training.do_train or training.do_eval or training.do_predict):
        fail("nothing to do; pass --do_train, --do_eval or --do_predict")
    if not (training.do_train or model.model_name_or_path):
        fail("--do_eval and --do_predict without --do_train need --model_name_or_path")
    if getattr(data, "early_stopping_patience", None) is not None:
        check_least(data, 1, "early_stopping_patience")
        if not training.load_best_model_at_end:
            needed = "--load_best_model_at_end with equal --eval_strategy and --save_strategy"
            fail(f"--early_stopping_patience needs {needed}")
    if training.push_to_hub or training.hub_token or model.license:
        check_hub(training, model.license)
    if run.streaming and not streams:
        fail(f"--streaming: {title} loads its data; only texts of language models can be streamed")
    if not 0.0 <= run.ema_decay < 1.0:
        fail(f"--ema_decay {run.ema_decay} must be in [0, 1)")
    if run.ema_decay and not training.do_train:
        fail("--ema_decay requires --do_train")
    if run.ema_decay and training.load_best_model_at_end:
        fail("--ema_decay saves the average of the last step; remove --load_best_model_at_end")
    if training.include_num_input_tokens_seen == "no":  # Trainer logs the speed of counted tokens
        training.include_num_input_tokens_seen = "non_padding"


def count_broken(state: dict[str, torch.Tensor]) -> int:
    """Return the number of tensors, or of their local shards, with values that are not finite."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in state.values()]
    return sum(not torch.isfinite(tensor).all() for tensor in local if tensor.is_floating_point())


def check_model(trainer: Trainer) -> None:
    """Exit unless the training loss and all weights are finite."""
    losses = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    (broken,) = total([float(count_broken(trainer.model.state_dict()))], trainer.args)
    if broken or not all(map(math.isfinite, losses[-1:])):
        fail(
            f"the training diverged: train_loss={losses[-1] if losses else None} and {broken:.0f} tensors of weights "
            f"are not finite; no model was saved. {DIVERGED}"
        )


class DivergenceCallback(TrainerCallback):
    """Exit at the first logged gradient norm that is NaN."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if (
            math.isnan(float((logs or {}).get("grad_norm", 0.0))) and not args.fp16
        ):  # the gradient scaler skips such steps
            fail(f"the gradients are NaN at step {state.global_step}; no model was saved. {DIVERGED}")


class EpochCallback(TrainerCallback):
    """Set the epoch of dataset and sampler, which Accelerate omits with several processes and in a resumed epoch."""

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs) -> None:
        epoch = int(state.epoch + 1e-6)
        for part in (train_dataloader, train_dataloader.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


def begin_run(data: object, model: CheckpointArguments, training: TrainingArguments, run: RunArguments) -> None:
    """Find the checkpoint to resume from, and set the seed.

    A resumed run loads configuration and tokenizer from its checkpoint, even if it was started from scratch.
    """
    files = ["weight_average.pt"] if run.ema_decay else []
    run.base_model, run.license, run.source = model.model_name_or_path, model.license, describe_source(data)
    run.checkpoint = find_checkpoint(training, *files)
    model.model_name_or_path = run.checkpoint or run.base_model
    set_seed(training.seed)


def make_callbacks(data: object) -> list[TrainerCallback]:
    """Return the callbacks for epochs, divergence and, with `--early_stopping_patience`, early stopping."""
    patience = getattr(data, "early_stopping_patience", None)
    return [EpochCallback(), DivergenceCallback(), *([EarlyStoppingCallback(patience)] if patience else [])]


def total(values: list[float], training: TrainingArguments) -> list[float]:
    """Return the sums of `values` over all processes."""
    if training.world_size == 1:
        return values
    sums = torch.tensor(values, dtype=torch.float64, device=training.device)
    dist.all_reduce(sums)
    return sums.tolist()


def save(trainer: Trainer, split: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Log and save the metrics of a split; return them. The loss of rows without labels is NaN, and is omitted."""
    metrics = {name: value for name, value in metrics.items() if value == value}
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)
    return metrics


def train(trainer: Trainer, run: RunArguments) -> dict[str, Any]:
    """With `--do_train`, train and save the model; return the metrics."""
    if not trainer.args.do_train:
        return {}
    if run.ema_decay:
        add_average(trainer, run.ema_decay, run.checkpoint)
    if run.checkpoint and load_finished(trainer, run.checkpoint):
        metrics = {"epoch": trainer.state.epoch}
    else:
        metrics = trainer.train(resume_from_checkpoint=run.checkpoint).metrics
    check_model(trainer)
    if trainer.is_fsdp_enabled:  # for the final model
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(_internal_call=True)  # `publish` pushes the model with its card
    trainer.save_state()
    if has_length(trainer.train_dataset):
        metrics["train_samples"] = len(trainer.train_dataset)
    return save(trainer, "train", metrics)


def score(trainer: Trainer) -> dict[str, float]:
    """With `--do_eval`, evaluate and save the metrics; return them."""
    if not trainer.args.do_eval:
        return {}
    metrics = trainer.evaluate()
    if broken := [name for name, value in metrics.items() if name.endswith("_loss") and not math.isfinite(value)]:
        fail(f"{broken[0]} is {metrics[broken[0]]}; the model is not published. {DIVERGED}")
    return save(trainer, "eval", metrics)


def write_lines(trainer: Trainer, name: str, lines: Iterable[str]) -> None:
    """Write `lines` to the file `name` in the output folder."""
    path = Path(trainer.args.output_dir, name)
    if trainer.is_world_process_zero():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
