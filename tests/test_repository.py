"""The files beside the code: hooks, workflows and templates."""

import re
from pathlib import Path

import pytest
import yaml


def commit_hook(root: Path) -> re.Pattern:
    """The pattern that pre-commit looks for in a message, with the flags of its option --multiline."""
    repositories = yaml.safe_load((root / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (hook,) = [hook for repository in repositories for hook in repository["hooks"] if hook["id"] == "commit-subject"]
    assert hook["args"] == ["--multiline", "--negate"] and hook["stages"] == ["commit-msg"]
    return re.compile(hook["entry"], re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("message", "right"),
    [
        ("[Fix] A mask of padding keeps nothing", True),
        ("[Docs] " + "a" * 65, True),
        ("[Docs] " + "a" * 66, False),
        ("[House] One\n\nA body with a line of any length: " + "a" * 100, True),
        ("a" * 80 + "\n[Fix] short", False),
        ("No tag", False),
        ("[Modeling] Another tag", False),
        ("[Fix]", False),
        ("\n[Fix] Late", False),
        ("Merge branch 'main'", True),
    ],
)
def test_subjects_of_commits(repo_root, message, right):
    assert bool(commit_hook(repo_root).search(message)) == right


def test_the_tags_are_those_of_contributing(repo_root):
    commits = (repo_root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Commits")[2]
    for tag in re.findall(r"`\[(\w+)\]`", commits):
        assert commit_hook(repo_root).search(f"[{tag}] A change")


def test_workflows_and_templates_are_yaml(repo_root):
    files = [*(repo_root / ".github").rglob("*.yml")]
    for file in files:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert content["name"] and ("jobs" in content or content["body"])
    assert {"ci.yml", "release.yml", "gpu.yml", "bug.yml"} <= {file.name for file in files}


def test_commands_of_workflows_exist(repo_root):
    """Make targets and scripts that a workflow runs."""
    targets = re.findall(r"^([a-z-]+):", (repo_root / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for file in (repo_root / ".github" / "workflows").glob("*.yml"):
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"run: make ([a-z-]+)", text)) <= set(targets)
        assert all((repo_root / script).is_file() for script in re.findall(r"\.venv/bin/python (\S+)", text))


def test_text_is_read_without_its_byte_order_mark(repo_root):
    """Editors on Windows start a file with U+FEFF, which plain UTF-8 keeps as a part of the first word."""
    folders = ["benchmarks", "convert", "examples", "kernels", "luna_mega", "studies", *repo_root.glob("modeling_*")]
    files = [file for folder in folders for file in (repo_root / folder).rglob("*.py")]
    reads = re.compile(r"\.read_text\((?:encoding=[^()]*)?\)|open\([^()\n]*encoding=[^()\n]*\)")
    found = {(file.name, call) for file in files for call in reads.findall(file.read_text(encoding="utf-8"))}
    assert len(found) > 5
    assert not [read for read in found if "utf-8-sig" not in read[1] and '"w"' not in read[1]]
