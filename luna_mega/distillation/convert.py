"""Convert trained encoders to folders with a Luna model, for `luna-mega distill`."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from luna_mega._cards import FILE_NAME
from luna_mega.distillation.agreement import compare_lengths
from luna_mega.distillation.equality import class_of_scores, compare_folder
from luna_mega.distillation.exact import ConversionReport, convert_encoder, load_source
from luna_mega.distillation.loading import find_teacher
from luna_mega.distillation.parts import find_head
from luna_mega.distillation.sentences import read_modules
from luna_mega.errors import ConversionError
from luna_mega.escaping import code
from luna_mega.hub.card import license_of, task_of
from luna_mega.hub.folder import set_max_length
from luna_mega.hub.output import check_output, complete_folder

logger = logging.getLogger(__name__)
# Class of sentence-transformers, or head -> the imported name, the call that loads the folder `name`, and an example.
_LOADERS = {
    "SentenceTransformer": ("", "SentenceTransformer(name)", 'model.encode(["a text", "another text"])'),
    "SparseEncoder": ("", "SparseEncoder(name)", 'model.encode(["a text", "another text"])'),
    "CrossEncoder": ("", "CrossEncoder(name)", 'model.predict([("a question", "a passage")])'),
    "ForMaskedLM": ("pipeline", 'pipeline("fill-mask", name)', 'model(f"a text with a {model.tokenizer.mask_token}")'),
    "ForSequenceClassification": ("pipeline", 'pipeline("text-classification", name)', 'model("a text")'),
    "ForTokenClassification": (
        "pipeline", 'pipeline("token-classification", name, aggregation_strategy="simple")', 'model("a text")',
    ),
}  # fmt: skip
_TASKS = {"SentenceTransformer": "sentence-similarity", "CrossEncoder": "text-ranking"}


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
            f"reads {self.max_length:,}\n{self.conversion}\n{kind} written to {self.output}; its README.md "
            "contains the code that loads it"
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
    place, sizes = check_output(output), (projection_length, max_length, position_extension)
    try:
        lines = None if texts is None else _read_lines(Path(texts))
        name = find_teacher(teacher)
        modules = read_modules(name) if num_labels is None else None
        source, tokenizer = load_source(name, sizes, num_labels)
        model, tokenizer, report = convert_encoder(source, tokenizer, sizes, lines)
        lengths, new_head = report.lengths, num_labels is not None
        if lines is not None:
            report.agreement = compare_lengths(source, model, tokenizer, lines, lengths, modules, vectors=new_head)
            set_max_length(tokenizer, lengths.max_length)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    loader = "" if new_head else class_of_scores(model, modules) or find_head(model)
    with complete_folder(place) as folder:
        logger.info("writing the folder")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if modules is not None:
            modules.write(folder, lengths.max_length)
        _card(teacher, license_of(name), place.name, model, loader, report).save(folder / FILE_NAME)
        report.differences = compare_folder(source, name, model, folder, modules, new_head)
    rows, longest = lengths.projection_length, lengths.max_length
    return DistillReport(type(model).__name__, place, rows, longest, modules is not None, report)


def _read_lines(path: Path) -> list[str]:
    """Return the lines of `--texts`."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"--texts {path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    if not (lines := [line for line in lines if line]):
        raise ValueError(f"--texts {path} has no text; it must have one text per line")
    return lines


def _card(teacher: str, license: str | None, name: str, model: Any, loader: str, report: ConversionReport) -> ModelCard:
    """Return the model card of the folder `name`, with the code for a `loader`: a class or a head."""
    library = "transformers" if loader.startswith("For") or not loader else "sentence-transformers"
    local, kind, auto = Path(teacher).exists(), type(model).__name__, f"AutoModel{find_head(model)}"
    imported, call, example = _LOADERS.get(loader, (f"{auto}, AutoTokenizer", f"{auto}.from_pretrained(name)", ""))
    data = ModelCardData(
        base_model=None if local else teacher,
        license=license,
        library_name=library,
        pipeline_tag=_TASKS.get(loader, task_of(kind, model.config)),
        tags=sorted({"luna", library}),
    )
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md")),
        teacher=code(Path(teacher).resolve().name if local else teacher),
        model_class=kind,
        lengths=report.lengths,
        module="transformers" if imported else "sentence_transformers",
        imported=imported or loader,
        name=json.dumps(name),
        call=call,
        example=example,
        agreement=report.agreement,
    )
