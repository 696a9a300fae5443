"""Supported versions, and the differences between them. No other module checks a version.

Each function or constant states since which version it is needed, why, and when it can be removed.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

# The oldest Python, and of each package the oldest version, as in setup.cfg, and the first one that is not tested.
PYTHON = (3, 11)
SUPPORTED = {"torch": ("2.11", "2.16"), "transformers": ("5.20", "5.25"), "triton": ("3.6", "3.10")}


def installed(name: str) -> Version | None:
    """Return the version of a package, or None if it is not installed or has no metadata."""
    try:
        return Version(version(name))
    except PackageNotFoundError:
        return None


def check_versions() -> None:
    """Log one warning that names the packages whose version is not supported.

    Raises:
        ImportError: Python is too old.
    """
    if sys.version_info < PYTHON:
        found, oldest = (".".join(map(str, numbers[:2])) for numbers in (sys.version_info, PYTHON))
        raise ImportError(f"luna_mega requires Python {oldest} or later, but this is Python {found} ({sys.executable})")
    unsupported = []
    for name, (oldest, untested) in SUPPORTED.items():
        found = installed(name)
        if found is not None and not Version(oldest) <= Version(found.base_version) < Version(untested):
            unsupported.append(f"{name} {found} is installed, tested is {name}>={oldest},<{untested}")
    if unsupported:
        logging.getLogger(__name__).warning(
            f"luna_mega has not been tested with the installed versions: {'; '.join(unsupported)}. If an error occurs, "
            "install a supported version."
        )


check_versions()

_TRANSFORMERS = (installed("transformers") or Version(SUPPORTED["transformers"][0])).release

# transformers 5.23 added `exporters.ExportedModel`, which ONNX export requires; remove when 5.23 is the
# oldest supported version.
WRITES_EXPORT_FOLDERS = _TRANSFORMERS >= (5, 23)

# `output_hidden_states` selects layers since transformers 5.23; remove when 5.23 is the oldest supported version.
SELECTS_HIDDEN_STATES = _TRANSFORMERS >= (5, 23)

# Tensor parallelism splits a vocabulary that the number of ranks does not divide since transformers 5.21, which a test
# requires; remove when 5.21 is the oldest supported version.
SPLITS_UNEVENLY = _TRANSFORMERS >= (5, 21)

# `tp_plan` extends the plan of the model since transformers 5.23, before it replaced that plan, which tests require;
# remove when 5.23 is the oldest supported version.
MERGES_PLANS = _TRANSFORMERS >= (5, 23)

# transformers before 5.23 requires integer buffers in half precision in its test of `_keep_in_fp32_modules`; remove
# when 5.23 is the oldest supported version.
TESTS_CONVERT_INTEGERS = _TRANSFORMERS < (5, 23)

# transformers 5.24 renamed `past_key_values` to `cache`; use `cache` when 5.24 is the oldest supported version.
CACHE_NAME = "cache" if _TRANSFORMERS >= (5, 24) else "past_key_values"
_CACHE_NAMES = ("cache", "past_key_values")


def rename_cache(arguments: dict[str, Any], name: str = CACHE_NAME) -> None:
    """Store the cache that `arguments` contains under either name as `name`; None means that it is not given.

    transformers 5.24 renamed `past_key_values` to `cache`; remove when `past_key_values` is no longer accepted.

    Raises:
        ValueError: A cache is passed under both names.
    """
    (other,) = {*_CACHE_NAMES} - {name}
    if (cache := arguments.pop(other, None)) is None:
        return
    if arguments.get(name) is not None:
        raise ValueError("`cache` and `past_key_values` are two names of one argument; pass only one of them.")
    arguments[name] = cache


def has_cache(function: Callable) -> bool:
    """Return whether the cache is a parameter of a method; otherwise its keyword arguments may contain it."""
    return not inspect.signature(function).parameters.keys().isdisjoint(_CACHE_NAMES)


def accept_cache_names(function: Callable) -> Callable:
    """Return a method that accepts its cache under both names; its signature has the name that transformers uses.

    transformers 5.24 renamed `past_key_values` to `cache`; remove when `past_key_values` is no longer accepted.
    """
    if getattr(function, "accepts_cache_names", False):
        return function
    signature = inspect.signature(function)
    declared = next((name for name in _CACHE_NAMES if name in signature.parameters), CACHE_NAME)
    (other,) = {*_CACHE_NAMES} - {declared}

    @wraps(function)
    def wrapper(self, *args, **kwargs):
        if other in kwargs:
            rename_cache(kwargs, declared)
        return function(self, *args, **kwargs)

    parameters = signature.parameters.values()
    renamed = [x.replace(name=CACHE_NAME) if x.name == declared else x for x in parameters]
    wrapper.__signature__ = signature.replace(parameters=renamed)
    wrapper.accepts_cache_names = True
    return wrapper


class _CacheAlias:
    """Make `cache` another name of the output field `past_key_values`."""

    def __init__(self, *args, **kwargs):
        rename_cache(kwargs)
        super().__init__(*args, **kwargs)

    @property
    def cache(self) -> Any:
        """The cache."""
        return self.past_key_values

    @cache.setter
    def cache(self, value: Any):
        self.past_key_values = value

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_field(key))

    def __setitem__(self, key: str, value: Any):
        super().__setitem__(_field(key), value)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(_field(key))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a field, or `default` if it is not set."""
        return super().get(_field(key), default)


def _field(key: Any) -> Any:
    return CACHE_NAME if isinstance(key, str) and key == "cache" else key


def with_cache_alias(output_class: type, module: str | None = None) -> type:
    """Return a class of outputs whose cache is accessible as `cache` and as `past_key_values`.

    transformers has both names since 5.24; remove when 5.24 is the oldest supported version.

    Args:
        output_class: A data class derived from `ModelOutput`.
        module: The module that stores the result under the name of `output_class`; None = the module of `output_class`.
    """
    if CACHE_NAME == "cache":
        return output_class
    attributes = {"__module__": module or output_class.__module__, "__doc__": output_class.__doc__}
    return type(output_class.__name__, (_CacheAlias, output_class), attributes)
