"""Command lines made of dataclasses, with recipes: YAML files whose values are defaults of the options."""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from glob import escape, glob
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def fail(message: object) -> NoReturn:
    """End the script with one line and exit status 1."""
    raise SystemExit(f"error: {' '.join(str(message).split())}")


def read_recipe(path: str, options: set[str]) -> dict[str, Any]:
    """Read `option: value` lines; an option that is not in `options` is an error."""
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        fail(f"recipe {path}: {error}")
    if not isinstance(recipe, dict):
        fail(f"recipe {path}: must hold 'option: value' lines")
    if unknown := recipe.keys() - options:
        fail(f"recipe {path}: unknown option {', '.join(sorted(unknown))}")
    return recipe


def parse_arguments(dataclasses: tuple[type, ...], argv: list[str] | None, **defaults: Any) -> tuple[Any, ...]:
    """Parse `argv` into `dataclasses`, TrainingArguments among them.

    The command line wins over `--recipe FILE`, the recipe over `defaults`.
    """
    recipe_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--recipe", help="YAML file with defaults for the other options")
    usage = "%(prog)s [--recipe FILE] [--OPTION VALUE ...] (--help lists the options)"
    parser = HfArgumentParser(dataclasses, usage=usage, parents=[recipe_parser], allow_abbrev=False)
    # Pinned memory serves an accelerator; without one PyTorch only warns.
    parser.set_defaults(dataloader_pin_memory=torch.accelerator.is_available(), **defaults)
    known, _ = recipe_parser.parse_known_args(argv)
    if known.recipe:
        parser.set_defaults(**read_recipe(known.recipe, {field.name for kind in dataclasses for field in fields(kind)}))
    try:
        *parsed, _, unknown = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
    except ValueError as error:
        fail(error)
    if unknown:
        parser.error(f"unknown option {' '.join(unknown)}")
    return tuple(parsed)


def check_least(arguments: object, least: float, *names: str) -> None:
    """End the script when one of the options `names`, numbers or lists of numbers, is below `least`."""
    for name in names:
        value = getattr(arguments, name)
        if any(number < least for number in (value if isinstance(value, list) else [value])):
            fail(f"--{name} {value} must be at least {least}")


def check_choice(arguments: object, name: str, choices: Iterable[str]) -> None:
    """End the script when the option `name` is none of `choices`."""
    if (value := getattr(arguments, name)) not in choices:
        fail(f"--{name} {value} must be one of {', '.join(choices)}")


def find_checkpoint(training: TrainingArguments, *files: str) -> str | None:
    """Return the folder to resume from: `--resume_from_checkpoint PATH`, or with `last` the newest one of the output.

    A checkpoint without one of `files` was being written when the run was killed; `last` is the newest one with all. A
    new training run is refused when the output folder holds checkpoints of an earlier one.
    """
    found = [Path(path) for path in glob(f"{escape(training.output_dir)}/{PREFIX_CHECKPOINT_DIR}-*[0-9]")]
    found.sort(key=lambda path: int(path.name.rpartition("-")[2]))
    wanted = training.resume_from_checkpoint
    if not wanted:
        if found and training.do_train:
            fail(f"{found[-1]} is there already: pass --resume_from_checkpoint last, or another --output_dir")
        return None
    tried = reversed(found) if wanted == "last" else [Path(wanted)]
    whole = next((path for path in tried if is_whole(path, files)), None)
    if whole is None:
        fail(f"--resume_from_checkpoint {wanted}: no checkpoint there" + f" with {' and '.join(files)}" * bool(files))
    return str(whole)


def is_whole(checkpoint: Path, files: Sequence[str]) -> bool:
    """Return whether a checkpoint has `files`, and the state that Trainer writes last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all((checkpoint / name).is_file() for name in files)
