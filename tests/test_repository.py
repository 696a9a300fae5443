"""Files of the repository that users and CI rely on: encodings, commands to install, workflows, versions."""

import ast
import configparser
import itertools
import os
import re
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from luna_mega import compat
from tests.marks import cover


def test_text_has_an_encoding(sources):
    """Files and pipes of text are not in the encoding of the locale, which is ASCII in some containers.

    The packages read it as utf-8-sig: editors on Windows start a file with U+FEFF, which UTF-8 keeps as part of the
    first word. ruff finds `open` without an encoding (PLW1514), but not these methods.
    """
    found, read = [], 0
    for name, source in sources.items():
        packaged = name.partition("/")[0] not in ("tests", "docs", "luna_mega_cli")
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            method = getattr(call.func, "attr", getattr(call.func, "id", ""))
            given = {word.arg: getattr(word.value, "value", word.value) for word in call.keywords}
            file = len(call.args) <= {"read_text": 0, "write_text": 1}.get(method, -1)
            pipe = "text" in given and method in ("run", "Popen", "check_output")
            wrong = (file or pipe) and "encoding" not in given
            writes = any(getattr(mode, "value", "") == "w" for mode in call.args)
            if packaged and method in ("open", "read_text") and "encoding" in given and not writes:
                read += 1
                wrong |= given["encoding"] != "utf-8-sig"
            found += [f"{name}:{call.lineno}"] * wrong
    assert not found and read > 5


def test_install_commands_work_in_a_clone(repo_root):
    """No install command uses the package name, which is not on an index; error messages use `errors.install`."""
    files = [repo_root / "README.md", *(repo_root / "docs").glob("*.md")]
    for folder in ("luna_mega", "luna_mega_cli", "convert", "kernels", "modeling_common", "examples", "tests"):
        files += [file for end in ("py", "md", "yaml") for file in (repo_root / folder).rglob(f"*.{end}")]
    command = re.compile(r"pip install [^`\n]*" + "luna" + r"[-_]mega\\{0,2}[\[@ '\"]")
    assert [file.name for file in files if command.search(file.read_text(encoding="utf-8"))] == []
    extras = re.findall(r"install\('(\w+)'\)", "".join(file.read_text(encoding="utf-8") for file in files))
    options = configparser.ConfigParser()
    options.read(repo_root / "setup.cfg")
    assert {"vision"} <= set(extras) <= set(options["options.extras_require"])


def test_workflows(repo_root):
    """Their targets, scripts and files exist, and actions are pinned; a release is published after all tests."""
    targets = re.findall(r"^([a-z-]+):", (repo_root / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    files = [*(repo_root / ".github" / "workflows").glob("*.yml"), repo_root / ".ci" / "run", repo_root / "Makefile"]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"run: make ([a-z-]+)", text)) <= set(targets)
        named = {*re.findall(r"\.venv/bin/python ([\w/.]+\.py)", text), *re.findall(r"\btests/[\w/.]+", text)}
        assert sorted(path for path in named if not (repo_root / path).exists()) == []
        uses = re.findall(r"^ +-? ?uses: (.*)", text, re.MULTILINE)
        assert all(re.fullmatch(r"\./\S+|[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use) for use in uses)
    release = yaml.safe_load((repo_root / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(release["publish"]["needs"]) == set(release) - {"publish"}
    tests = {"./.github/workflows/ci.yml", "./.github/workflows/full.yml"}
    assert {job["uses"] for job in release.values() if "uses" in job} == tests


def test_versions_are_those_of_the_package(repo_root):
    """setup.cfg requires the oldest supported versions, and CI pins the oldest and the newest ones."""
    setup = (repo_root / "setup.cfg").read_text(encoding="utf-8")
    matrix = yaml.safe_load((repo_root / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]["test"]["strategy"]
    pythons = matrix["matrix"]["python"]
    assert pythons == re.findall(r"Python :: (3\.\d+)$", setup, re.MULTILINE)
    assert pythons[0] == ".".join(map(str, compat.PYTHON)) and f"python_requires = >={pythons[0]}\n" in setup
    assert matrix["matrix"]["constraints"] == ["ci.txt", "ci-oldest.txt"]
    for name, (lowest, above) in compat.SUPPORTED.items():
        assert re.search(rf"^    {name}>={lowest}(,<6|; .*)?$", setup, flags=re.MULTILINE), name
        files = [(repo_root / "requirements" / file).read_text("utf-8") for file in ("ci-oldest.txt", "ci.txt")]
        oldest, newest = (re.search(rf"^{name}==([\d.]+)", text, re.MULTILINE)[1] for text in files)
        assert oldest.startswith(f"{lowest}.")
        if name == "transformers":  # `make test-newest` tests the newest torch and its Triton
            major, minor, _ = map(int, newest.split("."))
            assert above == f"{major}.{minor + 1}"


def test_a_newcomer_has_no_settings(repo_root, tmp_path):
    """The function of .ci/run passes proxies and certificates to make, and no other setting or Python."""
    ci = (repo_root / ".ci" / "run").read_text(encoding="utf-8")
    assert 'part "fast tests" newcomer test' in ci
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
