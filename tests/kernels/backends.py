"""Backends of tests: the fixture `device` prepares the backend that the parameter `backend` names."""

from collections.abc import Iterable

import pytest

TRITON = pytest.param("triton", marks=pytest.mark.triton)
SLOW_TRITON = pytest.param("triton", marks=(pytest.mark.triton, pytest.mark.slow))


def on_triton(*values: object, slow: bool = True) -> object:
    """Return a test case whose first value is the backend "triton" and whose other values are `values`."""
    return pytest.param("triton", *values, marks=(pytest.mark.triton, *([pytest.mark.slow] if slow else [])))


def graded(fast: Iterable[str], slow: Iterable[str], names: Iterable[str]) -> list:
    """Return test cases of which some are fast, some are slow and the others are exhaustive."""
    marks = {name: () if name in fast else (pytest.mark.slow,) for name in (*fast, *slow)}
    return [pytest.param(name, marks=marks.get(name, (pytest.mark.slow, pytest.mark.exhaustive))) for name in names]
