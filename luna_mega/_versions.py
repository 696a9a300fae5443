# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The oldest versions that the package runs with, checked before anything else is imported."""

import sys
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

PYTHON = (3, 11)
NEEDED = {"torch": "2.13", "transformers": "5.20"}


def check_versions() -> None:
    """Raise ImportError with the versions and the way out where Python, torch or transformers is too old."""
    if sys.version_info < PYTHON:
        installed, least = (".".join(map(str, numbers[:2])) for numbers in (sys.version_info, PYTHON))
        raise ImportError(f"luna_mega needs Python {least} or later, and this is Python {installed} ({sys.executable})")
    for name, least in NEEDED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:  # a build without metadata; a missing package fails when it is imported
            continue
        if Version(installed) < Version(least):
            raise ImportError(
                f"luna_mega needs {name} {least} or later, and {name} {installed} is installed for {sys.executable}: "
                f"pip install --upgrade '{name}>={least}'"
            )


check_versions()
