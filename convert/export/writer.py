"""Base class of the writers: a writer writes the checkpoints of one format."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedConfig

from luna_mega.convert.evidence import Evidence, ModelSpec, Tensors
from luna_mega.convert.formats.format import Format
from luna_mega.convert.table import rows_of, typed_args
from luna_mega.errors import ConversionError
from luna_mega.hub.output import move_files, temporary_folder

Args = dict[str, Any]


@dataclass(frozen=True)
class Export:
    """Content of a checkpoint to write, with the contents of its dictionaries by name and the option `--shards`."""

    spec: ModelSpec
    args: Args
    tensors: Tensors
    companions: dict[str, bytes]
    updates: int
    shards: int | None


class Writer:
    """The writing half of a format whose checkpoints are files of fairseq.

    Attributes:
        format: Format, the reading half.
        revisions: Revisions of the original code to try, in this order, for a model that was not converted.
        kept: Arguments that keep the value of the converted file, even if the configuration was edited.
        training_fields: Fields of the configuration for training; a difference is a warning.
        advice: Advice for a model whose head no format supports; None for a list of classes.
        criteria: Name of a criterion -> its class.
        note_of_added: Note for the user if `added` tensors are written.
    """

    revisions: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    training_fields: tuple[str, ...] = ()
    advice: str | None = None
    criteria: dict[str, str] = {}
    note_of_added: str | None = None
    is_folder = False  # a folder, whose tensors can be split into shards

    def __init__(self, checkpoint_format: Format):
        self.format = checkpoint_format

    def args(self, spec: ModelSpec, args: Args) -> Args:
        """Return the args of a checkpoint; `args` are those that the format reads into one field."""
        return args

    def added(self, spec: ModelSpec, tensors: Tensors) -> Tensors:
        """Return the tensors of a file that a model lacks; those of the model are `tensors`."""
        return {}

    def limits(self, spec: ModelSpec) -> dict[str, tuple]:
        """Return field -> values that the original supports, of fields that reading the args does not check."""
        return {}

    def unused(self, spec: ModelSpec) -> set[str]:
        """Return the fields of the configuration that a checkpoint does not determine."""
        return set()

    def resolve(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the configuration with explicit values of derived fields."""
        return config

    def head(self, config: PreTrainedConfig) -> str | None:
        """Return the original's usual name for the head of a classifier; None if heads have no names."""
        return None

    def notes(self, spec: ModelSpec, evidence: Evidence) -> list[str]:
        """Return notes for the user; `evidence` comes from the checkpoint."""
        return []

    def state(self, export: Export) -> dict[str, Any]:
        """Return the content of the file."""
        history = {
            "criterion_name": self.criteria.get(export.args.get("criterion"), "CrossEntropyCriterion"),
            "optimizer_name": "FairseqAdam",
            "lr_scheduler_state": {"best": None},
            "num_updates": export.updates,
        }
        iterator = {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
        args, extra = argparse.Namespace(**export.args), {"train_iterator": iterator, "val_loss": None}
        return {"args": args, "model": export.tensors, "optimizer_history": [history], "extra_state": extra}

    def write(self, output: Path, export: Export, progress: bool) -> list[str]:
        """Write a checkpoint atomically and return the names of the new files."""
        companions = export.companions
        _check_companions(output, companions)
        parent = next(folder for folder in output.parents if folder.is_dir())
        with temporary_folder(parent, output.name) as folder:
            names = [*sorted(name for name in companions if not (output.parent / name).exists()), output.name]
            for name in names[:-1]:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(companions[name])
            size = sum({id(tensor): tensor.nbytes for tensor in export.tensors.values()}.values())
            bar = {"desc": output.name, "total": size, "disable": None if progress else True, "delay": 1}
            with check_disk(output.name), (folder / output.name).open("wb") as file:
                with tqdm.wrapattr(file, "write", **bar) as writer:
                    torch.save(self.state(export), writer)
            move_files({folder / name: output.parent / name for name in names})
        return names


_WRITERS: dict[type[Format], type[Writer]] = {}


def register_writer(format_class: type[Format]) -> Callable[[type[Writer]], type[Writer]]:
    """Return a decorator that registers a writer as the writing half of a format and of its subclasses."""

    def register(writer_class: type[Writer]) -> type[Writer]:
        _WRITERS[format_class] = writer_class
        return writer_class

    return register


def writer_of(checkpoint_format: Format) -> Writer | None:
    """Return the writing half of a format; None if its checkpoints can only be converted."""
    classes = type(checkpoint_format).__mro__
    return next((_WRITERS[each](checkpoint_format) for each in classes if each in _WRITERS), None)


def write_args(writer: Writer, spec: ModelSpec) -> Args:
    """Return the args of a checkpoint for a model, in the order of the table."""
    table = writer.format.table
    args: Args = {}
    for row in rows_of(table, spec.revision):
        if row.name and row.field is not None and row.name not in args:
            args[row.name] = row.encoded(getattr(spec.config, row.field))
    args = typed_args(table, writer.args(spec, args), spec.revision)
    return {row.name: args[row.name] for row in table if row.name in args} | args


def _check_companions(output: Path, companions: dict[str, bytes]) -> None:
    """Raise `ConversionError` if a dictionary would replace the checkpoint or another file."""
    for name, content in companions.items():
        if output.name == name.partition("/")[0]:
            raise ConversionError(
                f"{output}: the export also writes {name} into this folder; use another name for the checkpoint"
            )
        path = output.parent / name
        if path.exists() and (path.is_dir() or path.read_bytes() != content):
            raise ConversionError(
                f"{path}: differs from the model's {name}, so the folder belongs to another model; choose an --output "
                "in a new or empty folder"
            )
        if path.parent.exists() and not path.parent.is_dir():
            raise ConversionError(f"{path.parent}: is a file, but the export needs a folder of this name; move it")


@contextmanager
def check_disk(name: str) -> Iterator[None]:
    """Raise `ConversionError` if torch cannot write the file `name` during the block."""
    try:
        yield
    except RuntimeError as error:  # torch raises it if the disk is full
        raise ConversionError(f"cannot write {name}: {error}") from error
