"""Writes a model folder back as a checkpoint of the original code: `luna-mega export`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from tqdm import tqdm

from luna_mega.convert.evidence import same_bits
from luna_mega.convert.export_args import choose_args, original_tensors
from luna_mega.convert.export_target import choose_target
from luna_mega.convert.formats import Format
from luna_mega.convert.formats._base import Files, Tensors
from luna_mega.convert.layer_norm import CONVENTIONS, MINUS_ONE
from luna_mega.convert.tensors import DTYPES, lowered_norms, non_finite, store_tensors, tied_weights
from luna_mega.errors import ConversionError
from luna_mega.hub.folder import REPORT_NAME, ModelFolder, read_folder
from luna_mega.hub.output import check_new_file, check_output, complete_folder, publish, temporary_folder

_ORIGIN = ("arch", "task")
_NOT_CONVERTED = {"source": {}, "decisions": {}, "dropped": [], "dtype_in": {}, "args": None}


@dataclass
class ExportReport:
    """Record of an export: its input, its decisions and its output."""

    folder: str
    output: str
    model_class: str
    layout: str
    args: dict[str, Any]
    head: str | None
    layer_norm: str | None
    tensors: int
    dtype: str
    files: list[str]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        origin = [f"{name} {self.args[name]}" for name in _ORIGIN if name in self.args]
        lines = [
            ("read", f"{self.folder}: {self.model_class}"),
            ("layout", ", ".join([self.layout, *origin])),
            ("head", self.head or "none with a name"),
            *([("layer norm", self.layer_norm)] if self.layer_norm else []),
            ("tensors", f"{self.tensors}, {self.dtype}"),
            *(("note", note) for note in self.notes),
            *(("warning", warning) for warning in self.warnings),
            ("written", f"{self.output}: {', '.join(self.files)}"),
        ]
        return "\n".join(f"{name:<12}{value}" for name, value in lines)


def export_checkpoint(
    folder: str | Path,
    output: str | Path,
    *,
    head: str | None = None,
    layer_norm: str | None = None,
    dtype: str | None = None,
    dictionaries: Sequence[str | Path] = (),
    shards: int | None = None,
    progress: bool = False,
) -> ExportReport:
    """Write a checkpoint that the original's loader and `convert_checkpoint` read, and its dictionaries beside it.

    Args:
        folder: the output of `luna-mega convert` or `save_pretrained`.
        output: file to write, which must not exist; for a model whose checkpoints are folders, a folder, absent or
            empty. After a failure it is as it was.
        head: name of the classification head, where heads have names; the name tells its kind. None = as in the
            converted file, else the usual one.
        layer_norm: "standard" or "plus-one" (some code stores weight - 1); None = as in the converted file, else as in
            the code that has the model.
        dtype: "float32", "float16" or "bfloat16"; None = as in the converted file if nothing is lost by it, else as in
            the folder.
        dictionaries: vocabulary and label dictionary in any order, or the SentencePiece model of a format that has one;
            when none is given, the files in the folder.
        shards: number of files that share the tensors, where checkpoints are folders; None = as in the converted
            folder, else one.
        progress: show a progress bar on stderr if that is a terminal.

    Returns the report that the command prints.

    Raises:
        ConversionError: the folder is at fault, or the original cannot express the model; one line says how.
        ValueError: an option has no such value.
    """
    _check_options(layer_norm, dtype, shards)
    source = read_folder(folder)
    report = _recorded(source)
    try:
        fmt, target = choose_target(source.model_class, source.config, head, report)
        if layer_norm is not None and "layer-norm" in fmt.refused:
            raise ConversionError(f"--layer-norm {layer_norm}: {fmt.refused['layer-norm']}; leave it out")
        if shards is not None and not fmt.is_folder:
            raise ConversionError(f"--shards {shards}: a {fmt.name} checkpoint is one file; leave the option out")
        ours = source.tensors()
        _check_tied(source, ours)
        warnings = _non_finite(fmt, ours)
        tensors, notes = original_tensors(fmt, target, ours)
        chosen = choose_args(fmt, target, tensors, report)
    except ConversionError as error:
        raise ConversionError(f"{source.path}: {error}") from error
    output = check_output(output) if fmt.is_folder else check_new_file(output)
    args, mapping = chosen.args, chosen.mapping
    notes += fmt.remarks(target, args, [row["source"] for row in report["dropped"]])
    convention = layer_norm or report["decisions"].get("layer_norm") or fmt.norm_convention(target.revision)
    lowered = {}
    if convention == MINUS_ONE:
        lowered = lowered_norms(source.path, {key: tensors[key] for key in mapping.norm_weights})
    tensors, stored, stored_as = store_tensors(tensors, mapping, lowered, dtype, report["dtype_in"])
    kind = fmt.dictionaries(chosen.plan, str(args.get("task")))
    beside, missing = kind.export(list(dictionaries), source.path, source.config.id2label)
    if fmt.is_folder:
        files = _save_folder(output, fmt.files(target, args, tensors, beside, shards), progress)
    else:
        state = fmt.state(args, tensors, report["source"].get("num_updates") or 0)
        files = _save(output, state, beside, progress)
    return ExportReport(
        folder=str(source.path),
        output=str(output if fmt.is_folder else output.parent),
        model_class=source.model_class.__name__,
        layout=fmt.revisions[target.revision].format,
        args=args,
        head=target.head,
        layer_norm=convention,
        tensors=len(tensors),
        dtype=stored,
        files=files,
        notes=[*notes, *stored_as, *missing],
        warnings=[*warnings, *chosen.warnings],
    )


def _recorded(source: ModelFolder) -> dict[str, Any]:
    """Return the record of the conversion that wrote the folder; empty where the model was made here.

    Raises:
        ConversionError: conversion_report.json is not as a conversion writes it.
    """
    if source.report is None:
        return _NOT_CONVERTED
    if not _is_record(source.report):
        raise ConversionError(
            f"{source.path / REPORT_NAME}: not as luna-mega convert writes it; remove it, or convert the file again"
        )
    return source.report


def _is_record(report: dict[str, Any]) -> bool:
    origin, decisions, dropped, dtypes = (report[name] for name in ("source", "decisions", "dropped", "dtype_in"))
    return (
        all(isinstance(part, dict) for part in (origin, decisions, dtypes, report["args"]))
        and all(isinstance(origin.get(name), str) for name in ("layout", "revision"))
        and isinstance(origin.get("num_updates"), (int, NoneType))
        and isinstance(decisions.get("head"), (str, NoneType))
        and decisions.get("layer_norm") in (None, *CONVENTIONS)
        and isinstance(dropped, list)
        and all(isinstance(row, dict) and isinstance(row.get("source"), str) for row in dropped)
        and all(isinstance(getattr(torch, name, None), torch.dtype) for name in dtypes)
    )


def _check_tied(source: ModelFolder, tensors: Tensors) -> None:
    """Raise `ConversionError` if tied weights are both in the folder and differ."""
    for name, other in tied_weights((source.model_class,), source.config).items():
        if {name, other} <= tensors.keys() and not same_bits(tensors[name], tensors[other]):
            raise ConversionError(
                f"config.json ties {name} to {other}, but their weights differ; set tie_word_embeddings to false"
            )


def _non_finite(fmt: Format, tensors: Tensors) -> list[str]:
    """Return a warning if weights are NaN or Inf; an error if the format does not allow them."""
    names = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if names and fmt.refuses_non_finite:
        raise ConversionError(f"{non_finite(names, tensors)}; export an earlier checkpoint")
    return [non_finite(names, tensors)] if names else []


def _check_options(layer_norm: str | None, dtype: str | None, shards: int | None) -> None:
    for name, value, choices in (("layer_norm", layer_norm, CONVENTIONS), ("dtype", dtype, DTYPES)):
        if value not in (None, *choices):
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    if shards is not None and shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards!r}")


def _save(output: Path, state: dict[str, Any], beside: dict[str, bytes], progress: bool) -> list[str]:
    """Write the checkpoint and those files of `beside` that do not exist yet; return the names of the new files."""
    _check_beside(output, beside)
    parent = next(folder for folder in output.parents if folder.is_dir())
    with temporary_folder(parent, output.name) as folder:
        names = [*sorted(name for name in beside if not (output.parent / name).exists()), output.name]
        for name in names[:-1]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(beside[name])
        _write(folder / output.name, state, state["model"], progress)
        publish({folder / name: output.parent / name for name in names})
    return names


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


def _save_folder(output: Path, files: Files, progress: bool) -> list[str]:
    """Write a folder completely or not at all; return the names of its files."""
    with complete_folder(output) as folder:
        for name, content in tqdm(files.items(), desc="files", disable=None if progress else True, delay=1):
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                with _full_disk(name):  # by path: the archive gets the name of the file, by which a reader checks it
                    torch.save(content, folder / name)
    return sorted(files)


def _write(path: Path, state: dict[str, Any], tensors: Tensors, progress: bool) -> None:
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
