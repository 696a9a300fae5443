"""The choice of the format, the args and the tensors of an export.

An export is checked by reading it back: the args through the table, the names through the key map. No tensor is
converted for it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.evidence import Evidence, same_bits
from luna_mega.convert.formats import Format, registered_formats
from luna_mega.convert.formats.format import read_model
from luna_mega.convert.formats.registry import find_format
from luna_mega.convert.keymap import KeyMap, Reshape
from luna_mega.convert.table import beyond, write_args
from luna_mega.convert.target import Target, problem_type
from luna_mega.convert.tensors import Mapping, Weights, few, map_tensors, together, weights_of
from luna_mega.errors import ConversionError, shown

Tensors = dict[str, torch.Tensor]
# Fields for initialization and execution, of which a checkpoint says nothing.
_NOT_IN_A_FILE = {"initializer_range", "sparse_prediction", "unpad_inputs", "use_cache"}
_OF_CLASSIFIERS = {
    "pooling",
    "pool_padding",
    "drop_first_token",
    "classifier_num_layers",
    "classifier_hidden_size",
    "classifier_activation",
    "classifier_dropout",
    "classifier_bias",
    "pair_features",
    "num_labels",
}
# Token ids that a model may leave out.
_OPTIONAL_IDS = ("bos_token_id", "eos_token_id")


@dataclass
class Candidate:
    """A model as a checkpoint of one format and revision.

    Args:
        problems: fields that the original does not have.
        error: the reason why the tensors or args cannot be written or read.
        lost: training settings that the original lacks, as (field, value of the model, value that is read).
    """

    format: Format
    target: Target
    args: dict[str, Any] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    read: Target | None = None
    evidence: Evidence | None = None
    mapping: Mapping | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    error: ConversionError | None = None
    lost: list[tuple[str, Any, Any]] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    @property
    def layout(self) -> str:
        """Return the format in words, as of its revision."""
        return self.format.facts.revisions[self.target.revision].format

    @property
    def warnings(self) -> list[str]:
        """Return the warnings about settings that an export loses."""
        warnings = [
            f"{name} = {ours!r} is not in the original, which trains with {theirs!r}; scores are the same"
            for name, ours, theirs in self.lost
        ]
        if self.replaced:
            warnings.append(f"args of the converted file that no longer hold are replaced: {', '.join(self.replaced)}")
        return warnings


def choose_export(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Tensors,
    head: str | None,
    report: dict[str, Any],
) -> Candidate:
    """Return a model as a checkpoint; a converted model keeps the format of its file.

    Args:
        model_class, config, tensors: the model.
        head: the option `--head`.
        report: the record of the conversion.

    Raises:
        ConversionError: no format has the head, or the best one lacks a value of the configuration or a tensor.
    """
    given = report["source"]
    formats = [find_format(given["layout"])] if given else registered_formats()
    if given and _known(given["revision"], formats[0]) not in formats[0].facts.revisions:
        raise ConversionError(f"format {given['layout']} has no revision {shown(given['revision'])}")
    wanted = head or report["decisions"].get("head")
    targets = [
        (fmt, Target(model_class, fmt.facts.resolve(config), revision, fmt.facts.head_of(model_class, config, wanted)))
        for fmt in formats
        if model_class in fmt.facts.model_classes
        for revision in ([given["revision"]] if given else fmt.facts.written)
    ]
    if not targets:
        raise ConversionError(_no_format(model_class, config, formats[0], given))
    if wanted is not None and not re.fullmatch(r"[\w-]+", wanted):
        raise ConversionError(f"--head {shown(wanted)}: a name has letters, digits, '_' and '-' only")
    built = cache(lambda each: weights_of(each, config))
    _check_tied(built(model_class), tensors)
    candidates = (_candidate(fmt, target, tensors, report, built) for fmt, target in targets)
    best = _best(candidates)
    if best.problems:
        raise ConversionError(f"{best.layout} cannot express {'; '.join(best.problems)}")
    if head is not None and best.target.head is None:
        raise ConversionError(f"--head {head}: the original has no named head for a {model_class.__name__}")
    if best.error is not None:
        raise best.error
    read, also = best.read, best.format.facts.also
    if read.model_class is not model_class:  # a bare encoder becomes a model with a head
        built = cache(lambda each: weights_of(each, read.config))
    weights = together(built(each) for each in dict.fromkeys((read.model_class, *also)))
    best.mapping = map_tensors(best.format.keymap(read), weights, best.tensors)
    return best


def _known(revision: str, fmt: Format) -> str:
    return fmt.facts.written[0] if revision == "unknown" else revision


def _check_tied(weights: Weights, tensors: Tensors) -> None:
    """Raise `ConversionError` if tied weights are both in the folder and differ."""
    for name, other in weights.tied.items():
        if {name, other} <= tensors.keys() and not same_bits(tensors[name], tensors[other]):
            raise ConversionError(
                f"config.json ties {name} to {other}, but their weights differ; set tie_word_embeddings to false"
            )


def _best(candidates: Iterable[Candidate]) -> Candidate:
    """Return the first candidate without a problem, or else the one that is closest to the original."""
    tried = []
    for one in candidates:
        if one.error is None and not one.problems:
            return one
        tried.append(one)
    return min(tried, key=lambda one: (one.error is not None and not one.problems, one.read is None, len(one.problems)))


def _no_format(model_class: type, config: PreTrainedConfig, fmt: Format, given: dict[str, Any]) -> str:
    family = [known.facts for known in registered_formats() if known.facts.config_class is type(config)]
    names = sorted({known.__name__ for facts in family for known in facts.model_classes})
    way_out = next((facts.way_out for facts in family if facts.way_out), None)
    layout = fmt.facts.revisions[given["revision"]].format if given else "the fairseq code"
    return f"{layout} has no head like that of {model_class.__name__}; " + (
        way_out or f"these can be exported: {', '.join(names)}"
    )


def _candidate(
    fmt: Format, target: Target, ours: Tensors, report: dict[str, Any], built: Callable[[type], Weights]
) -> Candidate:
    found = Candidate(fmt, target, problems=list(beyond(fmt.table, target)))
    if found.problems:
        return found
    try:
        tied = together(built(each) for each in dict.fromkeys((target.model_class, *fmt.facts.also))).tied
        unknown = _rename(found, ours | {copy: ours[original] for copy, original in tied.items() if original in ours})
        unplaced = ConversionError(f"{found.layout} has no place for {few(unknown)}") if unknown else None
        try:
            _choose_args(found, report)
        except ConversionError as error:
            raise unplaced or error from error
        if not found.problems and unplaced is not None:
            raise unplaced
    except ConversionError as error:
        found.error = error
    return found


def _rename(found: Candidate, ours: Tensors) -> list[str]:
    """Set the tensors under the original's names, with those that only a file has; return names without a place."""
    keymap, tensors, unknown = found.format.keymap(found.target), {}, []
    for name, tensor in ours.items():
        match = keymap.backward(name)
        if match is None:
            unknown.append(name)
        else:
            reshape = match.row.transform
            tensors[match.key] = reshape.back(tensor) if isinstance(reshape, Reshape) else tensor
    found.notes += _fill(keymap, tensors)
    found.tensors = {key: tensors[key] for key in sorted(tensors, key=keymap.position)}
    return unknown


def _fill(keymap: KeyMap, tensors: Tensors) -> list[str]:
    """Add the tensors that a file has and a model lacks: buffers, versions and copies; return notes on them."""
    dtype, notes = next(iter(tensors.values())).dtype, {}
    for row in keymap.rows:
        for name in row.names(list(tensors)) if row.fill else ():
            if name not in tensors:
                tensors[name], notes[row.note] = row.fill(dtype), None
        if row.copy_of in tensors:
            tensors[row.source] = tensors[row.copy_of]
    return list(filter(None, notes))


def _choose_args(found: Candidate, report: dict[str, Any]) -> None:
    """Set the args of the converted file if they still describe the model, else args made of its configuration.

    Raises:
        ConversionError: the original does not read a model from these args and tensors.
    """
    fmt, target, recorded = found.format, found.target, report["args"]
    kept = {row.name: recorded[row.name] for row in fmt.table if row.kept and row.name in recorded} if recorded else {}
    made = (recorded or {}) | write_args(fmt.table, target) | kept
    same_head = recorded is not None and target.head in (None, report["decisions"].get("head"))
    for args in (recorded, made) if same_head else (made,):
        try:
            read, evidence = read_model(fmt, found.tensors, args, target.revision, target.head)
        except ConversionError:
            if args is made:
                raise
            continue  # config.json was edited
        differences = list(_differences(fmt, target, read))
        if args is made or not differences:
            break
    evidence.left_out += [row["source"] for row in report["dropped"]]
    found.args, found.read, found.evidence = args, read, evidence
    found.replaced = sorted(name for name in recorded or {} if recorded[name] != args[name])
    training = fmt.facts.training_fields
    found.lost = [difference for difference in differences if difference[0] in training]
    rows = {row.field for row in fmt.table if row.name}
    found.problems = [
        f"{name} = {ours!r} (it {'reads' if name in rows else 'has'} {theirs!r})"
        for name, ours, theirs in differences
        if name not in training
    ]


def _differences(fmt: Format, target: Target, read: Target) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, the model's value, the value that is read) of the fields in use whose two values differ."""
    config, theirs_config, unused = target.config, fmt.facts.resolve(read.config), _unused(fmt, target)
    pairs = {
        name: (getattr(config, name), getattr(theirs_config, name))
        for name in (*(config.side_class or type(config)).__annotations__, "num_labels")
    }
    pairs["problem_type"] = problem_type(config), problem_type(theirs_config)
    if target.model_class in fmt.facts.classifiers and read.model_class is not target.model_class:
        pairs["architectures"] = target.model_class.__name__, read.model_class.__name__
    for name, (ours, theirs) in pairs.items():
        if name not in unused and ours != theirs and not (ours is None and name in _OPTIONAL_IDS):
            yield name, ours, theirs


def _unused(fmt: Format, target: Target) -> set[str]:
    """Return the fields that a checkpoint of the model does not determine, so that they may differ."""
    config, name, unused = target.config, target.model_class.__name__, _NOT_IN_A_FILE | fmt.facts.unused(target)
    if config.input_type != "tokens":
        unused |= {"vocab_size", "pad_token_id", *_OPTIONAL_IDS}
    if target.model_class not in fmt.facts.classifiers:
        unused |= _OF_CLASSIFIERS
    if not name.endswith("PairClassification"):
        unused |= {"pair_features"}
    if not name.endswith("ForSequenceClassification"):
        unused |= {"problem_type"}
    if config.classifier_num_layers == 0:
        unused |= {"classifier_hidden_size", "classifier_activation"}
    return unused
