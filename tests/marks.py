"""Marks for a parameter of which a few values are fast tests, and the others slow."""

from collections.abc import Iterable

import pytest


def slow_but(fast: Iterable[str], values: Iterable[str]) -> list:
    """Return the values of a parameter; all but those in `fast` are marked as slow."""
    fast, values = list(fast), list(values)
    assert fast and set(fast) < set(values), "some values are fast, and some are not"
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
