"""Writes a model folder back as a checkpoint of the original code: `luna-mega export`."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from luna_mega.convert.dictionary import SPECIALS, Dictionaries
from luna_mega.convert.formats import Format, registered_formats
from luna_mega.convert.formats._base import problem_type
from luna_mega.convert.formats.registry import find_format
from luna_mega.convert.layer_norm import CONVENTIONS
from luna_mega.convert.plan import Plan, Target
from luna_mega.convert.tensors import (
    DTYPES,
    Mapping,
    dtype_name,
    few,
    lowered_norms,
    map_tensors,
    store_tensors,
)
from luna_mega.errors import ConversionError
from luna_mega.hub.folder import ModelFolder, read_folder


@dataclass
class ExportReport:
    """Record of what an export read and wrote."""

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
        lines = [
            ("read", f"{self.folder}: {self.model_class}"),
            ("layout", f"{self.layout}, arch {self.args.get('arch')}, task {self.args.get('task')}"),
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
    progress: bool = False,
) -> ExportReport:
    """Write a checkpoint that the original's loader and `convert_checkpoint` read, and its dictionaries beside it.

    Args:
        folder: the output of `luna-mega convert` or `save_pretrained`.
        output: file to write, which must not exist; after a failure it does not.
        head: name of the classification head, where heads have names; the name tells its kind. None = as in the
            converted file, else the usual one.
        layer_norm: "standard" or "plus-one" (some code stores weight - 1); None = as in the converted file, else as in
            the code that has the model.
        dtype: "float32", "float16" or "bfloat16"; None = as in the converted file if nothing is lost by it, else as in
            the folder.
        dictionaries: vocabulary and label dictionary in any order; when none is given, the files in the folder.
        progress: show a progress bar on stderr if that is a terminal.

    Returns the report that the command prints.

    Raises:
        ConversionError: the folder is at fault, or the original cannot express the model; one line says how.
        ValueError: an option has no such value.
    """
    output = _check_options(output, layer_norm, dtype)
    source = read_folder(folder)
    report = source.report or {"source": {}, "decisions": {}, "dropped": [], "dtype_in": {}, "args": None}
    try:
        found, target = _choose_target(source, head, report)
        if layer_norm is not None and "layer-norm" in found.refused:
            raise ConversionError(f"--layer-norm {layer_norm}: {found.refused['layer-norm']}; leave it out")
        tensors, notes = _rename(found, target, source.tensors())
        recorded = report["args"]
        plan, mapping, args, warnings = _plan_args(found, target, tensors, recorded, report["decisions"].get("head"))
    except ConversionError as error:
        raise ConversionError(f"{source.path}: {error}") from error
    notes += found.remarks(target, args, [row["source"] for row in report["dropped"]])
    convention = layer_norm or report["decisions"].get("layer_norm") or found.norm_convention(target.revision)
    norms = {key: tensors[key] for key in mapping.norm_weights} if convention == "plus-one" else {}
    lowered = lowered_norms(source.path, norms)
    tensors, stored_as = store_tensors(tensors, mapping, lowered, dtype, report["dtype_in"])
    beside, missing = _dictionaries(source, plan, _places(found, args.get("task")), list(dictionaries))
    state = found.state(args, tensors, report["source"].get("num_updates") or 0)
    files = _save(output, state, beside, progress)
    return ExportReport(
        folder=str(source.path),
        output=str(output.parent),
        model_class=source.model_class.__name__,
        layout=found.revisions[target.revision].format,
        args=args,
        head=target.head,
        layer_norm=convention,
        tensors=len(tensors),
        dtype=dtype_name(next(iter(tensors.values())).dtype),
        files=files,
        notes=[*notes, *stored_as, *missing],
        warnings=warnings,
    )


def _check_options(output: str | Path, layer_norm: str | None, dtype: str | None) -> Path:
    for name, value, choices in (("layer_norm", layer_norm, CONVENTIONS), ("dtype", dtype, DTYPES)):
        if value not in (None, *choices):
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    output = Path(output).resolve()
    if output.exists():
        raise ConversionError(f"{output}: exists already; give a new file name or remove it")
    return output


def _choose_target(source: ModelFolder, head: str | None, report: dict[str, Any]) -> tuple[Format, Target]:
    """Return the format that can express the model; a converted model keeps the format of its file."""
    model_class, config, given = source.model_class, source.config, report["source"]
    formats = [find_format(given["layout"])] if given else registered_formats()
    wanted = head or report["decisions"].get("head")
    targets = [
        (found, Target(model_class, config, revision, wanted if _names_heads(found, model_class) else None))
        for found in formats
        if model_class in found.classes
        for revision in ([given["revision"]] if given else found.written)
    ]
    if not targets:
        family = [found for found in registered_formats() if found.config_class is type(config)]
        names = sorted({known.__name__ for found in family for known in found.classes})
        way_out = next((found.way_out for found in family if found.way_out), None)
        layout = formats[0].revisions[given["revision"]].format if given else "the fairseq code"
        raise ConversionError(
            f"{layout} has no head like that of {model_class.__name__}; "
            + (way_out or f"these can be exported: {', '.join(names)}")
        )
    problems = [list(_problems(found, target)) for found, target in targets]
    best = min(range(len(targets)), key=lambda index: len(problems[index]))
    found, target = targets[best]
    if problems[best]:
        layout = found.revisions[target.revision].format
        raise ConversionError(f"{layout} cannot express {'; '.join(problems[best])}")
    if head is not None and not _names_heads(found, model_class):
        raise ConversionError(f"--head {head}: the original has no named head for a {model_class.__name__}")
    if head is not None and not re.fullmatch(r"[\w-]+", head):
        raise ConversionError(f"--head {head!r}: a name has letters, digits, '_' and '-' only")
    if _names_heads(found, model_class) and wanted is None:
        target = replace(target, head=found.usual_head(config))
    return found, target


def _names_heads(found: Format, model_class: type) -> bool:
    return found.named_heads and model_class in found.classifiers


def _problems(found: Format, target: Target) -> Iterator[str]:
    for name, allowed in found.allowed(target).items():
        value = getattr(target.config, name)
        if value not in allowed:
            yield f"{name} = {value!r} (it has {' or '.join(map(repr, allowed))})"


def _rename(found: Format, target: Target, ours: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors under the original's names, with the ones that only a file has, and notes on these."""
    ours, notes = found.complete(target, ours)
    keymap = found.keymap(target.config, target.revision, target.head)
    matches = {name: keymap.backward(name) for name in ours}
    if unknown := [name for name, match in matches.items() if match is None]:
        raise ConversionError(f"{found.revisions[target.revision].format} has no place for {few(unknown)}")
    tensors = {matches[name].key: tensor for name, tensor in ours.items()}
    tensors |= found.extras(target, tensors)
    if found.ordered:
        tensors = {key: tensors[key] for key in sorted(tensors, key=keymap.position)}
    return tensors, notes


def _plan_args(
    found: Format,
    target: Target,
    tensors: dict[str, torch.Tensor],
    recorded: dict[str, Any] | None,
    recorded_head: str | None,
) -> tuple[Plan, Mapping, dict[str, Any], list[str]]:
    """Return the args, and the plan of a conversion with them, which must give the model of the folder back."""
    if recorded is not None and target.head in (None, recorded_head):
        try:
            plan, mapping = _read_back(found, target, tensors, recorded)
        except ConversionError:
            plan = None  # config.json was edited; the args are made from it below
        if plan is not None and not _differences(found, target, plan):
            return plan, mapping, recorded, []
    recorded = recorded or {}
    args = recorded | found.args(target)
    args |= {row.name: recorded[row.name] for row in found.table if row.kept and row.name in recorded}
    plan, mapping = _read_back(found, target, tensors, args)
    warnings = []
    for name, ours, theirs in _differences(found, target, plan):
        if name not in found.training_fields:
            raise ConversionError(
                f"config.json: {name} = {ours!r}, but the original reads {theirs!r} from these weights"
            )
        warnings.append(f"{name} = {ours!r} is not in the original, which trains with {theirs!r}; scores are the same")
    if changed := sorted(name for name in recorded if recorded[name] != args[name]):
        warnings.append(f"args of the converted file that no longer hold are replaced: {', '.join(changed)}")
    return plan, mapping, args, warnings


def _read_back(
    found: Format, target: Target, tensors: dict[str, torch.Tensor], args: dict[str, Any]
) -> tuple[Plan, Mapping]:
    tensors, _ = found.canonical(tensors)
    plan = found.plan(found.evidence(tensors, args, target.revision), target.head)
    return plan, map_tensors(plan, tensors)


def _differences(found: Format, target: Target, plan: Plan) -> list[tuple[str, Any, Any]]:
    """Return (field, the model's value, the planned value) of the fields in use whose two values differ."""
    config, planned, unused = found.resolved(target.config), found.resolved(plan.config), found.unused(target)
    pairs = [
        (name, getattr(config, name), getattr(planned, name))
        for name in (*(config.side_class or type(config)).__annotations__, "num_labels")
        if name not in unused
    ]
    if "problem_type" not in unused:
        pairs.append(("problem_type", problem_type(config), problem_type(planned)))
    if target.model_class in found.classifiers and plan.model_class is not target.model_class:
        pairs.append(("architectures", target.model_class.__name__, plan.model_class.__name__))
    return [(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs]


def _places(found: Format, task: str | None) -> tuple[set[str], str]:
    """Return the places where the task of the original looks for its vocabulary, and the place for its labels."""
    usual = "dict.txt"
    return {usual, found.vocabulary_places.get(task, usual)}, found.label_places.get(task, "label-bin/dict.txt")


def _dictionaries(
    source: ModelFolder, plan: Plan, places: tuple[set[str], str], given: list[str | Path]
) -> tuple[dict[str, bytes], list[str]]:
    """Return the dictionaries under the names that the task looks for, and notes on missing ones."""
    second = "dict.label.txt" if plan.languages is None else "dict.target.txt"
    own = [path for name in ("dict.txt", second) if (path := source.path / name).is_file()]
    found = plan.find_dictionaries(given or own, source.path)
    if found.class_names is not None:
        raise ConversionError(f"--dict {given[0]}: the original code reads no dictionary; leave the option out")
    if plan.languages is None:
        return _vocabulary_and_labels(found, source.config.id2label, plan, places)
    if found.vocabulary is None:
        return {}, ["no dict.txt in the folder, but fairseq needs both languages' beside the file; --dict adds them"]
    pairs = zip(plan.languages, (found.vocabulary, found.target), strict=True)
    return {f"dict.{language}.txt": dictionary.path.read_bytes() for language, dictionary in pairs}, []


def _vocabulary_and_labels(
    found: Dictionaries, names: dict[int, str], plan: Plan, places: tuple[set[str], str]
) -> tuple[dict[str, bytes], list[str]]:
    vocabulary, labels = places
    files, notes = {}, list(found.warnings)
    if found.vocabulary is not None:
        files |= dict.fromkeys(vocabulary, found.vocabulary.path.read_bytes())
    elif plan.vocab_size is not None:
        notes.append("no dict.txt in the folder, which fairseq needs beside the file; --dict adds it")
    if found.labels is not None:
        files[labels] = found.labels.path.read_bytes()
    elif plan.vocab_size is not None and plan.num_labels and plan.config.problem_type != "regression":
        files[labels] = _label_dictionary([names[index] for index in range(plan.num_labels)])
    return files, notes


def _label_dictionary(names: list[str]) -> bytes:
    for name in names:
        if not re.fullmatch(r"\S+( \S+)*", name) or name in SPECIALS or names.count(name) > 1:
            raise ConversionError(f"config.json: id2label has {name!r}, which no dictionary can hold; rename the class")
    return "".join(f"{name} 1\n" for name in names).encode()


def _save(output: Path, state: dict[str, Any], beside: dict[str, bytes], progress: bool) -> list[str]:
    """Write the checkpoint, and the files `beside` it that are not there already; return the names of the new files."""
    parent = next(folder for folder in output.parents if folder.is_dir())
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=parent) as temporary:
        folder = Path(temporary)
        for name, content in beside.items():
            there = output.parent / name
            if not there.exists():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)
            elif there.read_bytes() != content:
                raise ConversionError(f"{there}: another file is there; remove it or give another --output")
        _write(folder / output.name, state, progress)
        return _publish(folder, output)


def _write(path: Path, state: dict[str, Any], progress: bool) -> None:
    size = sum({id(tensor): tensor.nbytes for tensor in state["model"].values()}.values())
    bar = {"desc": path.name, "total": size, "disable": None if progress else True, "delay": 1}
    try:
        with path.open("wb") as file, tqdm.wrapattr(file, "write", **bar) as writer:
            torch.save(state, writer)
    except RuntimeError as error:  # torch raises it when the disk is full
        raise ConversionError(f"cannot write {path.name}: {error}") from error


def _publish(folder: Path, output: Path) -> list[str]:
    """Move the files from `folder` to the folder of `output`, the checkpoint itself last."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != output.name]
    names = [str(path.relative_to(folder)) for path in (*files, folder / output.name)]
    done = []
    try:
        for name in names:
            target = output.parent / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (folder / name).rename(target)
            done.append(target)
    except BaseException:  # an interrupt leaves nothing behind either
        for path in done:
            path.unlink()
        raise
    return names
