"""Export of a model folder as a checkpoint of the original code (`luna-mega export`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from luna_mega.convert.conventions import MINUS_ONE, NORMS, check_choice
from luna_mega.convert.evidence import Tensors
from luna_mega.convert.export.choice import Choice, choose_export
from luna_mega.convert.export.tensors import norms_minus_one, store_tensors
from luna_mega.convert.export.writer import Export
from luna_mega.convert.tensors import DTYPES, non_finite
from luna_mega.errors import ConversionError, errors_of
from luna_mega.hub.folder import REPORT_NAME, ModelFolder, read_folder
from luna_mega.hub.output import check_new_file, check_output

_NOT_CONVERTED = {"source": {}, "decisions": {}, "dropped": [], "dtype_in": {}, "args": {}}


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
        origin = [f"{name} {self.args[name]}" for name in ("arch", "task") if name in self.args]
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
    """Write a checkpoint that the original's loader and `convert_checkpoint` read, and its dictionaries.

    Args:
        folder: Output of `luna-mega convert` or `save_pretrained`.
        output: File to write, which must not exist; a folder, absent or empty, if checkpoints of the model are folders.
            It is not changed if the export fails.
        head: Name of the classification head, if heads have names. Default: the name in the converted file, or the
            usual one.
        layer_norm: "standard" or "plus-one" (the original stores weight - 1). Default: the converted file's convention,
            or the original code's.
        dtype: "float32", "float16" or "bfloat16". Default: the dtype of the converted file if it is lossless, or of the
            folder.
        dictionaries: Vocabulary and label dictionary in any order, or a SentencePiece model. Default: the files in the
            folder.
        shards: Number of shards, if checkpoints are folders. Default: the number in the converted folder, or 1.
        progress: Show a progress bar if stderr is a terminal.

    Returns:
        The report that the command prints.

    Raises:
        ConversionError: If the folder is invalid, or the original does not support the model.
        ValueError: If an option has an invalid value.
    """
    check_choice("layer_norm", layer_norm, (None, *NORMS))
    check_choice("dtype", dtype, (None, *DTYPES))
    if shards is not None and shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards!r}")
    source = read_folder(folder)
    report = _recorded(source)
    with errors_of(source.path):
        chosen = choose_export(source.model_class, source.config, source.tensors(), head, report)
        writer, spec = chosen.writer, chosen.spec
        facts = writer.format.facts
        if layer_norm is not None and "layer-norm" in facts.unsupported_options:
            raise ConversionError(f"--layer-norm {layer_norm}: {facts.unsupported_options['layer-norm']}; omit it")
        if shards is not None and not writer.is_folder:
            raise ConversionError(f"--shards {shards}: a {facts.name} checkpoint is one file; omit the option")
    output = check_output(output) if writer.is_folder else check_new_file(output)
    mapping, tensors = chosen.mapping, chosen.tensors
    revision = facts.revisions[spec.revision]
    convention = layer_norm or report["decisions"].get("layer_norm") or revision.norms
    lowered = {}
    if convention == MINUS_ONE:
        lowered = norms_minus_one(source.path, {key: tensors[key] for key in mapping.norm_weights})
    tensors, stored, stored_as = store_tensors(tensors, mapping, lowered, dtype, report["dtype_in"])
    warnings = _non_finite(source.path, chosen, tensors, stored)
    kind = writer.format.companions(chosen.read, chosen.evidence).dictionaries
    companions, missing = kind.export(list(dictionaries), source.path, source.config.id2label)
    updates = report["source"].get("num_updates") or 0
    files = writer.write(output, Export(spec, chosen.args, tensors, companions, updates, shards), progress)
    return ExportReport(
        folder=str(source.path),
        output=str(output if writer.is_folder else output.parent),
        model_class=source.model_class.__name__,
        layout=revision.format,
        args=chosen.args,
        head=spec.head,
        layer_norm=convention,
        tensors=len(tensors),
        dtype=stored,
        files=files,
        notes=[*chosen.notes, *writer.notes(spec, chosen.evidence), *stored_as, *missing],
        warnings=[*warnings, *chosen.warnings],
    )


def _recorded(source: ModelFolder) -> dict[str, Any]:
    """Return the record of the conversion that wrote the folder, or an empty record if there is none."""
    if (report := source.report) is None:
        return _NOT_CONVERTED
    if not (
        isinstance(report["source"].get("num_updates"), (int, NoneType))
        and isinstance(report["decisions"].get("head"), (str, NoneType))
        and report["decisions"].get("layer_norm") in (None, *NORMS)
        and all(isinstance(row, dict) and isinstance(row.get("source"), str) for row in report["dropped"])
        and all(isinstance(getattr(torch, name, None), torch.dtype) for name in report["dtype_in"])
    ):
        raise ConversionError(
            f"{source.path / REPORT_NAME}: not as luna-mega convert writes it; remove it, or convert the file again"
        )
    return report


def _non_finite(folder: Path, chosen: Choice, tensors: Tensors, dtype: str) -> list[str]:
    """Return a warning about weights that are NaN or Inf.

    Raise an error if only the conversion to `dtype` makes weights infinite.
    """
    names = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if overflown := [name for name in names if chosen.tensors[name].isfinite().all()]:
        raise ConversionError(f"{folder}: {non_finite(overflown, tensors)} in {dtype}; choose a wider --dtype")
    if names and chosen.writer.format.facts.finite:
        raise ConversionError(f"{folder}: {non_finite(names, tensors)}; export an earlier checkpoint")
    return [non_finite(names, tensors)] if names else []
