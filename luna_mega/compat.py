"""Supported versions. No other module checks a version."""

import logging
import sys
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

# The oldest Python, and of each package the oldest version, as in setup.cfg, and the first one that is not tested.
PYTHON = (3, 11)
SUPPORTED = {"torch": ("2.11", "2.16"), "transformers": ("5.24", "5.25"), "triton": ("3.6", "3.10")}
# Older versions raise an error, also in the code of a model folder, which is tested with transformers 5.22. It failed
# with torch 2.6, where `torch.compiler` has no `_is_exporting_flag`.
REQUIRED = {"torch": "2.7", "transformers": "5.22"}


def installed(name: str) -> Version | None:
    """Return the version of a package, or None if it is not installed or has no metadata."""
    try:
        return Version(version(name))
    except PackageNotFoundError:
        return None


def is_older(found: str, other: str) -> bool:
    """Return whether a version precedes another one."""
    return Version(found) < Version(other)


def check_versions() -> None:
    """Log one warning that names the packages whose version is not supported.

    Raises:
        ImportError: Python or a package is too old.
    """
    if sys.version_info < PYTHON:
        found, oldest = (".".join(map(str, numbers[:2])) for numbers in (sys.version_info, PYTHON))
        raise ImportError(f"luna_mega requires Python {oldest} or later, but this is Python {found} ({sys.executable})")
    unsupported = []
    for name, (oldest, untested) in SUPPORTED.items():
        if (found := installed(name)) is None:
            continue
        release, required = Version(found.base_version), REQUIRED.get(name)
        if required is not None and release < Version(required):
            raise ImportError(
                f"luna_mega and the code in its model folders require {name} {required} or later, but {found} is "
                f"installed; run `pip install '{name}>={oldest}'`"
            )
        if not Version(oldest) <= release < Version(untested):
            unsupported.append(f"{name} {found} is installed, tested is {name}>={oldest},<{untested}")
    if unsupported:
        logging.getLogger(__name__).warning(
            f"luna_mega has not been tested with the installed versions: {'; '.join(unsupported)}. If an error occurs, "
            "install a supported version."
        )


check_versions()
