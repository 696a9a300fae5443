"""Choose the format, the args and the tensors of an export.

An export is checked by reading it back: the args through the table, the names through the key map. No tensor is
converted for this check.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.evidence import Evidence, ModelSpec, Tensors, is_classifier, problem_type, same_bits
from luna_mega.convert.export.writer import Writer, write_args, writer_of
from luna_mega.convert.formats import Format, registered_formats
from luna_mega.convert.formats.format import read_model
from luna_mega.convert.formats.registry import find_format
from luna_mega.convert.keymap import Reshape
from luna_mega.convert.tensors import TensorMap, few, map_tensors, weights_of
from luna_mega.errors import ConversionError, shown

# Fields for initialization and execution, which a checkpoint does not contain.
_NOT_IN_A_FILE = {"initializer_range", "sparse_prediction", "unpad_inputs", "use_cache"}
_OF_CLASSIFIERS = tuple(
    "pooling pool_padding drop_first_token classifier_num_layers classifier_hidden_size classifier_activation "
    "classifier_dropout classifier_bias pair_features num_labels".split()
)
_OPTIONAL_IDS = ("bos_token_id", "eos_token_id")


@dataclass
class Choice:
    """A model as a checkpoint: its args and tensors, and the model `read` that the converter reads from them."""

    writer: Writer
    spec: ModelSpec
    args: dict[str, Any]
    tensors: Tensors
    read: ModelSpec
    evidence: Evidence
    notes: list[str]
    warnings: list[str]
    mapping: TensorMap | None = None


class _Inexpressible(ConversionError):
    """The original code does not support values of the configuration."""

    def __init__(self, layout: str, problems: list[str], was_read: bool):
        super().__init__(f"{layout} cannot express {'; '.join(problems)}")
        self.distance = (not was_read, len(problems))


def choose_export(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Tensors,
    head: str | None,
    report: dict[str, Any],
) -> Choice:
    """Return a model as a checkpoint; a converted model keeps the format in `report`, the record of its conversion."""
    given = report["source"]
    formats = [find_format(given["layout"])] if given else registered_formats()
    writers = [writer for writer in map(writer_of, formats) if writer is not None]
    if not writers:
        raise ConversionError(f"format {given['layout']} can only be converted; it has no registered writer")
    if given and given["revision"] not in formats[0].facts.revisions.keys() - {"unknown"}:
        raise ConversionError(f"format {given['layout']} has no revision {shown(given['revision'])}")
    wanted = head or report["decisions"].get("head")
    specs = [
        (writer, ModelSpec(model_class, writer.resolve(config), revision, _head(writer, model_class, config, wanted)))
        for writer in writers
        if model_class in writer.format.facts.model_classes
        for revision in ([given["revision"]] if given else writer.revisions)
    ]
    if not specs:
        raise ConversionError(_no_format(model_class, config, formats[0], given))
    if wanted is not None and not re.fullmatch(r"[\w-]+", wanted):
        raise ConversionError(f"--head {shown(wanted)}: a name has letters, digits, '_' and '-' only")
    for name, other in weights_of(config, model_class).tied.items():
        if {name, other} <= tensors.keys() and not same_bits(tensors[name], tensors[other]):
            raise ConversionError(
                f"config.json ties {name} to {other}, but their weights differ; set tie_word_embeddings to false"
            )
    failures = []
    for writer, spec in specs:
        try:
            chosen = _choice(writer, spec, tensors, report)
            break
        except ConversionError as error:
            failures.append(error)
    else:
        inexpressible = [error for error in failures if isinstance(error, _Inexpressible)]
        raise min(inexpressible, key=lambda error: error.distance) if inexpressible else failures[0]
    if head is not None and chosen.spec.head is None:
        raise ConversionError(f"--head {head}: the original has no named head for a {model_class.__name__}")
    read, fmt = chosen.read, chosen.writer.format  # the class differs for an encoder, which gets an untrained head
    weights = weights_of(read.config, read.model_class, *fmt.facts.additional_classes)
    chosen.mapping = map_tensors(fmt.keymap(read), weights, chosen.tensors)
    return chosen


def _head(writer: Writer, model_class: type, config: PreTrainedConfig, requested: str | None) -> str | None:
    """Return the name of a model's classification head (`requested` or the usual name), or None if it has no name."""
    usual = writer.head(config) if is_classifier(model_class) else None
    return usual and (requested or usual)


def _no_format(model_class: type, config: PreTrainedConfig, fmt: Format, given: dict[str, Any]) -> str:
    family = [known for known in registered_formats() if known.facts.config_class is type(config)]
    names = sorted({known.__name__ for relative in family for known in relative.facts.model_classes})
    advice = next((writer.advice for writer in map(writer_of, family) if writer and writer.advice), None)
    layout = fmt.facts.revisions[given["revision"]].format if given else "the fairseq code"
    return f"{layout} has no head like {model_class.__name__}'s; " + (
        advice or f"these can be exported: {', '.join(names)}"
    )


def _choice(writer: Writer, spec: ModelSpec, ours: Tensors, report: dict[str, Any]) -> Choice:
    """Return the model as a checkpoint of a format; raise an error if the format does not support it."""
    fmt = writer.format
    layout = fmt.facts.revisions[spec.revision].format
    if problems := [
        f"{name} = {value!r} (it has {' or '.join(map(repr, values))})"
        for name, values in writer.limits(spec).items()
        if (value := getattr(spec.config, name)) not in values
    ]:
        raise _Inexpressible(layout, problems, was_read=False)
    tied = weights_of(spec.config, spec.model_class, *fmt.facts.additional_classes).tied
    ours = ours | {copy: ours[original] for copy, original in tied.items() if original in ours}
    tensors, unknown, notes = _rename(writer, spec, ours)
    unplaced = ConversionError(f"{layout} has no place for {few(unknown)}") if unknown else None
    try:
        args, read, evidence = _choose_args(writer, spec, tensors, report)
    except ConversionError as error:
        raise unplaced or error from error
    differences = list(_differences(writer, spec, read))
    training, rows = writer.training_fields, {row.field for row in fmt.table if row.name}
    if problems := [
        f"{name} = {ours!r} (it {'reads' if name in rows else 'has'} {theirs!r})"
        for name, ours, theirs in differences
        if name not in training
    ]:
        raise _Inexpressible(layout, problems, was_read=True)
    if unplaced is not None:
        raise unplaced
    warnings = [
        f"{name} = {ours!r} is not in the original, which trains with {theirs!r}; scores are the same"
        for name, ours, theirs in differences
    ]
    if replaced := sorted(name for name, value in report["args"].items() if value != args[name]):
        warnings.append(f"args of the converted file that no longer apply are replaced: {', '.join(replaced)}")
    return Choice(writer, spec, args, tensors, read, evidence, notes, warnings)


def _rename(writer: Writer, spec: ModelSpec, ours: Tensors) -> tuple[Tensors, list[str], list[str]]:
    """Return the tensors in the order of the file, the names without a counterpart, and notes on added tensors."""
    keymap, tensors, unknown = writer.format.keymap(spec), {}, []
    for name, tensor in ours.items():
        if (match := keymap.backward(name)) is None:
            unknown.append(name)
        else:
            reshape = match.row.transform
            tensors[match.key] = reshape.backward(tensor) if isinstance(reshape, Reshape) else tensor
    added = {name: tensor for name, tensor in writer.added(spec, tensors).items() if name not in tensors}
    tensors |= added | {row.source: tensors[row.copy_of] for row in keymap.rows if row.copy_of in tensors}
    notes = [writer.note_of_added] if added and writer.note_of_added else []
    return {key: tensors[key] for key in sorted(tensors, key=keymap.position)}, unknown, notes


def _choose_args(
    writer: Writer, spec: ModelSpec, tensors: Tensors, report: dict[str, Any]
) -> tuple[dict[str, Any], ModelSpec, Evidence]:
    """Return the args of the converted file if they still describe the model; else return args of its configuration.

    Also return the model that is read from the args, and its evidence.
    """
    recorded = report["args"]
    kept = {name: value for name, value in recorded.items() if name in writer.kept}
    made = recorded | write_args(writer, spec) | kept
    same_head = report["source"] and spec.head in (None, report["decisions"].get("head"))
    for args in (recorded, made) if same_head else (made,):
        try:
            read, evidence = read_model(writer.format, tensors, args, spec.revision, spec.head)
        except ConversionError:
            if args is made:
                raise
            continue  # config.json was edited
        if args is made or not any(_differences(writer, spec, read)):
            break
    evidence.left_out += [row["source"] for row in report["dropped"]]
    return args, read, evidence


def _differences(writer: Writer, spec: ModelSpec, read: ModelSpec) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, value in the model, value that is read) for each used field whose two values differ."""
    config, theirs_config, unused = spec.config, writer.resolve(read.config), _unused(writer, spec)
    pairs = {
        name: (getattr(config, name), getattr(theirs_config, name))
        for name in (*(config.side_class or type(config)).__annotations__, "num_labels")
    }
    pairs["problem_type"] = problem_type(config), problem_type(theirs_config)
    if is_classifier(spec.model_class) and read.model_class is not spec.model_class:
        pairs["architectures"] = spec.model_class.__name__, read.model_class.__name__
    for name, (ours, theirs) in pairs.items():
        if name not in unused and ours != theirs and not (ours is None and name in _OPTIONAL_IDS):
            yield name, ours, theirs


def _unused(writer: Writer, spec: ModelSpec) -> set[str]:
    """Return the fields that a checkpoint of the model does not determine, and that may therefore differ."""
    config, name = spec.config, spec.model_class.__name__
    conditions = {
        ("vocab_size", "pad_token_id", *_OPTIONAL_IDS): config.input_type != "tokens",
        _OF_CLASSIFIERS: not is_classifier(spec.model_class),
        ("pair_features",): not name.endswith("PairClassification"),
        ("problem_type",): not name.endswith("ForSequenceClassification"),
        ("classifier_hidden_size", "classifier_activation"): config.classifier_num_layers == 0,
    }
    unused = _NOT_IN_A_FILE | writer.unused(spec)
    return unused.union(*(names for names, applies in conditions.items() if applies))
