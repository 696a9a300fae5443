"""Steps of a training script: check what it is asked for, train, evaluate, write files, sum up."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments

import luna_mega
from common.arguments import fail
from common.hub import check_hub
from common.model import CheckpointArguments
from common.report import SpeedCallback, peak_memory_gb, plot_curve, print_table, save_json


class OrderedTrainer(Trainer):
    """Trainer whose predictions are in the order of the data set, also with `group_by_length`.

    Trainer itself groups the evaluation by length as well, and predictions then no longer match their rows.
    """

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        return SequentialSampler(eval_dataset)


def check_training(
    training: TrainingArguments, model: CheckpointArguments, early_stopping_patience: int | None
) -> None:
    """End the script when it has nothing to do or no model to do it with; ask Trainer to count tokens."""
    if not (training.do_train or training.do_eval or training.do_predict):
        fail("nothing to do: pass --do_train, --do_eval or --do_predict")
    if not (training.do_train or model.model_name_or_path):
        fail("--do_eval and --do_predict without --do_train need --model_name_or_path")
    if early_stopping_patience and not training.load_best_model_at_end:
        fail("--early_stopping_patience needs --load_best_model_at_end with equal --eval_strategy and --save_strategy")
    check_hub(training)
    if training.include_num_input_tokens_seen == "no":
        training.include_num_input_tokens_seen = "non_padding"


def describe(trainer: Trainer, model: CheckpointArguments) -> dict[str, Any]:
    """Return the first entries of the summary."""
    return {
        "model": model.model_name_or_path or f"{model.model_type} from scratch",
        "parameters": trainer.model.num_parameters(),
        "device": str(trainer.args.device),
        "luna_mega": luna_mega.__version__,
    }


def train(trainer: Trainer, checkpoint: str | None) -> dict[str, Any]:
    """Train and save the model; return entries of the summary."""
    speed = SpeedCallback()
    trainer.add_callback(speed)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(_internal_call=True)  # pushed at the end, with its card
    trainer.save_state()
    return {
        "train_samples": len(trainer.train_dataset),
        "epochs": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "train_seconds": speed.seconds,
        "tokens_per_second": speed.tokens / speed.seconds if speed.seconds else None,
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
    print_table(title, summary)
    return summary
