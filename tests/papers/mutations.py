"""Modules with an error in one line, to check that a comparison finds it."""

from pathlib import Path
from types import ModuleType


def mutate(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """Return a copy of a module with other text; `changes` are texts that occur once, and their replacements."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    for correct, wrong in changes:
        assert source.count(correct) == 1, correct
        source = source.replace(correct, wrong)
    copy = ModuleType(module.__name__)
    exec(source, copy.__dict__)
    return copy
