"""Fixtures that omit repeated work: the code of the model in saved folders, and compiling the template of cards."""

import functools
from collections.abc import Iterator

import jinja2
import pytest

from luna_mega import saved_code


@pytest.fixture(autouse=True)
def without_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save folders without the code of the model, 50 files, unless the test uses the fixture `with_code`."""
    if "with_code" not in request.fixturenames:
        monkeypatch.setattr(saved_code, "_enabled", False)


@pytest.fixture
def with_code() -> None:
    """Save folders as users do."""


@pytest.fixture(scope="session", autouse=True)
def compiled_templates() -> Iterator[None]:
    """Compile every template of model cards once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2, "Template", functools.cache(jinja2.Template))
        yield
