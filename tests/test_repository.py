"""Hooks, workflows, constraint files and templates of the repository."""

import ast
import configparser
import re
from pathlib import Path

import yaml

from luna_mega import compat


def workflow(root: Path, name: str) -> dict:
    return yaml.safe_load((root / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def test_workflows_and_templates_are_yaml(repo_root):
    found = {file.name: yaml.safe_load(file.read_text("utf-8")) for file in (repo_root / ".github").rglob("*.yml")}
    assert {"ci.yml", "release.yml", "gpu.yml", "bug.yml", "dependabot.yml"} <= found.keys()
    assert all(content.keys() & {"jobs", "body", "updates", "contact_links"} for content in found.values())


def test_actions_are_pinned_by_commit(repo_root):
    files = (repo_root / ".github" / "workflows").glob("*.yml")
    uses = [use for file in files for use in re.findall(r"uses: (.*)", file.read_text(encoding="utf-8"))]
    pinned = re.compile(r"\./\S+|[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    assert len(uses) > 10 and not [use for use in uses if not pinned.fullmatch(use)]


def test_a_job_installs_from_the_package_index_alone(repo_root):
    """CPU builds of torch on another index have fewer requirements, which hides conflicts."""
    job = workflow(repo_root, "ci.yml")["jobs"]["container"]
    assert "env" not in job and {"run": "make test"} in job["steps"] and {"run": ".ci/resolve"} in job["steps"]


def test_commands_of_workflows_exist(repo_root):
    """The make targets and scripts that workflows run exist."""
    targets = re.findall(r"^([a-z-]+):", (repo_root / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for file in (repo_root / ".github" / "workflows").glob("*.yml"):
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"run: make ([a-z-]+)", text)) <= set(targets)
        assert all((repo_root / script).is_file() for script in re.findall(r"\.venv/bin/python (\S+)", text))


def test_text_is_read_without_its_byte_order_mark(repo_root):
    """All text is read as utf-8-sig.

    Editors on Windows start a file with U+FEFF, which UTF-8 keeps as part of the first word.
    """
    folders = ["benchmarks", "convert", "examples", "kernels", "luna_mega", *repo_root.glob("modeling_*")]
    files = [file for folder in folders for file in (repo_root / folder).rglob("*.py")]
    reads = re.compile(r"\.read_text\((?:encoding=[^()]*)?\)|open\([^()\n]*encoding=[^()\n]*\)")
    found = {(file.name, call) for file in files for call in reads.findall(file.read_text(encoding="utf-8"))}
    assert len(found) > 5
    assert not [read for read in found if "utf-8-sig" not in read[1] and '"w"' not in read[1]]


def test_text_has_an_encoding(sources):
    """Files and pipes of text are not in the encoding of the locale, which is ASCII in some containers.

    ruff finds `open` without an encoding (PLW1514), but not these methods.
    """
    assert len(sources) > 300
    found = []
    for name, source in sources.items():
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            method, arguments = getattr(call.func, "attr", ""), {argument.arg for argument in call.keywords}
            file = len(call.args) <= {"read_text": 0, "write_text": 1}.get(method, -1)
            pipe = "text" in arguments and method in ("run", "Popen", "check_output")
            if (file or pipe) and "encoding" not in arguments:
                found.append(f"{name}:{call.lineno}")
    assert not found


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


def test_ci_runs_every_python_with_both_constraint_files(repo_root):
    setup = (repo_root / "setup.cfg").read_text(encoding="utf-8")
    matrix = workflow(repo_root, "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)$", setup, re.MULTILINE)
    assert f"python_requires = >={matrix['python'][0]}\n" in setup
    assert matrix["constraints"] == ["ci.txt", "ci-oldest.txt"]
    slow = workflow(repo_root, "full.yml")["jobs"]["slow"]["strategy"]["matrix"]
    assert slow["constraints"] == matrix["constraints"]


def test_constraint_files_pin_the_tested_range(repo_root):
    for name, (lowest, above) in compat.SUPPORTED.items():
        files = [(repo_root / "requirements" / file).read_text("utf-8") for file in ("ci-oldest.txt", "ci.txt")]
        oldest, newest = (re.search(rf"^{name}==([\d.]+)", text, re.MULTILINE)[1] for text in files)
        assert oldest.startswith(f"{lowest}.")
        if name == "transformers":  # `make test-newest` tests the newest torch and its Triton
            major, minor, _ = map(int, newest.split("."))
            assert above == f"{major}.{minor + 1}"


def test_a_release_is_published_after_all_tests(repo_root):
    jobs = workflow(repo_root, "release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert {job["uses"] for job in jobs.values() if "uses" in job} == {
        "./.github/workflows/ci.yml",
        "./.github/workflows/full.yml",
    }
    for name in ("ci.yml", "full.yml"):
        assert "workflow_call" in workflow(repo_root, name)[True]  # YAML parses the key `on` as true
