"""Convert trained encoders to folders with a Luna model, for `luna-mega distill`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from luna_mega.distillation.agreement import compare_lengths
from luna_mega.distillation.comparison import compare_folder
from luna_mega.distillation.exact import ConversionReport, convert_encoder, load_source
from luna_mega.distillation.sentences import read_modules
from luna_mega.errors import ConversionError
from luna_mega.escaping import code
from luna_mega.hub.card import license_of
from luna_mega.hub.folder import set_max_length
from luna_mega.hub.output import check_output, complete_folder


@dataclass(frozen=True)
class DistillReport:
    """Record of `convert_teacher`."""

    model_class: str
    output: Path
    projection_length: int
    max_length: int
    sentence_transformers: bool
    conversion: ConversionReport

    def __str__(self) -> str:
        kind = "sentence-transformers folder" if self.sentence_transformers else "folder"
        return (
            f"{self.model_class}: equals the teacher for texts of up to {self.conversion.lengths.exact:,} tokens, "
            f"reads {self.max_length:,}\n{self.conversion}\n{kind} written to {self.output}"
        )


def convert_teacher(
    teacher: str,
    output: str | Path,
    projection_length: int | None = None,
    max_length: int | None = None,
    position_extension: str | None = "interpolate",
    texts: str | Path | None = None,
    num_labels: int | None = None,
) -> DistillReport:
    """Write a trained encoder as a folder with a Luna model and its tokenizer; see `from_teacher`.

    Args:
        teacher: name on the Hub or folder. If it is a sentence-transformers model, its modules are copied.
        output: output folder, which must not exist or be empty.
        projection_length: see `from_teacher`.
        max_length: see `from_teacher`.
        position_extension: see `from_teacher`.
        texts: text file to fit the salience on and to compare the model with its teacher, with one text per line.
        num_labels: see `from_teacher`; a classifier is saved without the modules of sentence-transformers.

    Raises:
        ConversionError: The teacher is not supported, an option is out of range, a file is invalid, or the folder
            differs from the teacher; see `compare_folder`.
    """
    place = check_output(output)
    if len(Path(teacher).parts) > 2 and not Path(teacher).exists():  # a name on the Hub has at most two parts
        raise ConversionError(f"{teacher}: no such folder or model; pass a folder or a name on the Hub")
    try:
        modules = read_modules(teacher) if num_labels is None else None
        lines = None if texts is None else _read_lines(Path(texts))
        source, tokenizer = load_source(teacher, num_labels)
        sizes = (projection_length, max_length, position_extension)
        model, tokenizer, report = convert_encoder(source, tokenizer, *sizes, lines)
        lengths = report.lengths
        if lines is not None:
            bare = num_labels is not None
            report.agreement = compare_lengths(source, model, tokenizer, lines, lengths, modules, vectors=bare)
            set_max_length(tokenizer, lengths.max_length)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    with complete_folder(place) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if modules is not None:
            modules.write(folder, lengths.max_length)
        (folder / "README.md").write_text(_card(teacher, type(model).__name__, report), encoding="utf-8")
        report.differences = compare_folder(source, teacher, model, folder, modules, num_labels is not None)
    name = type(model).__name__
    return DistillReport(name, place, lengths.projection_length, lengths.max_length, modules is not None, report)


def _read_lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    if not (lines := [line for line in lines if line]):
        raise ValueError(f"{path} has no text; it must have one text per line")
    return lines


def _card(teacher: str, model_class: str, report: ConversionReport) -> str:
    """Return the model card."""
    data: dict[str, Any] = {"library_name": "transformers", "tags": ["luna"]}
    local = Path(teacher).exists()
    if not local:
        data["base_model"] = teacher
    if license := license_of(teacher):
        data["license"] = license
    name = code(Path(teacher).resolve().name if local else teacher)
    lengths, packed = report.lengths, ""
    if lengths.projection_length < lengths.max_length:
        packed = (
            f" Longer texts are packed into\n{lengths.projection_length} rows per layer, so that time and memory are "
            "linear in their length."
        )
    parts = [f"{lengths.note[0].upper()}{lengths.note[1:]}.\n"] if lengths.note else []
    parts += [] if report.agreement is None else [f"## Agreement with the teacher\n\n{report.agreement}\n"]
    return (
        f"---\n{yaml.safe_dump(data)}---\n\n# Luna from {name}\n\n`{model_class}` with the weights of {name}. It\n"
        f"equals that model for texts of up to {lengths.exact} tokens, and reads at most {lengths.max_length}."
        f"{packed}\n"
        "\n```python\nimport luna_mega  # registers the model with transformers\n\n"
        f"model = luna_mega.{model_class}.from_pretrained(...)  # this repository, or a folder with its files\n```\n"
        + "".join(f"\n{part}" for part in parts)
    )
