"""Command lines made of dataclasses, with recipes: YAML files whose values are defaults of the options."""

import argparse
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


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


def find_checkpoint(training: TrainingArguments) -> str | None:
    """Return the folder to resume from: `--resume_from_checkpoint PATH`, or with `last` the newest one of the output.

    A new training run is refused when the output folder holds checkpoints of an earlier one.
    """
    last = get_last_checkpoint(training.output_dir) if Path(training.output_dir).is_dir() else None
    wanted = training.resume_from_checkpoint
    if not wanted:
        if last and training.do_train:
            fail(f"{last} is there already: pass --resume_from_checkpoint last, or another --output_dir")
        return None
    checkpoint = last if wanted == "last" else wanted
    if checkpoint is None or not Path(checkpoint, "trainer_state.json").is_file():
        fail(f"--resume_from_checkpoint {wanted}: no checkpoint there")
    return checkpoint
