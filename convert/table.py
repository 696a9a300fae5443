"""Tables of arguments: each row reads an argument of a file into a field of the configuration."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from luna_mega.convert.evidence import Evidence
from luna_mega.errors import ConversionError, shown

Values = dict[Any, Any]  # value in the original -> value in the configuration

# fairseq has two names for gelu_new; gelu_fast is deprecated.
ACTIVATIONS: Values = {"gelu": "gelu", "gelu_accurate": "gelu_new", "gelu_fast": "gelu_new", "relu": "relu"}
ACTIVATIONS |= {name: name for name in ("tanh", "silu", "linear")}
NOT: Values = {True: False, False: True}

# Keys next to fields of the configuration, in the result of `Arg.read`: the model class, and the name of the head.
MODEL, HEAD = "model_class", "head"


@dataclass(frozen=True)
class Arg:
    """One argument of the original code, and the field of the configuration that it determines.

    Args:
        name: Name of the argument; "" for a field that is not an argument.
        field: Field of the configuration; None if `read` returns the fields, or if only the type is checked.
        values: Value in the original -> value of the field; None if they are equal.
        default: Value if the args lack the argument, or a function that returns it; an architecture can override it.
        read: Function that returns the value from the tensors, which override the args, or a dictionary of fields.
        kind: Type of the argument, a function of evidence.py; None if another row has it, or if any value is valid.
        revision: Only revision of the original that has the argument; None if all have it.
    """

    name: str
    field: str | None = None
    values: Values | None = None
    default: Any = None
    read: Callable[[Evidence], Any] | None = None
    kind: Callable[[Any], Any] | None = None
    revision: str | None = None

    def fields(self, evidence: Evidence) -> dict[str, Any]:
        """Return the fields that the argument determines."""
        if self.read is not None:
            value = self.read(evidence)
            if isinstance(value, dict):
                return value
            evidence.prefer(self.name, value)
        elif self.field is not None:
            value = evidence.arg(self.name)
        if self.field is None:
            return {}
        return {self.field: value if self.values is None else decoded(evidence, self.name, value, self.values)}

    def typed(self, value: Any, settings: str = "args") -> Any:
        """Return the value in the type of the argument; None stays None.

        Errors call the args `settings`.
        """
        try:
            return value if value is None or self.kind is None else self.kind(value)
        except ValueError as error:
            raise ConversionError(f"{settings}.{self.name} = {shown(value)} {error}") from error


Table = tuple[Arg, ...]


def decoded(evidence: Evidence, name: str, value: Any, values: Values) -> Any:
    """Return the value of the configuration for the value of the argument `name`."""
    if value not in list(values):  # a list, because the value may be unhashable
        raise ConversionError(f"{evidence.shown(name)} is not one of {', '.join(map(str, values))}")
    return values[value]


def typed(kind: Callable[[Any], Any], *names: str) -> Table:
    """Return the rows of arguments whose type is checked, but which determine no field."""
    return tuple(Arg(name, kind=kind) for name in names)


def read_if(condition: Callable[[Evidence], bool], *rows: Arg) -> Table:
    """Return the rows of arguments that are read only if `condition` returns True."""

    def conditional(row: Arg) -> Arg:
        return replace(row, read=lambda evidence: row.fields(evidence) if condition(evidence) else {})

    return tuple(map(conditional, rows))


def derived(field: str, read: Callable[[Evidence], Any], **options: Any) -> Arg:
    """Return the row of a field that is not an argument; `read` computes it from the evidence."""
    return Arg("", field, read=read, **options)


def fields(read: Callable[[Evidence], dict[str, Any]], **options: Any) -> Arg:
    """Return the row of several fields that are not arguments; `read` computes them from the evidence."""
    return Arg("", read=read, **options)


def size_of(key: str, *dims: str, index: int = 0) -> Callable[[Evidence], int]:
    """Return a function that reads one size of the tensor `key`; `dims` are its dimensions in errors."""
    return lambda evidence: evidence.shape(key, *dims)[index]


def rows_of(table: Iterable[Arg], revision: str) -> list[Arg]:
    """Return the rows that a revision of the original has."""
    return [row for row in table if row.revision in (None, revision)]


def typed_args(table: Table, args: dict[str, Any], revision: str, settings: str = "args") -> dict[str, Any]:
    """Return the args of a file in the types of the table; arguments that are not in the table stay unchanged."""
    rows = [row for row in rows_of(table, revision) if row.name in args and row.kind is not None]
    return args | {row.name: row.typed(args[row.name], settings) for row in rows}


def read_fields(table: Iterable[Arg], evidence: Evidence) -> dict[str, Any]:
    """Return the fields of the configuration that the rows set."""
    fields: dict[str, Any] = {}
    for row in rows_of(table, evidence.revision):
        fields |= row.fields(evidence)
    return fields


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
