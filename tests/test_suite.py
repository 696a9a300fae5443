"""The list of products in tests/README.md, and the files that CI uses."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
COVERING = re.compile(r"^@pytest\.mark\.covering\((\d)\)\n.*?^def (\w+)", re.MULTILINE | re.DOTALL)


def test_every_covering_test_is_listed():
    marked = {
        (f"{file.relative_to(TESTS)}::{name}", strength)
        for file in TESTS.rglob("test_*.py")
        for strength, name in COVERING.findall(file.read_text(encoding="utf-8"))
    }
    listed = re.findall(r"^\| `(.*?)` \| (\d) \|", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert marked == set(listed) and len(marked) > 5


def test_named_files_exist():
    # With xdist, pytest does not report a missing file.
    root = TESTS.parent
    callers = [root / ".ci/run", root / "Makefile", *(root / ".github/workflows").iterdir()]
    named = {path for file in callers for path in re.findall(r"\btests/[\w/.]+", file.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert sorted(path for path in named if not (root / path).exists()) == []


def test_ci_begins_with_the_package_index_and_calls_the_test_command():
    text = (TESTS.parent / ".ci/run").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if line.startswith((".ci/", "part ", "install "))]
    assert commands[0].startswith(".ci/resolve") and 'part "fast tests" make test' in commands
    assert 'part "requirements with the package index alone" resolved' in commands
    assert re.search(r"^make test\b", (TESTS.parent / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
