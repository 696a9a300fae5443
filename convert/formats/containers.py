"""Layouts of checkpoints on disk: a file of fairseq, a file of DeiT's script, or a folder."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.target import Target
from luna_mega.errors import ConversionError
from luna_mega.hub.output import complete_folder, publish, temporary_folder

Tensors = dict[str, torch.Tensor]
Files = dict[str, bytes | Tensors]


@dataclass(frozen=True)
class Export:
    """The content of a checkpoint to write. `beside`: dictionary files by name; `shards`: the option `--shards`."""

    target: Target
    args: dict[str, Any]
    tensors: Tensors
    beside: dict[str, bytes]
    updates: int
    shards: int | None


class Container(ABC):
    """A layout on disk.

    Attributes:
        software: the code that saves such checkpoints.
        settings: the place of the args, for messages.
        is_folder: whether a checkpoint is a folder, whose tensors may be split into shards.
        needs_args: whether a file without args is an error.
    """

    software = "fairseq"
    settings = "args"
    is_folder = False
    needs_args = True

    def architecture(self, args: dict[str, Any]) -> str:
        """Return the name of the architecture in the args."""
        return str(args.get("arch"))

    def stored_dtype(self, tensors: Tensors) -> str:
        """Return the default dtype of a converted folder."""
        return "float32"

    @abstractmethod
    def write(self, output: Path, export: Export, progress: bool) -> list[str]:
        """Write a checkpoint completely or not at all; return the names of the new files."""


class Folder(Container):
    """A checkpoint that is a folder."""

    is_folder = True

    @abstractmethod
    def claims(self, folder: Path) -> bool:
        """Return whether a folder contains such a checkpoint, complete or damaged."""

    @abstractmethod
    def read(self, folder: Path, progress: bool) -> Checkpoint:
        """Return the checkpoint in a folder.

        Raises:
            ConversionError: If a file is missing or damaged, or if the files do not belong together.
        """

    @abstractmethod
    def files(self, export: Export) -> Files:
        """Return the files of an export: name -> bytes, or -> tensors for `torch.save`."""

    def write(self, output: Path, export: Export, progress: bool) -> list[str]:
        """Write a folder."""
        files = self.files(export)
        with complete_folder(output) as folder:
            for name, content in tqdm(files.items(), desc="files", disable=None if progress else True, delay=1):
                if isinstance(content, bytes):
                    (folder / name).write_bytes(content)
                else:
                    with _full_disk(
                        name
                    ):  # by path: the archive gets the name of the file, by which a reader checks it
                        torch.save(content, folder / name)
        return sorted(files)


@dataclass(frozen=True)
class FairseqFile(Container):
    """A file as `checkpoint_utils.save_state` of fairseq writes it; `criteria` has the classes of criteria."""

    criteria: dict[str, str] = field(default_factory=dict)

    def state(self, export: Export) -> dict[str, Any]:
        """Return the content of a file at the start of an epoch, without optimizer state."""
        history = {
            "criterion_name": self.criteria.get(export.args.get("criterion"), "CrossEntropyCriterion"),
            "optimizer_name": "FairseqAdam",
            "lr_scheduler_state": {"best": None},
            "num_updates": export.updates,
        }
        iterator = {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
        return {
            "args": argparse.Namespace(**export.args),
            "model": export.tensors,
            "optimizer_history": [history],
            "extra_state": {"train_iterator": iterator, "val_loss": None},
        }

    def write(self, output: Path, export: Export, progress: bool) -> list[str]:
        """Write the file, and the files of `beside` that do not exist yet."""
        beside = export.beside
        _check_beside(output, beside)
        parent = next(folder for folder in output.parents if folder.is_dir())
        with temporary_folder(parent, output.name) as folder:
            names = [*sorted(name for name in beside if not (output.parent / name).exists()), output.name]
            for name in names[:-1]:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(beside[name])
            _save(folder / output.name, self.state(export), export.tensors, progress)
            publish({folder / name: output.parent / name for name in names})
        return names


class DeitFile(FairseqFile):
    """A file as the training script of DeiT writes it."""

    needs_args = False

    def architecture(self, args: dict[str, Any]) -> str:
        """Return the name of the model."""
        return str(args.get("model"))

    def state(self, export: Export) -> dict[str, Any]:
        """Return the content of a file, without optimizer state."""
        return {
            "model": export.tensors,
            "epoch": 0,
            "steps": export.updates,
            "model_ema": None,
            "scaler": {},
            "args": argparse.Namespace(**export.args),
        }


def _check_beside(output: Path, beside: dict[str, bytes]) -> None:
    """Raise `ConversionError` if a file of `beside` has the place of the checkpoint or of a different file."""
    for name, content in beside.items():
        if output.name == name.partition("/")[0]:
            raise ConversionError(
                f"{output}: the export also writes {name} into this folder; give the checkpoint another name"
            )
        there = output.parent / name
        if there.exists() and (there.is_dir() or there.read_bytes() != content):
            raise ConversionError(
                f"{there}: differs from the model's {name}, so the folder belongs to another model; choose an --output "
                "in a new or empty folder"
            )
        if there.parent.exists() and not there.parent.is_dir():
            raise ConversionError(f"{there.parent}: is a file, but the export needs a folder of this name; move it")


def _save(path: Path, state: dict[str, Any], tensors: Tensors, progress: bool) -> None:
    size = sum({id(tensor): tensor.nbytes for tensor in tensors.values()}.values())
    bar = {"desc": path.name, "total": size, "disable": None if progress else True, "delay": 1}
    with _full_disk(path.name), path.open("wb") as file, tqdm.wrapattr(file, "write", **bar) as writer:
        torch.save(state, writer)


@contextmanager
def _full_disk(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises it when the disk is full
        raise ConversionError(f"cannot write {name}: {error}") from error
