"""Layouts of checkpoints on disk: a file of fairseq or of DeiT's training script, or a folder."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from luna_mega.convert.evidence import Target
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.errors import ConversionError
from luna_mega.hub.output import complete_folder, publish, temporary_folder

Tensors = dict[str, torch.Tensor]
Files = dict[str, bytes | Tensors]


@dataclass(frozen=True)
class Export:
    """Content of a checkpoint to write, with the contents of its dictionaries by name and the option `--shards`."""

    target: Target
    args: dict[str, Any]
    tensors: Tensors
    companions: dict[str, bytes]
    updates: int
    shards: int | None


class Container(ABC):
    """A layout on disk.

    Attributes:
        software: Name of the code that saves such checkpoints.
        settings: Name of the args in messages.
        is_folder: Whether a checkpoint is a folder, whose tensors can be split into shards.
        needs_args: Whether a file without args is an error.
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
        """Write a checkpoint atomically and return the names of the new files."""


class Folder(Container):
    """A checkpoint that is a folder."""

    is_folder = True

    @abstractmethod
    def claims(self, folder: Path) -> bool:
        """Return whether a folder contains such a checkpoint, complete or damaged."""

    @abstractmethod
    def read(self, folder: Path, progress: bool) -> Checkpoint:
        """Return the checkpoint in a folder."""

    @abstractmethod
    def files(self, export: Export) -> Files:
        """Return the files of an export: name -> bytes, or -> tensors for `torch.save`."""

    def write(self, output: Path, export: Export, progress: bool) -> list[str]:
        files = self.files(export)
        with complete_folder(output) as folder:
            for name, content in tqdm(files.items(), desc="files", disable=None if progress else True, delay=1):
                if isinstance(content, bytes):
                    (folder / name).write_bytes(content)
                else:
                    with _full_disk(name):  # with a path, `torch.save` records the name of the file
                        torch.save(content, folder / name)
        return sorted(files)


@dataclass(frozen=True)
class FairseqFile(Container):
    """A file of fairseq's `checkpoint_utils.save_state`; `criteria` maps names of criteria to classes."""

    criteria: dict[str, str] = field(default_factory=dict)

    def state(self, export: Export) -> dict[str, Any]:
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
            with _full_disk(output.name), (folder / output.name).open("wb") as file:
                with tqdm.wrapattr(file, "write", **bar) as writer:
                    torch.save(self.state(export), writer)
            publish({folder / name: output.parent / name for name in names})
        return names


class DeitFile(FairseqFile):
    """A file of DeiT's training script."""

    needs_args = False

    def architecture(self, args: dict[str, Any]) -> str:
        return str(args.get("model"))

    def state(self, export: Export) -> dict[str, Any]:
        training = {"epoch": 0, "steps": export.updates, "model_ema": None, "scaler": {}}
        return {"model": export.tensors, **training, "args": argparse.Namespace(**export.args)}


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
def _full_disk(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises it if the disk is full
        raise ConversionError(f"cannot write {name}: {error}") from error
