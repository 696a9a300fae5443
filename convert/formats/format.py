"""Base class of the formats: a format describes one kind of checkpoint.

A format has six members: `facts` are constants, `table` reads arguments into fields of the configuration, `recognize`
identifies a file, `keymap` translates names of tensors, `companions` returns the files next to the weights, and
`report` returns decisions and notes for the user.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.dictionaries import Dictionaries, DictionaryKind
from luna_mega.convert.evidence import Evidence, ModelSpec, Tensors
from luna_mega.convert.keymap import KeyMap
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.table import HEAD, MODEL, Table, build_config, read_fields, typed_args
from luna_mega.convert.tokenizers import ConvertedTokenizer
from luna_mega.errors import ConversionError

Bpe = str | Path | None  # the option `--bpe`
# Returns the tokenizer, and appends notes to the list.
MakeTokenizer = Callable[[Dictionaries, Bpe, list[str]], ConvertedTokenizer | None]


@dataclass(frozen=True)
class Container:
    """Layout of a checkpoint on disk, by default a file of fairseq.

    Args:
        arch: Argument with the name of the architecture.
        needs_args: Whether a file without args is an error.
    """

    arch: str = "arch"
    needs_args: bool = True
    software = "fairseq"  # the code that saves such checkpoints
    settings = "args"  # name of the args in messages

    def architecture(self, args: dict[str, Any]) -> str:
        """Return the name of the architecture in the args."""
        return str(args.get(self.arch))

    def stored_dtype(self, tensors: Tensors) -> str:
        """Return the default dtype of a converted folder."""
        return "float32"


class Folder(Container, ABC):
    """A checkpoint that is a folder."""

    @abstractmethod
    def claims(self, folder: Path) -> bool:
        """Return whether a folder contains such a checkpoint, complete or damaged."""

    @abstractmethod
    def read(self, folder: Path, progress: bool) -> Checkpoint:
        """Return the checkpoint in a folder."""


def no_tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> None:
    """Return None, the tokenizer of a model without one."""
    if bpe is not None:
        raise ConversionError(f"--bpe {bpe}: the model has no tokenizer; omit the option")


@dataclass(frozen=True)
class Facts:
    """Constants of a format.

    Args:
        name: Unique name, the `layout` in reports.
        revisions: Name -> description of every revision of the original code.
        config_class: Configuration of the models.
        model_classes: Classes that a file can contain; the first one is the default.
        stacks: Signature of the layers in a file, see `registry.stacks_of`; empty if `recognize` checks everything.
        additional_classes: Classes that load from the folder of every other class.
        make_config: Function that returns the configuration, if the defaults of the class do not apply.
        architectures: Name of an architecture -> defaults of arguments, which take precedence over the table.
        container: Layout on disk.
        aliases: Patterns in early names of tensors, with replacement and note.
        unsupported_options: Option (`layer-norm`, `ema-convention`) -> reason why it does not apply.
        decided: Fields of the configuration in the decisions of a report.
        named_heads: Whether classification heads have names.
        finite: Whether NaN or Inf among the weights is an error instead of a warning.
    """

    name: str
    revisions: dict[str, str]
    config_class: type[PreTrainedConfig]
    model_classes: tuple[type[PreTrainedModel], ...]
    stacks: frozenset[tuple[str, str]] = frozenset()
    additional_classes: tuple[type[PreTrainedModel], ...] = ()
    make_config: Callable[..., PreTrainedConfig] | None = None
    architectures: dict[str, dict[str, Any]] = field(default_factory=dict)
    container: Container = Container()
    aliases: tuple[tuple[str, str, str], ...] = ()
    unsupported_options: dict[str, str] = field(default_factory=dict)
    decided: tuple[str, ...] = ()
    named_heads: bool = False
    finite: bool = False


@dataclass(frozen=True)
class Companions:
    """Files next to the weights: dictionaries, tokenizer, preprocessor and settings of `generate`."""

    dictionaries: DictionaryKind
    tokenizer: MakeTokenizer = no_tokenizer
    preprocessor: dict[str, Any] | None = None
    generation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Notes:
    """Other decisions and notes of a conversion."""

    decisions: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Format(ABC):
    """The description of one kind of checkpoint."""

    facts: Facts
    table: Table

    @abstractmethod
    def recognize(self, file: Checkpoint) -> str | None:
        """Return the revision of the code that wrote a file with the stacks of this format; None for another format."""

    @abstractmethod
    def keymap(self, spec: ModelSpec) -> KeyMap:
        """Return the names of the tensors of a model in the original and in this package."""

    @abstractmethod
    def companions(self, spec: ModelSpec, evidence: Evidence) -> Companions:
        """Return the files next to the weights of a model; `evidence` comes from its checkpoint."""

    @abstractmethod
    def report(self, spec: ModelSpec, evidence: Evidence) -> Notes:
        """Return decisions and notes on a model; `evidence` comes from its checkpoint."""


def rename_tensors(fmt: Format, tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Return the tensors in the same order with the names of the key map, and notes on renamed tensors."""
    notes = []
    for pattern, name, note in fmt.facts.aliases:
        changed = {re.sub(pattern, name, key): tensor for key, tensor in tensors.items()}
        notes += [note] * (changed.keys() != tensors.keys())
        tensors = changed
    return tensors, notes


def read_model(
    fmt: Format, tensors: Tensors, args: dict[str, Any], revision: str, head: str | None = None
) -> tuple[ModelSpec, Evidence]:
    """Return the model that the table reads from args and tensors, and the evidence.

    `head` is the name of the classification head; None if the table determines it.
    """
    facts, container = fmt.facts, fmt.facts.container
    defaults = {row.name: row.default for row in fmt.table if row.default is not None}
    defaults |= facts.architectures.get(container.architecture(args), {})
    typed = typed_args(fmt.table, args, revision, container.settings)
    evidence = Evidence(tensors, typed, revision, defaults, container.settings, head)
    fields = read_fields(fmt.table, evidence)
    model_class, head = fields.pop(MODEL, facts.model_classes[0]), fields.pop(HEAD, None)
    config = build_config(facts.make_config or facts.config_class, fmt.table, evidence, **fields)
    return ModelSpec(model_class, config, revision, head), evidence
