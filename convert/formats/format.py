"""A format: one kind of checkpoint, described once for both directions.

A format has six members: `facts` are words and names, `table` translates arguments and fields of the configuration,
`recognise` identifies a file, `keymap` translates names of tensors, `companions` are the files next to the weights, and
`report` has the words for the user.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.dictionary import Dictionaries
from luna_mega.convert.dictionary_kinds import DictionaryKind
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.formats.containers import Container, FairseqFile
from luna_mega.convert.keymap import KeyMap
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.table import HEAD, MODEL, Table, build_config, defaults, read_fields, typed_args
from luna_mega.convert.target import Target
from luna_mega.convert.tokenizers import ConvertedTokenizer
from luna_mega.errors import ConversionError

Tensors = dict[str, torch.Tensor]
Bpe = str | Path | None  # the option `--bpe`
# Makes the tokenizer from the dictionaries and the option, and adds notes to the list.
MakeTokenizer = Callable[[Dictionaries, Bpe, list[str]], ConvertedTokenizer | None]


@dataclass(frozen=True)
class Revision:
    """Words for one revision of the original code: the format as it was then, the revision, the code."""

    format: str
    name: str
    code: str


def _nothing(_: Target) -> set[str]:
    return set()


def _unchanged(config: PreTrainedConfig) -> PreTrainedConfig:
    return config


def no_tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> None:
    """Return no tokenizer, the `MakeTokenizer` of a model without one."""
    if bpe is not None:
        raise ConversionError(f"--bpe {bpe}: the model has no tokenizer; leave the option out")


@dataclass(frozen=True)
class Facts:
    """Words and names of a format.

    Args:
        name: the `layout` in reports; no two formats have the same.
        revisions: name -> words, for every revision of the original code.
        written: revisions to try, in this order, when a model that was not converted is exported.
        config_class: the configuration of the models.
        model_classes: the classes that a file can contain; the first one is the usual one.
        stacks: signature of the layers in a file, see `registry.stacks_of`; empty if `recognise` checks everything.
        classifiers: the classes among these with a classification head.
        also: classes that load from a folder of every other class.
        make_config: makes the configuration from fields, if the defaults of the class do not apply.
        architectures: name of an architecture -> its own defaults of arguments, which override those of the table.
        container: the layout on disk.
        norms: revision -> "standard" or "plus-one", the storage of norm weights; empty if there is one way only.
        aliases: pattern in an early name -> replacement, with a note on renamed tensors.
        refused: option (`layer-norm`, `ema-convention`) -> reason why it does not apply.
        training_fields: fields of the configuration that matter in training only; a difference is a warning.
        unused: returns the fields that a checkpoint of a target does not determine.
        resolve: returns the configuration with explicit values of fields that follow other fields.
        usual_head: returns the original's name for the head of a model, if heads have names.
        way_out: advice for a model whose head no format has; None = the error lists the classes.
        finite: whether NaN or Inf among the weights is an error instead of a warning.
    """

    name: str
    revisions: dict[str, Revision]
    written: tuple[str, ...]
    config_class: type[PreTrainedConfig]
    model_classes: tuple[type[PreTrainedModel], ...]
    stacks: frozenset[tuple[str, str]] = frozenset()
    classifiers: tuple[type[PreTrainedModel], ...] = ()
    also: tuple[type[PreTrainedModel], ...] = ()
    make_config: Callable[..., PreTrainedConfig] | None = None
    architectures: dict[str, dict[str, Any]] = field(default_factory=dict)
    container: Container = FairseqFile()
    norms: dict[str, str] = field(default_factory=dict)
    aliases: tuple[tuple[str, str, str], ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    training_fields: tuple[str, ...] = ()
    unused: Callable[[Target], set[str]] = _nothing
    resolve: Callable[[PreTrainedConfig], PreTrainedConfig] = _unchanged
    usual_head: Callable[[PreTrainedConfig], str] | None = None
    way_out: str | None = None
    finite: bool = False

    def head_of(self, model_class: type, config: PreTrainedConfig, wanted: str | None) -> str | None:
        """Return the name of the classification head of a model, `wanted` or the usual one; None = it has no name."""
        if self.usual_head is None or model_class not in self.classifiers:
            return None
        return wanted or self.usual_head(config)


@dataclass(frozen=True)
class Companions:
    """Files next to the weights: dictionaries, tokenizer, preprocessor and settings of `generate`."""

    dictionaries: DictionaryKind
    tokenizer: MakeTokenizer = no_tokenizer
    preprocessor: dict[str, Any] | None = None
    generation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Notes:
    """Words for the user: decisions and notes of a conversion, notes of an export, a line about every head.

    Without lines, the only head is a classifier.
    """

    decisions: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


class Format(ABC):
    """The description of one kind of checkpoint."""

    facts: Facts
    table: Table

    @abstractmethod
    def recognise(self, file: Checkpoint) -> str | None:
        """Return the revision of the code that wrote a file with the stacks of this format; None = another format."""

    @abstractmethod
    def keymap(self, target: Target) -> KeyMap:
        """Return the names of the tensors of a model in the original and here."""

    @abstractmethod
    def companions(self, target: Target, evidence: Evidence) -> Companions:
        """Return the files next to the weights of a model; `evidence` is that of its checkpoint."""

    @abstractmethod
    def report(self, target: Target, evidence: Evidence) -> Notes:
        """Return the words on a model; `evidence` is that of its checkpoint."""


def renamed(fmt: Format, tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Return the tensors, in order, under the names of the key map, and notes on renamed ones."""
    notes = []
    for pattern, name, note in fmt.facts.aliases:
        changed = {re.sub(pattern, name, key): tensor for key, tensor in tensors.items()}
        notes += [note] * (changed.keys() != tensors.keys())
        tensors = changed
    return tensors, notes


def read_model(
    fmt: Format, tensors: Tensors, args: dict[str, Any], revision: str, head: str | None = None
) -> tuple[Target, Evidence]:
    """Return the model in a checkpoint, as the table reads it, and the evidence.

    Args:
        head: name of the classification head to read; None = the table decides.

    Raises:
        ConversionError: args and tensors contradict each other, or an argument is missing or has another type.
    """
    facts, container = fmt.facts, fmt.facts.container
    own = facts.architectures.get(container.architecture(args), {})
    typed = typed_args(fmt.table, args, revision, container.settings)
    evidence = Evidence(tensors, typed, revision, defaults(fmt.table) | own, container.settings, head)
    fields = read_fields(fmt.table, evidence)
    model_class, head = fields.pop(MODEL, facts.model_classes[0]), fields.pop(HEAD, None)
    config = build_config(facts.make_config or facts.config_class, fmt.table, evidence, **fields)
    return Target(model_class, config, revision, head), evidence
