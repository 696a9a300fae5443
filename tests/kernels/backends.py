"""The backends of a test: the fixture `device` prepares the one that the parameter `backend` names."""

import pytest

TRITON = pytest.param("triton", marks=pytest.mark.triton)
SLOW_TRITON = pytest.param("triton", marks=(pytest.mark.triton, pytest.mark.slow))


def on_triton(*values: object, slow: bool = True) -> object:
    """Return the values of a case, the first of them the backend "triton"."""
    return pytest.param("triton", *values, marks=(pytest.mark.triton, *([pytest.mark.slow] if slow else [])))
