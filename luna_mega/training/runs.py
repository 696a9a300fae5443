"""Training runs: checks of the options, training, evaluation, output files, and checkpoints to resume from."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub import HfApi
from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerState, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length, sort_checkpoints

from luna_mega.cards import complete_trainer_card, describe_source, license_metadata
from luna_mega.hub.find import find_model
from luna_mega.training.arguments import check_launch, check_least, check_precision, fail, one_line
from luna_mega.training.models import CheckpointArguments
from luna_mega.training.plots import plot_losses
from luna_mega.training.products import use_onednn
from luna_mega.training.trainer import (
    DIVERGED,
    DivergenceCallback,
    EpochCallback,
    ProgressBar,
    ResumeCallback,
    check_model,
)

Step = Callable[[], dict[str, Any]]  # it returns metrics


class Run:
    """A training run: checked options, the state of the run, and its steps.

    A script creates its run when it has parsed the options. It reads the data in `reading`, and ends with `fit`:

        with run.reading():
            splits = load_data()
        trainer = OrderedTrainer(...)
        return run.fit(trainer)

    Attributes:
        checkpoint: Checkpoint from which the run resumes.
        base_model: Model that is fine-tuned.
    """

    def __init__(self, data: object, model: CheckpointArguments, training: TrainingArguments, *, predicts: bool = True):
        """Exit if options contradict each other; find the checkpoint to resume from, and set the seed.

        A resumed run loads configuration and tokenizer from its checkpoint, even if it was started from scratch.
        `predicts` specifies whether the script supports `--do_predict`.
        """
        check_launch(training.world_size)
        check_precision(training)
        use_onednn(training.device)
        if training.world_size > 1 and training.device.type == "cpu":  # Trainer sets ddp_timeout only for accelerators
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=training.ddp_timeout))
        if training.do_predict and not predicts:
            fail("--do_predict: this script has no test predictions; pass --do_eval")
        _check_options(data, model, training)
        if training.include_num_input_tokens_seen == "no":  # Trainer logs the speed of counted tokens
            training.include_num_input_tokens_seen = "non_padding"
        self.data, self.training = data, training
        self.base_model, self.license = model.model_name_or_path, model.license
        self.decay_all_weights = model.decay_all_weights
        self.checkpoint = find_checkpoint(training)
        if self.checkpoint and training.do_train:
            check_resumed(self.checkpoint, training)
        model.model_name_or_path = self.checkpoint or (self.base_model and find_model(self.base_model))
        set_seed(training.seed)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which the main process reads the data first; invalid data end the script with one line."""
        with self.training.main_process_first(desc="reading the data"), one_line():
            yield

    def fit(
        self,
        trainer: Trainer,
        *,
        evaluate: Step | None = None,
        predict: Step | None = None,
    ) -> dict[str, Any]:
        """Train, evaluate, predict and publish the model, as the options specify; return all metrics.

        If an evaluation raises an error, the model is saved, but not published. The plot `training.png` contains the
        losses and the metrics of all evaluations.

        Args:
            trainer: Trainer of the model.
            evaluate: Function that returns the metrics after training; by default, `score`.
            predict: Function that predicts the test splits and returns their metrics, with `--do_predict`.
        """
        callbacks = [EpochCallback(), DivergenceCallback()]
        if patience := getattr(self.data, "early_stopping_patience", None):
            callbacks.append(EarlyStoppingCallback(patience))
            callbacks[-1].early_stopping_patience_counter = count_worse(self.checkpoint)
        if self.checkpoint:
            callbacks.append(ResumeCallback(trainer, self.checkpoint))
        if trainer.pop_callback(ProgressCallback):  # Trainer has none with --disable_tqdm or in a notebook
            callbacks.append(ProgressBar())
        for callback in callbacks:
            trainer.add_callback(callback)
        if self.decay_all_weights:
            trainer.decays = lambda name, parameter: True
        metrics = self._train(trainer) if self.training.do_train else {}
        metrics |= evaluate() if evaluate else score(trainer)
        if predict is not None and self.training.do_predict:
            metrics |= predict()
        if self.training.do_train:
            trainer.save_state()  # with the evaluations
            if trainer.is_world_process_zero():
                output = Path(self.training.output_dir)
                with suppress(ValueError):  # nothing was logged, as by a run that resumes after its last step
                    plot_losses({output.resolve().name: output}, output / "training.png")
            complete_trainer_card(trainer, self.base_model, self.license, describe_source(self.data))
            publish(trainer)
        return metrics

    def _train(self, trainer: Trainer) -> dict[str, Any]:
        patience = getattr(self.data, "early_stopping_patience", None)
        if self.checkpoint and load_finished(trainer, self.checkpoint, patience):
            metrics = {"epoch": trainer.state.epoch}
        else:
            metrics = trainer.train(resume_from_checkpoint=self.checkpoint).metrics
        check_model(trainer)
        if trainer.is_fsdp_enabled:  # for the final model
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(_internal_call=True)  # `publish` pushes the model with its card
        trainer.save_state()
        if has_length(trainer.train_dataset):
            metrics["train_samples"] = len(trainer.train_dataset)
        return save(trainer, "train", metrics)


def _check_options(data: object, model: CheckpointArguments, training: TrainingArguments) -> None:
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
    if getattr(data, "streaming", False):
        if training.do_train and training.max_steps <= 0:
            fail("--streaming needs --max_steps, because the length of the data is unknown")
        if training.dataloader_num_workers > 1:
            fail(f"--dataloader_num_workers {training.dataloader_num_workers}: --streaming supports at most 1 worker")
        check_least(data, 1, "shuffle_buffer")


def find_checkpoint(training: TrainingArguments) -> str | None:
    """Return the checkpoint of `--resume_from_checkpoint`, or None.

    `last` is the newest complete checkpoint in the output folder; the newest one is incomplete if the run was killed
    while it saved. A run that does not resume exits if the output folder contains checkpoints.
    """
    found = [Path(path) for path in reversed(sort_checkpoints(training.output_dir))]
    source = training.resume_from_checkpoint
    if not source:
        if found and training.do_train:
            fail(f"{found[0]} already exists; pass --resume_from_checkpoint last, or another --output_dir")
        return None
    for path in found if source == "last" else [Path(source)]:
        if is_complete(path):
            return str(path)
    fail(f"--resume_from_checkpoint {source}: no checkpoint there")


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint has the state, which Trainer writes last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False
    return True


def check_resumed(checkpoint: str, training: TrainingArguments) -> None:
    """Exit if a resumed run would differ from an uninterrupted one."""
    if training.ignore_data_skip:
        fail("--ignore_data_skip: a resumed run would train on other data; remove it")
    if training.dataloader_persistent_workers:  # DataLoader draws a number for new workers only
        fail(
            "--dataloader_persistent_workers true: dropout of the resumed run would differ from an uninterrupted run; "
            "remove it, if that is acceptable"
        )
    if not any(Path(checkpoint).glob("rng_state*.pth")):
        advice = f"remove --resume_from_checkpoint, and pass --model_name_or_path {checkpoint} and a new --output_dir"
        fail(f"{checkpoint} has no optimizer, because it was saved with --save_only_model; {advice}")
    training.eval_on_start = False  # the run has started before


def count_worse(checkpoint: str | None) -> int:
    """Return the number of evaluations without a better metric before a checkpoint, for early stopping."""
    if checkpoint is None:
        return 0
    callbacks = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))).stateful_callbacks
    attributes = callbacks.get(EarlyStoppingCallback.__name__, {}).get("attributes", {})
    return attributes.get("early_stopping_patience_counter", 0)


def load_finished(trainer: Trainer, checkpoint: str, patience: int | None) -> bool:
    """Load the state of the last checkpoint of a run; return whether it is. Trainer would train another step.

    The run has all steps, or was stopped after `patience` evaluations without a better metric.
    """
    args, state = trainer.args, TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    stopped = patience is not None and count_worse(checkpoint) >= patience
    if not (stopped or 0 < args.max_steps <= state.global_step):
        return False
    trainer.state = state
    if args.load_best_model_at_end and state.best_model_checkpoint:
        trainer._load_best_model()
    return True


def check_hub(training: TrainingArguments, license: str | None = None) -> None:
    """Exit if the license is invalid or the model cannot be pushed."""
    with one_line("--license"):
        license_metadata(license)
    if training.hub_token:
        fail("--hub_token: Trainer would push it with training_args.bin; use `hf auth login` or HF_TOKEN instead")
    if training.push_to_hub:
        with one_line("--push_to_hub"):
            HfApi().whoami()


def publish(trainer: Trainer) -> None:
    """After training, write README.md and, with `--push_to_hub`, push the output folder."""
    if not trainer.args.push_to_hub:
        trainer.create_model_card()
        return
    output = trainer.args.output_dir
    again = f'hf upload {trainer.hub_model_id} {output} . --exclude "checkpoint-*"'
    with one_line(f"the push failed, but {output} is complete; push it with `{again}`", RuntimeError):
        trainer.push_to_hub()


def save(trainer: Trainer, split: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Log and save the metrics of a split; return them. The loss of rows without labels is NaN, and is omitted."""
    metrics = {name: value for name, value in metrics.items() if value == value}
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)
    return metrics


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
