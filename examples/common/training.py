"""Steps of a training script: check what it is asked for, train, evaluate, write files, sum up."""

import logging
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

import luna_mega
from common.arguments import fail
from common.hub import check_hub
from common.model import CheckpointArguments
from common.report import SpeedCallback, measure_peak, peak_memory_gb, plot_curve, print_table, save_json, throughput
from common.scale import Redrawn, SeededSampler, total
from common.weight_average import WeightAverage

logger = logging.getLogger(__name__)

NOT_SHARDED = ", not FSDP: accelerate does not shard on CPUs"
PARALLEL = {
    DistributedType.NO: "none",
    DistributedType.MULTI_CPU: "DDP",
    DistributedType.MULTI_GPU: "DDP",
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
}


class OrderedTrainer(Trainer):
    """Trainer whose predictions are in the order of the data set, and whose losses do not depend on the processes.

    Trainer itself groups the evaluation by length as well as training, and predictions then no longer match their rows.
    Its `eval_loss` is the mean over batches, in which the last examples are doubled where processes share them.

    Attributes:
        sequences: how many this process was trained on; a pair is one.
        pair_tokens: tokens of the second sequences of pairs among them, which Trainer does not count.
        weight_average: average of the weights, which is evaluated in their place.
    """

    sequences = 0
    pair_tokens = 0
    weight_average: WeightAverage | None = None

    def averaged(self) -> AbstractContextManager:
        """Return a context in which the model has the average of the weights, if there is one."""
        return nullcontext() if self.weight_average is None else self.weight_average.in_place(self.model)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset = train_dataset or self.train_dataset
        # Lengths are read from the examples as they are: to alter all of them takes as long as an epoch of reading.
        sampler = super()._get_train_sampler(dataset.examples if isinstance(dataset, Redrawn) else dataset)
        # Trainer draws this order from the numbers that everything is drawn from, where they stand.
        return SeededSampler(sampler, self.args.seed) if isinstance(sampler, LengthGroupedSampler) else sampler

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        return SequentialSampler(eval_dataset)

    def get_train_dataloader(self) -> DataLoader:
        if not isinstance(self.train_dataset, IterableDataset):
            return super().get_train_dataloader()
        # A stream has each process's part already; accelerate would divide it again.
        options = {"num_workers": self.args.dataloader_num_workers, "pin_memory": self.args.dataloader_pin_memory}
        collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
        return DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=collator, **options)

    def training_step(self, model, inputs, *args, **kwargs) -> torch.Tensor:
        self.sequences += inputs[self.model.main_input_name].shape[:-1].numel()
        if "pair_attention_mask" in inputs:
            self.pair_tokens += int(inputs["pair_attention_mask"].sum())
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        self.losses = [0.0, 0.0]  # their sum, and of how many
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
            labels[kept:] = -100  # the loss leaves them out
            count = int((labels != -100).sum())
        loss, logits, found = super().prediction_step(model, inputs, *args, **kwargs)
        if count and loss is not None:
            if regression:
                loss = (logits[:kept].float().view_as(found[:kept]) - found[:kept]).square().mean()
            self.losses = [self.losses[0] + float(loss) * count, self.losses[1] + count]
        return loss, logits, found

    def _kept(self, labels: torch.Tensor | None) -> int:
        """Return how many examples of a batch are this process's own: the last batch is filled with the first ones."""
        state, size = self.accelerator.gradient_state, 0 if labels is None else len(labels)
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return size
        return min(max(state.remainder - self.args.process_index * size, 0), size)


def check_training(
    training: TrainingArguments, model: CheckpointArguments, early_stopping_patience: int | None
) -> None:
    """End the script when it has nothing to do or no model to do it with; ask Trainer to count tokens.

    Says so where bfloat16 costs time: on a CPU that has no instructions for it.
    """
    if not (training.do_train or training.do_eval or training.do_predict):
        fail("nothing to do: pass --do_train, --do_eval or --do_predict")
    if not (training.do_train or model.model_name_or_path):
        fail("--do_eval and --do_predict without --do_train need --model_name_or_path")
    if early_stopping_patience and not training.load_best_model_at_end:
        fail("--early_stopping_patience needs --load_best_model_at_end with equal --eval_strategy and --save_strategy")
    check_hub(training)
    if training.include_num_input_tokens_seen == "no":
        training.include_num_input_tokens_seen = "non_padding"
    if training.bf16 and training.device.type == "cpu" and training.process_index == 0:
        half, full = (measure_peak(dtype, side=512) for dtype in (torch.bfloat16, torch.float32))
        if half < full:
            logger.warning("--bf16 is slow here: products take %.1fx as long as with --bf16 false", full / half)


def describe(trainer: Trainer, model: str) -> dict[str, Any]:
    """Return the first entries of the summary; `model` is what the run began from."""
    asked = trainer.args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    asked = asked and not trainer.is_fsdp_enabled
    return {
        "model": model,
        "seed": trainer.args.seed,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "device": str(trainer.args.device),
        "processes": trainer.args.world_size,
        "parallel": PARALLEL[trainer.accelerator.distributed_type] + (NOT_SHARDED if asked else ""),
        "luna_mega": luna_mega.__version__,
    }


def take_finished(trainer: Trainer, checkpoint: str | None) -> bool:
    """Take the state of a checkpoint, whose weights the model has, if it has all steps; return whether it has.

    Trainer would train one step more.
    """
    if checkpoint is None:
        return False
    args, state = trainer.args, TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    if not 0 < args.max_steps <= state.global_step:
        return False
    trainer.state = state
    if args.load_best_model_at_end and state.best_model_checkpoint:
        trainer._load_best_model()
    if average := getattr(trainer, "weight_average", None):
        average.on_train_begin(args, state, trainer.control, model=trainer.model)
        average.on_train_end(args, state, trainer.control, model=trainer.model)
    return True


def train(
    trainer: Trainer, checkpoint: str | None, peak_flops: float | None = None, head_share: float = 1.0
) -> dict[str, Any]:
    """Train and save the model; return entries of the summary.

    The last two arguments are those of `throughput`.
    """
    speed = SpeedCallback()
    trainer.add_callback(speed)
    if take_finished(trainer, checkpoint):
        speed.on_train_begin(trainer.args, trainer.state, trainer.control)
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_fsdp_enabled:  # shards are for checkpoints; the model is saved whole
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(_internal_call=True)  # pushed at the end, with its card
    trainer.save_state()
    args = trainer.args
    speeds = {}
    if speed.tokens:
        sequences, pair_tokens = total([trainer.sequences, trainer.pair_tokens], args)
        tokens, sequences = speed.tokens + pair_tokens, sequences * (2 if pair_tokens else 1)
        model, length = trainer.accelerator.unwrap_model(trainer.model), max(round(tokens / sequences), 1)
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        rate = tokens / speed.seconds
        speeds = throughput(model, length, rate, args.world_size, args.device, dtype, peak_flops, head_share)
    elif (tokens := trainer.state.num_input_tokens_seen) and speed.total_seconds:
        speeds = {"tokens_per_second": tokens / speed.total_seconds}
    return {
        "train_samples": len(trainer.train_dataset) if has_length(trainer.train_dataset) else None,
        "epochs": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "train_seconds": speed.total_seconds,
        **speeds,
        "best_checkpoint": trainer.state.best_model_checkpoint,
    }


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Evaluate and save the metrics; return entries of the summary."""
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    unread = ("_runtime", "_per_second", "epoch", "tokens_seen")
    return {name: value for name, value in metrics.items() if not name.endswith(unread)}


def write_lines(trainer: Trainer, name: str, lines: Iterable[str]) -> str:
    """Write `lines` to the file `name` of the output folder and return its path."""
    path = Path(trainer.args.output_dir, name)
    if trainer.is_world_process_zero():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def finish(trainer: Trainer, title: str, summary: dict[str, Any], curves: list[str], start: float) -> dict[str, Any]:
    """Complete, print and save the summary, with the `curves` as PNG; `start` is when the script began."""
    if not trainer.is_world_process_zero():
        return summary
    output = Path(trainer.args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    if trainer.args.do_train:
        plot_curve({"": trainer.state.log_history}, curves, f"{title}: {summary['model']}", output / "curve.png")
        summary["curve"] = str(output / "curve.png")
    summary |= {
        "peak_memory_gb": peak_memory_gb(trainer.args.device),
        "total_seconds": time.perf_counter() - start,
        "output_dir": str(output),
    }
    save_json(summary, output / "summary.json")
    print_table(title, {name: value for name, value in summary.items() if (name, value) != ("task", title)})
    return summary
