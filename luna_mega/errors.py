"""The error class of the converter and the other commands, and helpers for its messages."""

import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from luna_mega.escaping import LONGEST, short_line, terminal

_LONGEST_REASON = 600
_HF_CACHES = ("HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE")
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


def _unwritable_cache(error: BaseException | None) -> str:
    """Return how to fix an error of the operating system about the cache of Hugging Face; "" for any other error."""
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.strerror:
        place, home = Path(error.filename), os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
        places = {"HF_HOME": home} | {name: os.environ[name] for name in _HF_CACHES if name in os.environ}
        for variable, value in places.items():
            folder = Path(os.path.expanduser(value)).absolute()
            target = place if place.is_relative_to(folder) else folder
            existing = next(path for path in (target, *target.parents) if os.path.exists(path))
            writable = os.access(existing, os.W_OK) and (existing == target or existing.is_dir())
            if target.is_relative_to(place) and not writable:
                advice = f"set the environment variable {variable} to a folder that can be written"
                return f"the cache of Hugging Face, {folder}, cannot be written ({error.strerror}); {advice}"
    return _unwritable_cache(error.__cause__) if error else ""


def reason(error: BaseException) -> str:
    """Return the message of another library's error as one line without control characters.

    It is truncated to 600 characters. If the message is empty, the name of the type is returned.
    """
    text = terminal(_unwritable_cache(error) or " ".join(str(error).split()))
    return (text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}...") or type(error).__name__


def shown(value: Any) -> str:
    """Return the `repr` of a value for a message: one line without control characters, at most 200 characters."""
    try:
        return short_line(_REPR.repr(value))
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
