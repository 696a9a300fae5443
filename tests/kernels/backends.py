"""Backends of tests: the fixture `device` prepares the backend that the parameter `backend` names."""

from collections.abc import Iterable

import pytest

TRITON = pytest.param("triton", marks=pytest.mark.triton)
SLOW_TRITON = pytest.param("triton", marks=(pytest.mark.triton, pytest.mark.slow))


def on_triton(*values: object, slow: bool = True, exhaustive: bool = False) -> object:
    """Return a test case whose first value is the backend "triton" and whose other values are `values`."""
    marks = [
        pytest.mark.triton,
        *([pytest.mark.slow] if slow else []),
        *([pytest.mark.exhaustive] if exhaustive else []),
    ]
    return pytest.param("triton", *values, marks=marks)


def graded(fast: Iterable, slow: Iterable, values: Iterable) -> list:
    """Return values, or tuples of several, of which some are fast, some are slow and the others are exhaustive."""
    fast, slow, cases = list(fast), list(slow), []
    for value in values:
        marks = [] if value in fast else [pytest.mark.slow, *([] if value in slow else [pytest.mark.exhaustive])]
        cases.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return cases
