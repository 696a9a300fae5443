"""Output folders on the Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from transformers import TrainingArguments

from common.arguments import fail
from luna_mega.hub.licenses import license_metadata


def check_hub(training: TrainingArguments, license: str | None = None) -> None:
    """End the script before it trains a model that it could not push or describe."""
    try:
        license_metadata(license)
    except ValueError as error:
        fail(f"--{error}")
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
