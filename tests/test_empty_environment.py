"""The package works in an empty environment, with the versions that pip selects."""

import os
import shutil
import subprocess
import venv
from importlib import metadata
from pathlib import Path

import pytest

from tests.test_packaging import SCRIPT_FOLDERS, packaged_folders


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    """Run a command without the modules and the constraints of this environment."""
    hidden = {"PYTHONPATH", "PIP_CONSTRAINT"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8")


@pytest.mark.slow
def test_quickstart_after_pip_install(repo_root, tmp_path):
    """The quickstart runs after `pip install '.[examples]'` without pins.

    Only torch has the version of this environment, because other versions are gigabytes to download.
    """
    checkout, empty, folder = tmp_path / "checkout", tmp_path / "empty", tmp_path / "folder"
    folder.mkdir()
    for name in [*packaged_folders().values(), *SCRIPT_FOLDERS]:
        shutil.copytree(repo_root / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in filter(Path.is_file, repo_root.iterdir()):
        shutil.copy(file, checkout)
    venv.create(empty, with_pip=True)
    python = empty / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    if run(*pip, "--dry-run", "--no-deps", "--ignore-installed", "packaging", cwd=folder).returncode:
        pytest.skip("pip reaches no package index")
    for requirement in (f"torch=={metadata.version('torch')}", f"{checkout}[examples]"):
        done = run(*pip, requirement, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    listed = run(python, "-m", "pip", "freeze", cwd=folder).stdout
    done = run(python, repo_root / "tests" / "quickstart.py", repo_root / "README.md", cwd=folder)
    assert done.returncode == 0, listed + done.stdout + done.stderr
    assert done.stdout.count("loading work") == 10
