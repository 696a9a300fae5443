"""Marks for parameters with a few fast values; the other values are slow."""

import itertools
from collections.abc import Iterable

import pytest


def slow_but(fast: Iterable, values: Iterable) -> list:
    """Return the values of a parameter, or tuples of several; values that are not in `fast` are marked as slow."""
    fast, values = list(fast), list(values)
    assert fast and set(fast) < set(values), "some values are fast, and some are not"
    rows = {value: value if isinstance(value, tuple) else (value,) for value in values}
    return [value if value in fast else pytest.param(*row, marks=pytest.mark.slow) for value, row in rows.items()]


def diagonal(first: Iterable, second: Iterable) -> list[tuple]:
    """Return the smallest number of pairs that contain every value of both parameters."""
    first, second = list(first), list(second)
    count = max(len(first), len(second))
    return [(first[index % len(first)], second[index % len(second)]) for index in range(count)]


def cover(cases: list[pytest.Item], strength: int, covered: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that are not needed: `covered` and the others contain every tuple of `strength` values."""

    def tuples(case: pytest.Item) -> set[tuple]:
        values = sorted((name, repr(value)) for name, value in case.callspec.params.items())
        return set(itertools.combinations(values, strength))

    left = {case: tuples(case) for case in cases}
    missing = set().union(*left.values()) - set().union(*map(tuples, covered))
    while missing:
        best = max(left, key=lambda case: len(left[case] & missing))
        missing -= left.pop(best)
    return list(left)
