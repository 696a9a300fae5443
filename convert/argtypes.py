"""Types of arguments: each function returns a Python value, or raises a `ValueError` such as "is not a number".

The caller prepends the name of the argument and the value to the message.
"""

import re
from numbers import Integral, Real
from typing import Any

_LARGEST = 2**31 - 1


def flag(value: Any) -> bool:
    """Return a bool; 0 and 1 are converted."""
    if not isinstance(value, Integral) or value not in (0, 1):
        raise ValueError("is neither True nor False")
    return bool(value)


def integer(value: Any) -> int:
    """Return a 32-bit integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError("is not an integer")
    if abs(value) > _LARGEST:
        raise ValueError(f"is not from {-_LARGEST} to {_LARGEST}")
    return int(value)


def size(value: Any) -> int:
    """Return an integer from 1 to 2^31 - 1."""
    if (number := integer(value)) < 1:
        raise ValueError(f"is not from 1 to {_LARGEST}")
    return number


def number(value: Any) -> int | float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("is not a number")
    if not abs(value) < 1e38:  # NaN fails as well
        raise ValueError("is not a finite number")
    return value


def word(value: Any) -> str:
    """Return a string of printable characters in one line."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("is not a name")
    return value


def language(value: Any) -> str:
    """Return the name of a language, which is part of file names."""
    if not re.fullmatch(r"[\w.@-]*", word(value)):
        raise ValueError("is not the name of a language: it has letters, digits, '_', '-', '.' and '@' only")
    return value


def cutoffs(value: Any) -> Any:
    """Return the cutoffs of an adaptive vocabulary: a list of integers or, in the original, its text."""
    if isinstance(value, str) and re.fullmatch(r"[\d\s,()\[\]]*", value, re.ASCII):
        numbers = [int(digits[:11]) for digits in re.findall(r"\d+", value)]
    elif isinstance(value, (list, tuple)):
        numbers = value
    else:
        raise ValueError("is not a list of integers such as '20000,60000'")
    for end in numbers:
        size(end)
    return value


def mean_and_deviation(value: Any) -> tuple[int | float, int | float]:
    """Return two finite numbers."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("is not a pair of numbers")
    return number(value[0]), number(value[1])
