"""Backends of tests: the fixture `device` prepares the backend that the parameter `backend` names."""

import itertools
from collections.abc import Iterable

import pytest

from luna_mega.kernels.moving_average import native
from tests.kernels.calls import ON_NATIVE

needs_library = pytest.mark.skipif(native.missing() is not None, reason=f"{native.missing()}")
NATIVE = pytest.param("native", marks=needs_library)
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


def on_native(*values: object) -> object:
    """Return a test case whose first value is the backend "native" and whose other values are `values`."""
    return pytest.param("native", *values, marks=needs_library)


def on_backends(names: Iterable, backends: Iterable) -> list:
    """Return (name, backend) with the marks of both, for names of `CALLS`; "native" only supports averages."""
    names, backends = ([x if hasattr(x, "marks") else pytest.param(x) for x in xs] for xs in (names, backends))
    return [
        pytest.param(*name.values, *backend.values, marks=(*name.marks, *backend.marks))
        for name, backend in itertools.product(names, backends)
        if "native" not in backend.values or name.values[0] in ON_NATIVE
    ]


def graded(fast: Iterable, slow: Iterable, values: Iterable) -> list:
    """Return values, or tuples of several, of which some are fast, some are slow and the others are exhaustive."""
    fast, slow, cases = list(fast), list(slow), []
    for value in values:
        marks = [] if value in fast else [pytest.mark.slow, *([] if value in slow else [pytest.mark.exhaustive])]
        cases.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return cases
