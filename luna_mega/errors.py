"""The error class of the converter and the other commands, and helpers for its messages."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from luna_mega.escaping import LONGEST, short_line, terminal

_LONGEST_REASON = 600
_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = LONGEST
_REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = _REPR.maxdict = 30


class ConversionError(ValueError):
    """Invalid input. The message is one line: the file or field, what is wrong with it, and how to fix it."""

    def __init__(self, message: str):
        # File names, values and errors of other libraries may contain line breaks.
        super().__init__(" ".join(filter(None, map(str.strip, message.splitlines()))))


@contextmanager
def errors_of(path: object) -> Iterator[None]:
    """Prepend a path to the message of a `ConversionError` in the block."""
    try:
        yield
    except ConversionError as error:
        raise ConversionError(f"{path}: {error}") from error


def install(extra: str) -> str:
    """Return the command that installs an extra; luna-mega is installed from a clone, not from a package index."""
    return f"`pip install '.[{extra}]'` in a clone of the repository"


def reason(error: Exception) -> str:
    """Return the message of another library's error as one line without control characters.

    It is truncated to 600 characters. If the message is empty, the name of the type is returned.
    """
    text = terminal(" ".join(str(error).split()))
    return (text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}...") or type(error).__name__


def shown(value: Any) -> str:
    """Return the `repr` of a value for a message: one line without control characters, at most 200 characters."""
    try:
        return short_line(_REPR.repr(value))
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
