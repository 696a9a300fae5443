"""The end of a run: the model card and, with `--push_to_hub`, the whole output folder on the Hub."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from transformers import Trainer, TrainingArguments

from common.arguments import fail
from luna_mega.hub.card import FILE_NAME, training_card


def check_hub(training: TrainingArguments) -> None:
    """End the script before it trains what it could not push."""
    if training.hub_token:
        fail("--hub_token: Trainer writes it into training_args.bin and pushes that; use `hf auth login` or HF_TOKEN")
    if training.push_to_hub:
        check_login()


def check_login() -> None:
    """End the script where the Hub does not know who pushes."""
    try:
        HfApi().whoami()
    except (HTTPError, OSError) as error:
        fail(f"--push_to_hub: {error}")


def publish(
    trainer: Trainer,
    script: str,
    argv: list[str] | None,
    summary: dict[str, Any],
    *,
    dataset: str,
    dataset_config: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
) -> None:
    """Write README.md and push the output folder, which stays complete whatever happens to the push.

    Args:
        script, argv: `__file__` and the arguments of `main`, for the command in the card.
        summary: the summary; its entries that begin with "eval_" are the results.
        dataset, dataset_config, base_model, license: as `training_card` takes them.
    """
    examples = Path(__file__).resolve().parents[1]
    # By its name, for a path may be relative to a folder that was left since.
    path = next(examples.rglob(Path(script).name)).relative_to(examples)
    card = training_card(
        trainer,
        ["python", f"examples/{path.as_posix()}", *(sys.argv[1:] if argv is None else argv)],
        dataset,
        dataset_config,
        metrics={name: value for name, value in summary.items() if name.startswith("eval_")},
        base_model=base_model,
        license=license,
    )
    output = Path(trainer.args.output_dir)
    # Trainer writes a card before it pushes, which would replace this one.
    trainer.create_model_card = lambda **_: card.save(output / FILE_NAME)
    if trainer.is_world_process_zero():
        trainer.create_model_card()
    if not trainer.args.push_to_hub:
        return
    with one_line(trainer.hub_model_id, output):
        trainer.push_to_hub()


def push_folder(name: str, folder: Path) -> None:
    """Push a folder, without its checkpoints, to the repository `name`, which is made if there is none."""
    with one_line(name, folder):
        repository = HfApi().create_repo(name, exist_ok=True).repo_id
        HfApi().upload_folder(repo_id=repository, folder_path=folder, ignore_patterns="checkpoint-*")


@contextmanager
def one_line(name: str, folder: Path) -> Iterator[None]:
    """End the script with one line where a push of `folder` to the repository `name` fails."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:
        again = f'hf upload {name} {folder} . --exclude "checkpoint-*"'
        fail(f"the push failed: {error} {error.__cause__ or ''} Nothing is lost: `{again}` sends {folder}")
