"""Tables of arguments. Each row translates args of a file into fields of the configuration, and back."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from luna_mega.convert.argtypes import anything, flag
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.target import Target
from luna_mega.errors import ConversionError, shown


@dataclass(frozen=True)
class Way:
    """Translation of the value of an argument into that of a field (`there`) and back (`back`).

    `there` raises a `ValueError` such as "is not one of a, b"; the caller adds the name and the value before it.
    """

    there: Callable[[Any], Any]
    back: Callable[[Any], Any]


_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "relu": "relu",
    "tanh": "tanh",
    "silu": "silu",
    "linear": "linear",
}
# Our name -> fairseq's. fairseq has two names for gelu_new; gelu_fast is deprecated.
FAIRSEQ_ACTIVATIONS = {ours: theirs for theirs, ours in _ACTIVATIONS.items() if theirs != "gelu_fast"}


def _activation(value: Any) -> str:
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ValueError(f"is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


# Keys next to fields of the configuration, in the result of `Arg.read`: the model class, and the name of the head.
MODEL, HEAD = "model_class", "head"
SAME = Way(lambda value: value, lambda value: value)
NOT = Way(lambda value: not value, lambda value: not value)
# A model whose activation has no name in fairseq does not use it, so any name is valid.
ACTIVATION = Way(_activation, lambda value: FAIRSEQ_ACTIVATIONS.get(value, "gelu"))


def _always(_: Evidence | Target) -> bool:
    return True


def never(_: Evidence | Target) -> bool:
    """Return False, the `there` or `when` of a row that applies in one direction only."""
    return False


@dataclass(frozen=True)
class Arg:
    """One argument of the original, the fields that are read from it, and the value that is written.

    Args:
        name: the argument.
        field: the field of the configuration; None if `read` returns the fields, or if the argument is not read.
        way: translation of the value.
        kind: type of the argument, a function of argtypes.py; None if another row has it, or if any value is valid.
        default: the original's value if the args lack the argument, or a function of the evidence that returns it; an
            architecture may have another one.
        measure: returns the value of the argument from the tensors, which override the args.
        read: returns the fields, instead of `field`, `way` and `measure`.
        write: returns the value to write, instead of `field` and `way`.
        revision: the only revision of the original that has the argument; None = all have it.
        there: returns whether the argument is read from a file.
        when: returns whether the argument is written for a model.
        kept: whether an export writes the value of the converted file, even if the configuration was edited.
        only: the values of `field` that the original has, or a function of the target that returns them; for fields
            that reading back does not check.
    """

    name: str
    field: str | None = None
    way: Way = SAME
    default: Any = None
    measure: Callable[[Evidence], Any] | None = None
    read: Callable[[Evidence], dict[str, Any]] | None = None
    write: Callable[[Target], Any] | None = None
    revision: str | None = None
    there: Callable[[Evidence], bool] = _always
    when: Callable[[Target], bool] = _always
    kept: bool = False
    kind: Callable[[Any], Any] | None = None
    only: tuple | Callable[[Target], tuple] | None = None

    def _fields(self, evidence: Evidence) -> dict[str, Any]:
        if self.read is not None:
            return self.read(evidence)
        if self.field is None:
            return {}
        value = evidence.arg(self.name) if self.measure is None else evidence.prefer(self.name, self.measure(evidence))
        try:
            return {self.field: self.way.there(value)}
        except ValueError as error:
            raise ConversionError(f"{evidence.shown(self.name)} {error}") from error

    def _value(self, target: Target) -> Any:
        value = self.way.back(getattr(target.config, self.field)) if self.write is None else self.write(target)
        return self.typed(value)

    def typed(self, value: Any, settings: str = "args") -> Any:
        """Return a value of the argument's type; None, an argument that is not given, stays.

        `settings` is the place of the args in the checkpoint.

        Raises:
            ConversionError: the value has another type.
        """
        try:
            return value if value is None or self.kind is None else self.kind(value)
        except ValueError as error:
            raise ConversionError(f"{settings}.{self.name} = {shown(value)} {error}") from error


Table = tuple[Arg, ...]


def fixed(name: str, value: Any, **options: Any) -> Arg:
    """Return the row of an argument that always has this value in an export, and is not read."""
    kind = flag if isinstance(value, bool) else anything
    return Arg(name, write=lambda target: value, **{"kind": kind} | options)


def also(name: str, field: str, **options: Any) -> Arg:
    """Return a row that is only read; another row writes the argument."""
    return Arg(name, field, when=never, **options)


def written(name: str, field: str, **options: Any) -> Arg:
    """Return a row that is only written; another row sets `field`."""
    return Arg(name, field, there=never, **options)


def derived(field: str, value: Callable[[Evidence], Any], **options: Any) -> Arg:
    """Return the row of a field that no argument has; `value` returns it from the evidence."""
    return Arg("", field, read=lambda evidence: {field: value(evidence)}, when=never, **options)


def fields(read: Callable[[Evidence], dict[str, Any]], **options: Any) -> Arg:
    """Return the row of several fields that no argument has; `read` returns them."""
    return Arg("", read=read, when=never, **options)


def limited(field: str, only: tuple | Callable[[Target], tuple]) -> Arg:
    """Return the row of a field that is not read, and has only these values in the original."""
    return Arg("", field, there=never, when=never, only=only)


def beyond(table: Table, target: Target) -> Iterator[str]:
    """Yield a description of each field whose value the original does not have, by the `only` of its row."""
    for row in table:
        if row.only is not None and row.revision in (None, target.revision):
            only, value = row.only(target) if callable(row.only) else row.only, getattr(target.config, row.field)
            if value not in only:
                yield f"{row.field} = {value!r} (it has {' or '.join(map(repr, only))})"


def equals(field: str, value: Any) -> Callable[[Target], bool]:
    """Return the `write` of an argument that is true if `field` has this value."""
    return lambda target: getattr(target.config, field) == value


# Every checkpoint of fairseq has these.
COMMON = (fixed("data", "."), fixed("seed", 1), fixed("no_save_optimizer_state", True))


def defaults(table: Table) -> dict[str, Any]:
    """Return the default of every argument that has one."""
    return {row.name: row.default for row in table if row.default is not None}


def typed_args(table: Table, args: dict[str, Any], revision: str, settings: str = "args") -> dict[str, Any]:
    """Return the args of a file with every argument of the table in its type; arguments of other tables stay.

    Raises:
        ConversionError: a value has another type; the message names the argument and the value.
    """
    rows = [row for row in table if row.revision in (None, revision) and row.name in args]
    return args | {row.name: row.typed(args[row.name], settings) for row in rows if row.kind is not None}


def read_fields(table: Iterable[Arg], evidence: Evidence) -> dict[str, Any]:
    """Return the fields of the configuration that the rows set.

    Raises:
        ConversionError: an argument is missing or has no meaningful value, or args and tensors contradict each other.
    """
    fields: dict[str, Any] = {}
    for row in table:
        if row.revision in (None, evidence.revision) and row.there(evidence):
            fields |= row._fields(evidence)
    return fields


def write_args(table: Iterable[Arg], target: Target) -> dict[str, Any]:
    """Return the args of a checkpoint for a model that the original can express, in the order of the table."""
    rows = [row for row in table if row.revision in (None, target.revision) and row.when(target)]
    return {row.name: row._value(target) for row in rows}


def build_config(
    config_class: type[PreTrainedConfig], table: Table, evidence: Evidence, **fields: Any
) -> PreTrainedConfig:
    """Return the configuration.

    Raises:
        ConversionError: args and shapes do not fit together; the message names the arguments of the fields at fault.
    """
    try:
        return config_class(**fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")
        words = set(re.findall(r"\w+", reason))
        rows = dict.fromkeys(row.name for row in table if row.field in words and row.name in evidence.args)
        blamed = ", ".join(map(evidence.shown, rows)) or "args and tensors do not fit together"
        raise ConversionError(f"{blamed}: {reason}") from error
