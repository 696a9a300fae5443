"""Versions of Triton that compile the kernels in tests; pip installs those other than the installed one in `build`."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Versions that contain `ptxas` 12.8: the oldest supported version, and the version that torch 2.13 requires.
OLDER = ("3.6.0", "3.7.1")
NEWEST = "3.9.0"


def folder(version: str) -> Path:
    """Return the folder of a version of Triton; the first call installs it."""
    path = ROOT / "build" / f"triton-{version}"
    path.parent.mkdir(exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            new = Path(f"{path}.new")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", new]
            subprocess.run([*pip, f"triton=={version}"], check=True)
            new.rename(path)
    return path


def environment(version: str | None) -> dict[str, str]:
    """Return the environment of a process that compiles kernels with a version; None = the installed one."""
    installed = version in (None, metadata.version("triton"))
    paths = [*([] if installed else [folder(version)]), ROOT, HERE]
    return os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(map(str, paths))}
