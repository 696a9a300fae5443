"""Checkpoints from which a training run resumes."""

import json
from pathlib import Path

from transformers import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from luna_mega.training.arguments import fail


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


def load_finished(trainer: Trainer, checkpoint: str, patience: int | None = None) -> bool:
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
