"""Write the operators without the models: a folder for the Kernel Hub of Hugging Face, and a project for a wheel.

    make kernel-repository   # calls: python .ci/operators.py build/kernel

The script requires the package `kernels`. `python .ci/operators.py OUTPUT [VERSION]` writes

* `OUTPUT/build/torch-cpu` and `torch-cuda`: a repository that `kernels.get_local_kernel(OUTPUT)` loads, or
  `kernels.get_kernel(NAME)` after an upload. VERSION is the version of the repository; the default is 0.
* `OUTPUT/wheel`: a project, for `pip wheel`, of the package `luna_mega_ops`, which requires only torch.

The modules are copied unchanged: they import each other with relative imports. Only the wheel contains the C library,
because the repository is for all platforms.
"""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from kernels._rust import Digest, DigestAlgorithm

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [Path("recurrence", name) for name in ("native.c", "native_vectors.h")]
NAME, LICENSE = "luna-mega", "Apache-2.0"
# On other devices, `_dispatch` would choose the algorithms for CPUs.
BACKENDS = {"cpu": {}, "cuda": {"archs": ["8.0", "9.0", "10.0", "12.0"]}}
ENTRY = '''"""Luna's and Mega's attention, moving averages and diagonal recurrences, and Megalodon's norm."""

from . import modules  # noqa: F401
from .api import *  # noqa: F403
from .api import __all__  # noqa: F401
'''
PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "luna-mega-ops"
version = "{version}"
description = "Luna's and Mega's attention, moving averages and diagonal recurrences, and Megalodon's norm"
license = "{license}"
requires-python = ">=3.11"
dependencies = ["torch>=2.11"]

[project.optional-dependencies]
triton = ["triton>=3.6; platform_system == 'Linux'"]

[tool.setuptools]
packages.find = {{ include = ["luna_mega_ops*"], namespaces = true }}
include-package-data = false
"""


def copy_operators(folder: Path) -> None:
    """Replace a folder by a package with the operators."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT / "kernels", folder, ignore=shutil.ignore_patterns("__pycache__", "*.md", "*.c", "*.h", "*.so")
    )
    (folder / "__init__.py").write_text(ENTRY, encoding="utf-8")


def write_variant(folder: Path, backend: str, version: int) -> None:
    """Write the operators for one type of device, with their metadata."""
    copy_operators(folder)
    digest = dict(Digest.hash_variant(DigestAlgorithm.SHA256, folder).files)
    # The loader names the modules by the id, so two builds with other files must have other ids.
    content = hashlib.sha256(json.dumps(sorted(digest.items())).encode()).hexdigest()
    metadata = {
        "id": f"_{NAME.replace('-', '_')}_{backend}_{content[:8]}",
        "name": NAME,
        "version": version,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend, **BACKENDS[backend]},
        "digest": {"algorithm": "sha256", "files": digest},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def main(output: Path, version: int = 0) -> None:
    for backend in BACKENDS:
        write_variant(output / "build" / f"torch-{backend}", backend, version)
    copy_operators(output / "wheel" / "luna_mega_ops")
    for source in SOURCES:
        shutil.copy(ROOT / "kernels" / source, output / "wheel" / "luna_mega_ops" / source)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    setup = setup.replace('"luna_mega.kernels.', '"luna_mega_ops.').replace('"kernels/', '"luna_mega_ops/')
    (output / "wheel" / "setup.py").write_text(setup, encoding="utf-8")
    package = (ROOT / "luna_mega" / "__init__.py").read_text(encoding="utf-8")
    number = re.search(r'^__version__ = "(.*)"$', package, re.MULTILINE)[1]
    project = PROJECT.format(version=number, license=LICENSE)
    (output / "wheel" / "pyproject.toml").write_text(project, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: {sys.argv[0]} OUTPUT [VERSION]")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
