"""The words of CONTRIBUTING.md, as far as a test can hold them: names that are gone, and how a docstring begins."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("convert", "kernels", "luna_mega", "luna_mega_cli", "modeling_common", "modeling_luna", "modeling_mega")
ROOMS += ("modeling_megalodon",)
PATHS = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
FILES = {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in PATHS}
GONE = {"found", "varlen"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def names(node: ast.AST) -> set[str]:
    """Return the names that a node binds or uses."""
    values = (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))
    return {value for value in values if isinstance(value, str)}


def test_names_that_are_gone():
    used = {(str(file), name) for file, tree in FILES.items() for node in ast.walk(tree) for name in names(node) & GONE}
    assert used == set()


def test_a_docstring_begins_with_a_verb_or_a_noun():
    texts = {
        f"{file}:{getattr(node, 'lineno', 1)}": ast.get_docstring(node) or ""
        for file, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED)
    }
    assert len(texts) > 500
    assert {
        place: text for place, text in texts.items() if re.match(r"(What|Of|By|Where|Which|With|As|For|To)\b", text)
    } == {}
