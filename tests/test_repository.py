"""Files of the repository that users and CI rely on: encodings, workflows, versions."""

import ast
import re
from pathlib import Path

import yaml

from luna_mega import compat

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("luna_mega", "convert", "modeling_common", "kernels", "examples", "benchmarks")


def test_text_has_an_encoding():
    """Files and pipes of text are not in the encoding of the locale, which is ASCII in some containers.

    The packages read it as utf-8-sig: editors on Windows start a file with U+FEFF, which UTF-8 keeps as part of the
    first word. ruff finds `open` without an encoding (PLW1514), but not these methods.
    """
    found, read = [], 0
    for file in (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)):
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            method, encoding = getattr(call.func, "attr", ""), given.get("encoding", "")
            if method == "read_text":
                read += 1
                found += [f"{file}:{call.lineno}"] * (not call.args and encoding != "'utf-8-sig'")
            elif method == "write_text" or "text" in given and method in ("run", "Popen", "check_output"):
                found += [f"{file}:{call.lineno}"] * (not encoding and len(call.args) < 2)
    assert not found and read > 5


def test_workflows():
    """Their targets, scripts and files exist, and actions are pinned; a release is published after all tests."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".ci" / "run", ROOT / "Makefile"]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"run: make ([a-z-]+)", text)) <= set(targets)
        named = {*re.findall(r"\.venv/bin/python ([\w/.]+\.py)", text), *re.findall(r"\btests/[\w/.]+", text)}
        assert sorted(path for path in named if not (ROOT / path).exists()) == []
        uses = re.findall(r"^ +-? ?uses: (.*)", text, re.MULTILINE)
        assert all(re.fullmatch(r"\./\S+|[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use) for use in uses)
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(release["publish"]["needs"]) == set(release) - {"publish"}
    tests = {"./.github/workflows/ci.yml", "./.github/workflows/full.yml"}
    assert {job["uses"] for job in release.values() if "uses" in job} == tests


def test_versions_are_those_of_the_package():
    """setup.cfg requires the oldest supported versions, and CI pins the oldest and the newest ones."""
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]["test"]["strategy"]
    pythons = matrix["matrix"]["python"]
    assert pythons == re.findall(r"Python :: (3\.\d+)$", setup, re.MULTILINE)
    assert pythons[0] == ".".join(map(str, compat.PYTHON)) and f"python_requires = >={pythons[0]}\n" in setup
    assert matrix["matrix"]["constraints"] == ["ci.txt", "ci-oldest.txt"]
    for name, (lowest, above) in compat.SUPPORTED.items():
        assert re.search(rf"^    {name}>={lowest}(,<6|; .*)?$", setup, flags=re.MULTILINE), name
        files = [(ROOT / "requirements" / file).read_text("utf-8") for file in ("ci-oldest.txt", "ci.txt")]
        oldest, newest = (re.search(rf"^{name}==([\d.]+)", text, re.MULTILINE)[1] for text in files)
        assert oldest.startswith(f"{lowest}.")
        if name == "transformers":  # `make test-newest` tests the newest torch and its Triton
            major, minor, _ = map(int, newest.split("."))
            assert above == f"{major}.{minor + 1}"
