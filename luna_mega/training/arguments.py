"""Parse command lines into dataclasses, and read recipes: YAML files with defaults for the options."""

import argparse
import copy
import difflib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from huggingface_hub.errors import HTTPError, StrictDataclassError
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool
from transformers.utils import is_torch_bf16_gpu_available

from luna_mega.errors import ConversionError, reason, shown
from luna_mega.escaping import terminal
from luna_mega.hub.find import find_model

# Environment variables in which torchrun, accelerate and MPI launchers store the number of processes.
WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
MODELS = ("model_name_or_path", "tokenizer_name")  # options with a folder or a name on the Hub
# Options with paths that must exist.
PATHS = dict.fromkeys(("dataset_path", "test_paths"), "folder")
PATHS |= dict.fromkeys(("train_files", "validation_files"), "file")
# Names of the same option in different scripts, in earlier versions and in the scripts of transformers.
SYNONYMS = (
    ("max_seq_length", "block_size", "max_length"),
    ("task_name", "task"),
    ("mlm_probability", "masked_share"),
    ("eval_context", "context"),
    ("eval_segment", "segment"),
    ("chunk_size", "chunk"),
    ("per_device_eval_batch_size", "batch_size"),
    ("num_train_epochs", "epochs"),
    ("max_steps", "steps"),
    ("output_dir", "output"),
    ("dataset_config", "dataset_config_name"),
    ("train_files", "train_file", "dataset_path"),
    ("validation_files", "validation_file", "dataset_path"),
    ("validation_share", "validation_split_percentage"),
    ("text_columns", "text_column", "text_column_name", "text_column_names"),
    ("label_column", "label_column_name"),
    ("image_column", "image_column_name"),
    ("audio_column", "audio_column_name"),
    ("max_target_length", "val_max_target_length"),
    ("max_seconds", "max_length_seconds"),
)
AUTO = object()  # the value `auto` of an option, before `Parser` replaces it
# Plain text that means "no value" in YAML.
NULL = ("", "~", "null", "Null", "NULL")
# CPUs without any of these convert matrices element by element: products in bfloat16 take 20 to 150 times as long as in
# float32. The last flag is Arm's.
BFLOAT16 = ("avx512_bw", "amx_bf16", "bf16")
# Errors of libraries about invalid options, files and data.
INVALID = (OSError, ValueError, TypeError, ImportError, HTTPError, StrictDataclassError, yaml.YAMLError)


def fail(message: object) -> NoReturn:
    """Exit with status 1 and a one-line message without control characters."""
    raise SystemExit(f"error: {terminal(' '.join(str(message).split()))}")


def say(message: str) -> None:
    """Print one line without control characters, in the first process."""
    if not int(os.environ.get("RANK") or 0):
        print(terminal(" ".join(message.split())), flush=True)


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
    """Return the values in a recipe, a YAML file with `option: value` lines, as text, lists and dictionaries.

    The option `recipe` specifies a base recipe, relative to the file, whose values are overridden. `Parser.read_values`
    converts the text; with the types of YAML 1.1, `no` would be False, `1:30` 90, and `010` 8.

    Args:
        path: The recipe.
        options: Names of the valid options.
        readers: Recipes that have this one as a base, to detect cycles.
    """
    check_path("recipe", path, "file")
    if (file := Path(path).resolve()) in readers:
        fail(f"recipe {path} is its own base; change its option `recipe`")
    with one_line(f"recipe {path}", RecursionError):
        root = yaml.compose(file.read_text(encoding="utf-8-sig"), yaml.SafeLoader)
        pairs = [(name.value, value) for name, value in root.value] if isinstance(root, yaml.MappingNode) else []
        if not pairs or not all(isinstance(name, str) for name, _ in pairs):
            fail(f"recipe {path}: must contain `option: value` lines")
        names = [name for name, _ in pairs]
        if unknown := set(names) - options - {"recipe"}:
            fail(f"recipe {path}: unknown option {', '.join(sorted(unknown))}{find_names(sorted(unknown), options)}")
        for name, value in pairs:
            if names.count(name) > 1:
                fail(f"recipe {path}: {name} has several values; keep one of them")
            if isinstance(value, yaml.ScalarNode) and value.style is None and value.value in NULL:
                fail(f"recipe {path}: {name} has no value; remove the line to use the default")
        recipe = {name: _read_node(value) for name, value in pairs}
    base = recipe.pop("recipe", None)
    return (read_recipe(str(Path(path).parent / str(base)), options, (*readers, file)) if base else {}) | recipe


def _read_node(node: yaml.Node) -> Any:
    """Return the text of a value, or a list of texts, or a dictionary whose values have the types of JSON."""
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.SequenceNode):
        return [_read_node(part) for part in node.value]
    return {_read_node(name): _read_json(value) for name, value in node.value}


def _read_json(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_read_json(part) for part in node.value]
    try:
        return json.loads(node.value) if isinstance(node, yaml.ScalarNode) and node.style is None else _read_node(node)
    except ValueError:
        return node.value


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with one spelling per option, with underscores, and with defaults other than None and empty texts."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "") else super()._get_help_string(action)


class Parser(HfArgumentParser):
    """Parser of a script: the fields of each dataclass are a group of options, and `--bf16` also accepts `auto`."""

    def __init__(self, dataclasses: tuple[type, ...], **options: Any):
        for kind in dataclasses:
            if issubclass(kind, TrainingArguments):
                kind._argument_group_name = f"options of {kind.__name__}"
        super().__init__(dataclasses, formatter_class=HelpFormatter, **options)
        self.register("type", string_to_bool, lambda value: AUTO if value == "auto" else string_to_bool(value))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if getattr(found, "bf16", False):  # on a CPU, Trainer then requires use_cpu
            found.use_cpu = found.use_cpu or not torch.accelerator.is_available()
            found.bf16 = has_bfloat16(found.use_cpu) if found.bf16 is AUTO else found.bf16
        for name in [name for name, value in vars(found).items() if value is AUTO]:
            self.error(f"--{name} auto must be true or false")
        return found, unknown

    def read_values(self, recipe: str, values: dict[str, Any]) -> dict[str, Any]:
        """Convert the values of `read_recipe` as on the command line; exit if one has another type than its option."""
        read = {}
        for name, value in values.items():
            action = self._option_string_actions[f"--{name}"]
            if isinstance(value, dict) and name in TrainingArguments._VALID_DICT_FIELDS:
                value = json.dumps(value)
            parts = value if isinstance(value, list) and action.nargs == "+" else [value]
            if not parts or not all(isinstance(part, str) for part in parts):
                fail(f"recipe {recipe}: {name} {shown(value)} must be {'values' if action.nargs == '+' else 'a value'}")
            try:
                read[name] = self._get_values(action, parts)
            except argparse.ArgumentError as error:
                fail(f"recipe {recipe}: {name}: {error.message}")
        return read


def parse_arguments(dataclasses: tuple[type, ...], argv: list[str] | None, **defaults: Any) -> tuple[Any, ...]:
    """Parse `argv` into `dataclasses`.

    The command line overrides `--recipe FILE`, and the recipe overrides `defaults`. The help starts with the docstring
    of the script, the module of the first dataclass.
    """
    recipe_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--recipe", metavar="FILE", help="YAML file with defaults for the other options")
    texts = {"usage": "%(prog)s [--recipe FILE] [--OPTION VALUE ...]"}
    texts["description"] = sys.modules[dataclasses[0].__module__].__doc__
    texts["epilog"] = "Options can also be written with hyphens: --output-dir. " + (
        "--bf16 auto trains in bfloat16 if the GPU or the CPU has units for it."
    )
    parser = Parser(dataclasses, **texts, parents=[recipe_parser], allow_abbrev=False)
    # Without an accelerator, pinned memory only causes a warning.
    parser.set_defaults(dataloader_pin_memory=torch.accelerator.is_available(), **defaults)
    known, _ = recipe_parser.parse_known_args(argv)
    if known.recipe:
        options = {field.name for kind in dataclasses for field in fields(kind) if field.init}
        parser.set_defaults(**parser.read_values(known.recipe, read_recipe(known.recipe, options)))
    with one_line():
        *parsed, _, unknown = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
    if unknown:
        names = [name.split("=")[0].lstrip("-").replace("-", "_") for name in unknown if name.startswith("--")]
        known = [name.lstrip("-") for name in parser._option_string_actions if "-" not in name.lstrip("-")]
        advice = find_names(names, known)
        parser.error(terminal(f"unknown option {' '.join(unknown)}{advice}"))
    check_values(*parsed)
    return tuple(parsed)


def find_names(names: Iterable[str], known: Iterable[str]) -> str:
    """Return the end of an error for unknown options: the options with the same meaning, or with similar names."""
    close = []
    for name in names:
        same = [other for group in SYNONYMS if name in group for other in group if other in known]
        close += (same or difflib.get_close_matches(name, known, n=1))[:1]
    return f"; did you mean {', '.join(f'--{name}' for name in close)}?" if close else ""


def has_bfloat16(on_cpu: bool) -> bool:
    """Return whether the GPU or, with `on_cpu`, the CPU has units for bfloat16."""
    if on_cpu:
        found = torch.cpu.get_capabilities()
        return bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    if torch.cuda.is_available():  # transformers also counts GPUs that emulate bfloat16
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return is_torch_bf16_gpu_available()


def check_precision(training: TrainingArguments) -> None:
    """Exit if `--bf16` would run on a CPU that has none of the instructions `BFLOAT16`."""
    if training.bf16 and training.device.type == "cpu":
        found = torch.cpu.get_capabilities()
        if not any(found.get(name) for name in BFLOAT16):
            fail("--bf16: this CPU has neither AVX-512 nor AMX and is far slower in bfloat16; pass --bf16 auto")


def check_launch(processes: int) -> None:
    """Exit if a launcher started several processes that would train independently on the same data."""
    launched = max(int(os.environ.get(name) or 1) for name in WORLD_SIZES)
    if launched > 1 and processes == 1:
        if int(os.environ.get("RANK") or 0):  # only the first process prints the message
            raise SystemExit(1)
        fail(f"{launched} processes were launched, but they would train independently; on CPUs, pass --use_cpu true")


def check_values(*groups: object) -> None:
    """Exit if an option of `groups` is a number that is not finite, or a path that is missing or of another kind.

    Paths are `--output_dir` and the options `PATHS`. `MODELS` may also be names on the Hub, see `find_model`.
    """
    for name, value in chain.from_iterable(vars(group).items() for group in groups):
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, float) and not math.isfinite(part):
                fail(f"--{name} {part} must be a finite number")
            if part is not None and name in PATHS:
                check_path(name, part, PATHS[name])
            if part and name == "output_dir":
                check_no_file(name, part)
            if part and name in MODELS:
                try:
                    find_model(part)
                except ConversionError as error:
                    fail(f"--{name} {error}")


def check_no_file(name: str, path: str | Path) -> None:
    """Exit if the option `name`, a folder that may be new or the name of a dataset, is or is in a file."""
    for part in (Path(path), *Path(path).parents):
        if part.is_file():
            fail(f"--{name} {part} is a file, not a folder")


def check_path(name: str, path: str, kind: str) -> None:
    """Exit unless the option `name` is the path of an existing `kind`: "file" or "folder"."""
    if not Path(path).exists():
        fail(f"--{name} {path}: no such {kind}")
    if Path(path).is_file() != (kind == "file"):
        fail(f"--{name} {path} is a {'folder' if kind == 'file' else 'file'}, not a {kind}")


def check_least(arguments: object, least: float, *names: str) -> None:
    """Exit if one of the options `names`, numbers, lists of numbers or None, is below `least`."""
    for name in names:
        value = getattr(arguments, name)
        if any(number < least for number in (value if isinstance(value, list) else [value]) if number is not None):
            fail(f"--{name} {value} must be at least {least}")


def check_max_tokens(training: TrainingArguments) -> None:
    """Exit if an option of Trainer contradicts batches of `--max_tokens`."""
    for name in ("auto_find_batch_size", "per_device_train_batch_size", "train_sampling_strategy"):
        if getattr(training, name) != getattr(TrainingArguments, name):
            fail(f"--{name} {getattr(training, name)} is not supported with --max_tokens; remove one of them")
    accelerator = training.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name):
            fail(f"--accelerator_config: {name} requires batches of one size; remove it or --max_tokens")


def check_choice(arguments: object, name: str, choices: Iterable[str]) -> None:
    """Exit if the option `name` is not one of `choices`."""
    if (value := getattr(arguments, name)) is None:
        fail(f"--{name} is required: {', '.join(choices)}")
    if value not in choices:
        fail(f"--{name} {value} must be one of {', '.join(choices)}")
