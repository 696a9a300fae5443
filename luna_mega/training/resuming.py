"""Resuming from checkpoints."""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from luna_mega.training.arguments import fail


def find_checkpoint(training: TrainingArguments, *files: str) -> str | None:
    """Return the checkpoint of `--resume_from_checkpoint`, which must contain `files`, or None.

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
        if is_complete(path, files):
            return str(path)
    fail(f"--resume_from_checkpoint {source}: no checkpoint there" + f" with {' and '.join(files)}" * bool(files))


def is_complete(checkpoint: Path, files: Sequence[str]) -> bool:
    """Return whether a checkpoint has `files` and the state, which Trainer writes last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False
    return all((checkpoint / name).is_file() for name in files)


def load_finished(trainer: Trainer, checkpoint: str) -> bool:
    """Load the state of a checkpoint that has all steps; return whether it has. Trainer would train another step."""
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
