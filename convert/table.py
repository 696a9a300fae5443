"""Tables of arguments. Each row translates args of a file into fields of the configuration, and back."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from luna_mega.convert.argtypes import anything, flag
from luna_mega.convert.evidence import Evidence, Target
from luna_mega.errors import ConversionError, shown


@dataclass(frozen=True)
class Codec:
    """Translation between the value of an argument and the value of a field.

    `decode` raises a `ValueError` such as "is not one of a, b"; the caller prepends the name and the value.
    """

    decode: Callable[[Any], Any]
    encode: Callable[[Any], Any]


def names_codec(ours: dict[str, str]) -> Codec:
    """Return the codec of names in the original -> in the configuration."""

    def decode(value: Any) -> str:
        if not isinstance(value, str) or value not in ours:
            raise ValueError(f"is not one of {', '.join(ours)}")
        return ours[value]

    return Codec(decode, {field: name for name, field in ours.items()}.__getitem__)


_ACTIVATIONS = {"gelu": "gelu", "gelu_accurate": "gelu_new", "gelu_fast": "gelu_new", "relu": "relu", "tanh": "tanh"}
_ACTIVATIONS |= {"silu": "silu", "linear": "linear"}
# Our name -> fairseq's. fairseq has two names for gelu_new; gelu_fast is deprecated.
FAIRSEQ_ACTIVATIONS = {ours: theirs for theirs, ours in _ACTIVATIONS.items() if theirs != "gelu_fast"}


# Keys next to fields of the configuration, in the result of `Arg.read`: the model class, and the name of the head.
MODEL, HEAD = "model_class", "head"
SAME = Codec(lambda value: value, lambda value: value)
NOT = Codec(lambda value: not value, lambda value: not value)
# A model whose activation has no name in fairseq does not use it, so any name is valid.
ACTIVATION = Codec(names_codec(_ACTIVATIONS).decode, lambda value: FAIRSEQ_ACTIVATIONS.get(value, "gelu"))


def _always(_: Evidence | Target) -> bool:
    return True


def never(_: Evidence | Target) -> bool:
    """Return False, for the `read_if` or `write_if` of a row that applies in one direction only."""
    return False


@dataclass(frozen=True)
class Arg:
    """One argument of the original code and the fields of the configuration that it determines.

    Args:
        name: Name of the argument.
        field: Field of the configuration; None if `read` returns the fields, or if the argument is not read.
        codec: Translation of the value.
        default: Value if the args lack the argument, or a function that returns it; an architecture can override it.
        measure: Function that returns the value from the tensors, which override the args.
        read: Function that returns the fields, instead of `field`, `codec` and `measure`.
        write: Function that returns the value to write, instead of `field` and `codec`.
        revision: Only revision of the original that has the argument; None if all have it.
        read_if: Function that returns whether the argument is read from a file.
        write_if: Function that returns whether the argument is written for a model.
        kept: Whether an export keeps the value of the converted file, even if the configuration was edited.
        kind: Type of the argument, a function of argtypes.py; None if another row has it, or if any value is valid.
        only: Values of `field` that the original supports, or a function that returns them; for fields that reading
            back does not check.
    """

    name: str
    field: str | None = None
    codec: Codec = SAME
    default: Any = None
    measure: Callable[[Evidence], Any] | None = None
    read: Callable[[Evidence], dict[str, Any]] | None = None
    write: Callable[[Target], Any] | None = None
    revision: str | None = None
    read_if: Callable[[Evidence], bool] = _always
    write_if: Callable[[Target], bool] = _always
    kept: bool = False
    kind: Callable[[Any], Any] | None = None
    only: tuple | Callable[[Target], tuple] | None = None

    def _fields(self, evidence: Evidence) -> dict[str, Any]:
        if self.read is not None:
            return self.read(evidence)
        if self.field is None and self.measure is None:
            return {}
        value = evidence.arg(self.name) if self.measure is None else evidence.prefer(self.name, self.measure(evidence))
        try:
            return {} if self.field is None else {self.field: self.codec.decode(value)}
        except ValueError as error:
            raise ConversionError(f"{evidence.shown(self.name)} {error}") from error

    def _value(self, target: Target) -> Any:
        value = self.codec.encode(getattr(target.config, self.field)) if self.write is None else self.write(target)
        return self.typed(value)

    def typed(self, value: Any, settings: str = "args") -> Any:
        """Return the value in the type of the argument; None stays None.

        Errors call the args `settings`.
        """
        try:
            return value if value is None or self.kind is None else self.kind(value)
        except ValueError as error:
            raise ConversionError(f"{settings}.{self.name} = {shown(value)} {error}") from error


Table = tuple[Arg, ...]


def fixed(name: str, value: Any, **options: Any) -> Arg:
    """Return the row of an argument that is not read and is always written with this value."""
    return Arg(name, write=lambda target: value, **{"kind": flag if isinstance(value, bool) else anything} | options)


def read_only(name: str, field: str, **options: Any) -> Arg:
    """Return a row that is only read; another row writes the argument."""
    return Arg(name, field, write_if=never, **options)


def write_only(name: str, field: str, **options: Any) -> Arg:
    """Return a row that is only written; another row sets `field`."""
    return Arg(name, field, read_if=never, **options)


def derived(field: str, value: Callable[[Evidence], Any], **options: Any) -> Arg:
    """Return the row of a field that is not an argument; `value` computes it from the evidence."""
    return Arg("", field, read=lambda evidence: {field: value(evidence)}, write_if=never, **options)


def fields(read: Callable[[Evidence], dict[str, Any]], **options: Any) -> Arg:
    """Return the row of several fields that are not arguments; `read` computes them from the evidence."""
    return Arg("", read=read, write_if=never, **options)


def limited(field: str, only: tuple | Callable[[Target], tuple]) -> Arg:
    """Return the row of a field that is not read, with the values that the original supports."""
    return Arg("", field, read_if=never, write_if=never, only=only)


def unsupported_values(table: Table, target: Target) -> Iterator[str]:
    """Yield a description of each field whose value is not in the `only` of its row."""
    for row in table:
        if row.only is not None and row.revision in (None, target.revision):
            only, value = row.only(target) if callable(row.only) else row.only, getattr(target.config, row.field)
            if value not in only:
                yield f"{row.field} = {value!r} (it has {' or '.join(map(repr, only))})"


def size_of(key: str, *dims: str, index: int = 0) -> Callable[[Evidence], int]:
    """Return a function that reads one size of the tensor `key`; `dims` are its dimensions in errors."""
    return lambda evidence: evidence.shape(key, *dims)[index]


def equals(field: str, value: Any) -> Callable[[Target], bool]:
    """Return a `write` or `write_if` function that compares `field` with a value."""
    return lambda target: getattr(target.config, field) == value


# Every checkpoint of fairseq has these.
COMMON = (fixed("data", "."), fixed("seed", 1), fixed("no_save_optimizer_state", True))


def typed_args(table: Table, args: dict[str, Any], revision: str, settings: str = "args") -> dict[str, Any]:
    """Return the args of a file in the types of the table; arguments that are not in the table stay unchanged."""
    rows = [row for row in table if row.revision in (None, revision) and row.name in args]
    return args | {row.name: row.typed(args[row.name], settings) for row in rows if row.kind is not None}


def read_fields(table: Iterable[Arg], evidence: Evidence) -> dict[str, Any]:
    """Return the fields of the configuration that the rows set."""
    fields: dict[str, Any] = {}
    for row in table:
        if row.revision in (None, evidence.revision) and row.read_if(evidence):
            fields |= row._fields(evidence)
    return fields


def write_args(table: Iterable[Arg], target: Target) -> dict[str, Any]:
    """Return the args of a checkpoint for a model, in the order of the table."""
    rows = [row for row in table if row.revision in (None, target.revision) and row.write_if(target)]
    return {row.name: row._value(target) for row in rows}


def build_config(
    config_class: type[PreTrainedConfig], table: Table, evidence: Evidence, **fields: Any
) -> PreTrainedConfig:
    """Return the configuration; errors name the arguments of invalid fields."""
    try:
        return config_class(**fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")
        words = set(re.findall(r"\w+", reason))
        rows = dict.fromkeys(row.name for row in table if row.field in words and row.name in evidence.args)
        blamed = ", ".join(map(evidence.shown, rows)) or "args and tensors do not fit together"
        raise ConversionError(f"{blamed}: {reason}") from error
