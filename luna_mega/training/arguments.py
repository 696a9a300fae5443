"""Parse command lines into dataclasses, and read recipes: YAML files with defaults for the options."""

import argparse
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from huggingface_hub.errors import HTTPError, StrictDataclassError
from transformers import HfArgumentParser

from luna_mega.errors import reason
from luna_mega.escaping import terminal

# Environment variables in which torchrun, accelerate and MPI launchers store the number of processes.
WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# Errors of libraries about invalid options, files and data.
INVALID = (OSError, ValueError, TypeError, ImportError, HTTPError, StrictDataclassError, yaml.YAMLError)


def fail(message: object) -> NoReturn:
    """Exit with status 1 and a one-line message without control characters."""
    raise SystemExit(f"error: {terminal(' '.join(str(message).split()))}")


@contextmanager
def one_line(about: str = "", *wrappers: type[Exception]) -> Iterator[None]:
    """Exit with status 1 and a one-line message if options, files or data are invalid.

    The errors `wrappers` are replaced by their cause.
    """
    try:
        yield
    except (*INVALID, *wrappers) as error:
        cause = reason(error if isinstance(error, INVALID) else error.__cause__ or error)
        fail(f"{about}: {cause}" if about else cause)


def read_recipe(path: str, options: set[str], readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the options of a recipe, a YAML file with `option: value` lines.

    The option `recipe` specifies a base recipe, relative to the file, whose values are overridden.

    Args:
        path: The recipe.
        options: Names of the valid options.
        readers: Recipes that have this one as a base, to detect cycles.
    """
    if (file := Path(path).resolve()) in readers:
        fail(f"recipe {path} is its own base; change its option `recipe`")
    with one_line(f"recipe {path}", RecursionError):
        recipe = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    if not isinstance(recipe, dict):
        fail(f"recipe {path}: must contain `option: value` lines")
    base = recipe.pop("recipe", None)
    if unknown := recipe.keys() - options:
        fail(f"recipe {path}: unknown option {', '.join(sorted(map(str, unknown)))}")
    return (read_recipe(str(Path(path).parent / str(base)), options, (*readers, file)) if base else {}) | recipe


def parse_arguments(dataclasses: tuple[type, ...], argv: list[str] | None, **defaults: Any) -> tuple[Any, ...]:
    """Parse `argv` into `dataclasses`.

    The command line overrides `--recipe FILE`, and the recipe overrides `defaults`.
    """
    recipe_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--recipe", help="YAML file with defaults for the other options")
    usage = "%(prog)s [--recipe FILE] [--OPTION VALUE ...] (--help lists the options)"
    parser = HfArgumentParser(dataclasses, usage=usage, parents=[recipe_parser], allow_abbrev=False)
    # Without an accelerator, pinned memory only causes a warning.
    parser.set_defaults(dataloader_pin_memory=torch.accelerator.is_available(), **defaults)
    known, _ = recipe_parser.parse_known_args(argv)
    if known.recipe:
        parser.set_defaults(**read_recipe(known.recipe, {field.name for kind in dataclasses for field in fields(kind)}))
    with one_line():
        *parsed, _, unknown = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
    if unknown:
        parser.error(terminal(f"unknown option {' '.join(unknown)}"))
    check_finite(*parsed)
    return tuple(parsed)


def check_launch(processes: int) -> None:
    """Exit if a launcher started several processes that would train independently on the same data."""
    launched = max(int(os.environ.get(name) or 1) for name in WORLD_SIZES)
    if launched > 1 and processes == 1:
        if int(os.environ.get("RANK") or 0):  # only the first process prints the message
            raise SystemExit(1)
        fail(f"{launched} processes were launched, but they would train independently; on CPUs, pass --use_cpu true")


def check_finite(*groups: object) -> None:
    """Exit if an option of `groups` is NaN or infinite, or a list with such a number."""
    for name, value in chain.from_iterable(vars(group).items() for group in groups):
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                fail(f"--{name} {number} must be a finite number")


def check_least(arguments: object, least: float, *names: str) -> None:
    """Exit if one of the options `names`, numbers, lists of numbers or None, is below `least`."""
    for name in names:
        value = getattr(arguments, name)
        if any(number < least for number in (value if isinstance(value, list) else [value]) if number is not None):
            fail(f"--{name} {value} must be at least {least}")


def check_choice(arguments: object, name: str, choices: Iterable[str]) -> None:
    """Exit if the option `name` is not one of `choices`."""
    if (value := getattr(arguments, name)) not in choices:
        fail(f"--{name} {value} must be one of {', '.join(choices)}")
