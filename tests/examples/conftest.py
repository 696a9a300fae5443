import importlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import datasets.config
import huggingface_hub.constants
import pytest

from luna_mega.training import speed
from tests.examples.runs import QUIET

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def examples_dir() -> Path:
    return EXAMPLES


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of examples/ as the interpreter does when it runs a script there."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def call(script, monkeypatch) -> Callable[..., dict]:
    """Call a script in this process, quietly and on CPU; return its summary, which must equal the saved one.

    The peak throughput of the CPU is measured with small products, because large ones take many seconds in bfloat16.
    """

    def main(name: str, *arguments: object) -> dict:
        module = script(name)
        with monkeypatch.context() as patch:
            patch.setattr(speed, "measure_peak", partial(speed.measure_peak, side=64))
            metric = ["--metric_path", str(EXAMPLES / "metrics" / "glue_metrics")] if name.endswith("_glue") else []
            summary = module.main([*QUIET, *metric, *map(str, arguments)])
        assert json.loads(Path(summary["output_dir"], "all_results.json").read_text()) == summary
        return summary

    return main


@pytest.fixture
def run(call, request) -> Callable[..., dict]:
    """Call the script of the test module, with the options that the module's RUN has for all of its tests."""
    return partial(call, *request.module.RUN)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Disable access to the Hub, and delete data set caches after the test."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
