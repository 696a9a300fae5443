"""Checkpoints that a run resumes from."""

import json
from collections.abc import Iterable, Sequence
from glob import escape, glob
from pathlib import Path

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from luna_mega.training.arguments import fail


def find_checkpoint(training: TrainingArguments, *files: str) -> str | None:
    """Return the folder to resume from: `--resume_from_checkpoint PATH`, or with `last` the newest one of the output.

    A checkpoint has to have `files`. A new training run is refused when the output folder holds checkpoints of an
    earlier one.
    """
    found = [Path(path) for path in glob(f"{escape(training.output_dir)}/{PREFIX_CHECKPOINT_DIR}-*[0-9]")]
    found.sort(key=lambda path: int(path.name.rpartition("-")[2]))
    if training.resume_from_checkpoint:
        return choose_checkpoint(training, found, files)
    if found and training.do_train:
        fail(f"{found[-1]} is there already: pass --resume_from_checkpoint last, or another --output_dir")
    return None


def choose_checkpoint(training: TrainingArguments, found: Sequence[Path], files: Sequence[str]) -> str:
    """Return the checkpoint of `--resume_from_checkpoint`; with `last`, the newest complete one of `found`.

    A checkpoint without one of `files` is incomplete, because the run was killed while it was written.
    """
    wanted = training.resume_from_checkpoint
    tried: Iterable[Path] = reversed(found) if wanted == "last" else [Path(wanted)]
    whole = next((path for path in tried if is_whole(path, files)), None)
    if whole is None:
        fail(f"--resume_from_checkpoint {wanted}: no checkpoint there" + f" with {' and '.join(files)}" * bool(files))
    return str(whole)


def is_whole(checkpoint: Path, files: Sequence[str]) -> bool:
    """Return whether a checkpoint has `files`, and the state that Trainer writes last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False
    return all((checkpoint / name).is_file() for name in files)


def resume(trainer: Trainer, speed: TrainerCallback, checkpoint: str) -> dict[str, float]:
    """Train on from a checkpoint, or load its state if it has all steps; return the metrics of the training.

    `speed` is a callback of the trainer.
    """
    if take_finished(trainer, checkpoint):
        speed.on_train_begin(trainer.args, trainer.state, trainer.control)
        return {}
    return trainer.train(resume_from_checkpoint=checkpoint).metrics


def take_finished(trainer: Trainer, checkpoint: str) -> bool:
    """Take the state of a checkpoint, whose weights the model has, if it has all steps; return whether it has.

    Trainer would train one step more.
    """
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
