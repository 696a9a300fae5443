"""Backends of tests: the fixture `device` prepares the backend that the parameter `backend` names."""

import pytest

TRITON = pytest.param("triton", marks=pytest.mark.triton)
SLOW_TRITON = pytest.param("triton", marks=(pytest.mark.triton, pytest.mark.slow))


def on_triton(*values: object, slow: bool = True) -> object:
    """Return a test case whose first value is the backend "triton" and whose other values are `values`."""
    return pytest.param("triton", *values, marks=(pytest.mark.triton, *([pytest.mark.slow] if slow else [])))
