import atexit
import gc
import importlib
import importlib.util
import logging
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.marks import cover
from tests.parity import report

# Without a GPU, Triton kernels are interpreted. Triton reads this variable when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Libraries of Hugging Face read this variable when they are imported. The processes of pytest-xdist inherit it.
if "HF_HOME" not in os.environ and not os.access(Path.home(), os.W_OK):
    os.environ["HF_HOME"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

ROOT = Path(__file__).resolve().parent.parent

# Random members of the contracts: the same in every run of CI; other ones, and more, with --hypothesis-profile=random.
SHARED = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("fixed", derandomize=True, max_examples=25, **SHARED)
settings.register_profile("random", derandomize=False, max_examples=1000, **SHARED)
# For tests/mutants.py: a failure is enough, the smallest one is not needed.
settings.register_profile("unreduced", parent=settings.get_profile("fixed"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("fixed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude objects that exist until the end (modules and tests, about a million) from garbage collection.

    `Trainer` collects garbage at the start of every training, which would take half the time of a small one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free all objects, or nanobind reports its functions as leaks."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # runs before -m selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of `covering(n)` tests: an array of strength n is fast, the rest of n + 1 slow, others exhaustive."""
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in products.values():
        (strength,) = cases[0].get_closest_marker("covering").args
        slow = cover(cases, strength, [])
        for case in slow:
            case.add_marker(pytest.mark.slow)
        for case in cover(slow, strength + 1, [case for case in cases if case not in slow]):
            case.add_marker(pytest.mark.exhaustive)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Return the root folder of the checkout."""
    return ROOT


@pytest.fixture(scope="module")
def import_benchmark() -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports a script of the folder `benchmarks`, which is temporarily in the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Return the folder next to the checkout that has more parity fixtures and data sets; skip the test without it."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("../shared (further parity fixtures and data sets) is absent")
    return path


class ParityFolders:
    """Find the folder of a parity fixture in the repository or in `FIXTURES` (default: `../shared`)."""

    def __init__(self):
        further = os.environ.get("FIXTURES", ROOT.parent / "shared" / "fixtures")
        self.roots = [ROOT / "tests" / "parity" / "fixtures"] + ([Path(further)] if further else [])
        self.last = ""

    def __call__(self, family: str, name: str) -> Path:
        """Return the folder, or skip the test if neither root contains it."""
        self.last = f"{family}/{name}"
        for root in self.roots:
            if (root / family / name).is_dir():
                return root / family / name
        self.last = ""
        pytest.skip(f"the fixture {family}/{name} is not in the repository")

    def names(self, family: str) -> list[str]:
        """Return the names of all available fixtures of a family."""
        return sorted({folder.name for root in self.roots if root.is_dir() for folder in (root / family).iterdir()})

    def all(self, family: str, *patterns: str) -> list[Path]:
        """Return the folders of a family whose names match one of the patterns; skip the test if there are none."""
        found = [name for pattern in patterns or ("*",) for name in self.names(family) if fnmatch(name, pattern)]
        if not found:
            pytest.skip(f"no fixture {family}/{' or '.join(patterns)} in the repository")
        return [self(family, name) for name in found]


@pytest.fixture(scope="session")
def parity_folder() -> ParityFolders:
    """Return a function that returns the folder of a parity fixture by family and name."""
    return ParityFolders()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # prints after the list of skipped tests
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Print how many parity cases ran, and write the page that `PARITY_TABLE` specifies."""
    yield
    if line := report.summary(terminalreporter.stats):
        terminalreporter.write_line(line)
    if page := os.environ.get("PARITY_TABLE"):
        report.write(Path(page), terminalreporter.stats.get("passed", []))


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """Return the device of the Triton kernels: the GPU, or the CPU if they are interpreted. Skip without Triton."""
    pytest.importorskip("triton", reason="Triton is not installed")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def interpret_quickly() -> Iterator[None]:
    """Call helpers of interpreted kernels without patching Triton's language, which the launch has already patched."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction

    patch_and_call = InterpretedFunction.__call__

    def call(self, *args, **kwargs):
        used = [module for module in (language, language.core) if module in self.fn.__globals__.values()]
        if any(language.core.is_builtin(module.load) for module in used):
            return patch_and_call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


@pytest.fixture(scope="session", autouse=True)
def deprecation_errors() -> Iterator[None]:
    """Raise an error if code of this repository causes a deprecation warning that transformers logs once."""
    import transformers.utils.logging  # noqa: F401  # defines `Logger.warning_once`

    warning_once = logging.Logger.warning_once

    def check(self: logging.Logger, message: str, *args, **kwargs) -> None:
        if "deprecated" in message or "removed" in message:
            callers = (Path(frame.filename) for frame in reversed(traceback.extract_stack()[:-1]))
            caller = next(file for file in callers if "site-packages" not in file.parts)
            ours = caller.is_relative_to(ROOT) and not caller.is_relative_to(ROOT / "tests")
            assert not ours, f"{caller} causes the warning: {message}"
        warning_once(self, message, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.Logger, "warning_once", check)
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed the random numbers of every test independently of earlier tests."""
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # `torch.manual_seed` would also format the stack, in order to seed other devices when they are first used
        torch.default_generator.manual_seed(0)
