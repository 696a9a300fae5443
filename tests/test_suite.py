"""The files and the commands that CI uses, and the division of products into fast, slow and exhaustive tests."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.marks import cover

TESTS = Path(__file__).resolve().parent


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


class Case:
    def __init__(self, *values: int):
        self.values = values
        self.callspec = SimpleNamespace(params=dict(zip("abc", values, strict=True)))


@pytest.mark.parametrize("strength, most", [(1, 3), (2, 12), (3, 27)])
def test_covering_arrays(strength, most):
    cases = [Case(*values) for values in itertools.product(range(3), repeat=3)]
    left = cover(cases, strength, [])
    kept = [case for case in cases if case not in left]
    assert len(kept) <= most
    for positions in itertools.combinations(range(3), strength):
        assert len({tuple(case.values[at] for at in positions) for case in kept}) == 3**strength
    assert cover(left, strength, kept) == left  # nothing is missing
