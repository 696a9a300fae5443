"""Model cards of training runs, and uploads to the Hub."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Trainer, TrainingArguments

from luna_mega.hub.card import FILE_NAME, training_card
from luna_mega.hub.licenses import license_metadata
from luna_mega.training.arguments import fail, one_line


def check_hub(training: TrainingArguments, license: str | None = None) -> None:
    """Exit if the license is invalid or the model cannot be pushed."""
    with one_line("--license"):
        license_metadata(license)
    if training.hub_token:
        fail("--hub_token: Trainer would push it with training_args.bin; use `hf auth login` or HF_TOKEN instead")
    if training.push_to_hub:
        check_login()


def check_login() -> None:
    """Exit if there is no valid token for the Hub."""
    with one_line("--push_to_hub"):
        HfApi().whoami()


def explain_push(name: str, folder: Path) -> AbstractContextManager:
    """Return a context that exits with a one-line message if the push of `folder` to the repository `name` fails."""
    again = f'hf upload {name} {folder} . --exclude "checkpoint-*"'
    return one_line(f"the push failed, but {folder} is complete; push it with `{again}`", RuntimeError)


def publish(
    trainer: Trainer, command: tuple[str, list[str] | None], summary: dict[str, Any], card: dict[str, Any]
) -> None:
    """Write README.md and, with `--push_to_hub`, push the output folder.

    Args:
        trainer: The Trainer, after training.
        command: `__file__` and the arguments of `main`, for the command in the card.
        summary: Results; entries with the prefix "eval_" are listed in the card.
        card: Further arguments of `training_card`: dataset, base model, license and sections.
    """
    script, argv = command
    text = training_card(
        trainer,
        ["python", Path(script).name, *(sys.argv[1:] if argv is None else argv)],
        metrics={name: value for name, value in summary.items() if name.startswith("eval_")},
        **card,
    )
    output = Path(trainer.args.output_dir)
    # Trainer.push_to_hub would replace the card by its own.
    trainer.create_model_card = lambda **_: text.save(output / FILE_NAME)
    if trainer.is_world_process_zero():
        trainer.create_model_card()
    if not trainer.args.push_to_hub:
        return
    with explain_push(trainer.hub_model_id, output):
        trainer.push_to_hub()
