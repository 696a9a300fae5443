"""The files and the commands that CI uses, and the division of products into fast, slow and exhaustive tests."""

import itertools
import os
import re
import subprocess
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


@pytest.fixture
def ci():
    return (TESTS.parent / ".ci/run").read_text(encoding="utf-8")


def test_ci_begins_with_the_package_index_and_calls_the_test_command(ci):
    commands = [line for line in ci.splitlines() if line.startswith((".ci/", "part ", "install "))]
    assert commands[0].startswith(".ci/resolve") and commands[2] == "install newcomer installed"
    assert 'part "fast tests" newcomer test' in commands
    assert 'part "requirements with the package index alone" resolved' in commands
    assert re.search(r"^make test\b", (TESTS.parent / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_a_newcomer_has_no_settings(ci, tmp_path):
    """The function of .ci/run passes proxies and certificates to make, and no other setting or Python."""
    (function,) = re.findall(r"^newcomer\(\) \{\n.*?^\}\n", ci, re.MULTILINE | re.DOTALL)
    (tmp_path / "Makefile").write_text("test:\n\t@env -u PWD; echo $(PYTHON) $(VENV)\n", encoding="utf-8")
    kept = {"https_proxy": "http://a b:1", "NO_PROXY": "*", "SSL_CERT_FILE": "/c", "PIP_CERT": "/d", "PIP_PROXY": "e"}
    kept |= {"REQUESTS_CA_BUNDLE": "/f", "SSL_CERT_DIR": "/g"}
    lost = {"PIP_FIND_LINKS": "/x", "PIP_CONSTRAINT": "/x", "HF_HOME": "/x", "PYTHONPATH": "/x", "OMP_NUM_THREADS": "2"}
    environment = {"PATH": os.environ["PATH"]} | kept | lost
    command = ["bash", "-euc", f"SYSTEM_PYTHON=/usr/bin/python3\n{function}newcomer --no-print-directory test"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=True)
    *lines, last = run.stdout.splitlines()
    found = dict(line.split("=", 1) for line in lines)
    assert last == "/usr/bin/python3 build/newcomer/venv" and found["PIP_CONFIG_FILE"] == "/dev/null"
    assert found.items() >= kept.items() and not found.keys() & lost.keys()
    assert found["HOME"] == str(tmp_path / "build" / "newcomer")


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
