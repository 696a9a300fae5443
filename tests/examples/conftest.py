import importlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import datasets
import huggingface_hub.constants
import pytest
import torch
from datasets.fingerprint import generate_random_fingerprint

from tests.examples.contract import SCRIPTS
from tests.examples.runs import QUIET
from tests.quick import compiled_templates as compiled_templates, with_code as with_code, without_code as without_code

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports a module of examples/ as the interpreter does when it runs a script there."""
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def call(script) -> Callable[..., dict]:
    """Return a function that runs a script in this process on the CPU and returns its metrics.

    It checks that the script saves the metrics.
    """

    def main(name: str, *arguments: object) -> dict:
        module = script(name)
        metrics = module.main([*QUIET, *map(str, arguments)])
        # the last occurrence of the option
        output = Path(arguments[len(arguments) - arguments[::-1].index("--output_dir")])
        assert metrics.items() <= json.loads((output / "all_results.json").read_text(encoding="utf-8")).items()
        return metrics

    return main


@pytest.fixture
def run(call, request) -> Callable[..., dict]:
    """Return a function that runs the script of the test module with the options in the module's `RUN`."""
    return partial(call, *request.module.RUN)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Disable access to the Hub, and use an empty cache of data sets without fingerprints."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for module in (datasets.arrow_dataset, datasets.fingerprint):
        monkeypatch.setattr(module, "update_fingerprint", lambda *_: generate_random_fingerprint())


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plot only in other processes, because a plot takes longer than two steps of a tiny model."""
    monkeypatch.setattr("luna_mega.training.runs.plot_losses", lambda *_: None)


@pytest.fixture(autouse=True)
def default_products() -> Iterator[None]:
    """Restore the library of float32 products, which scripts choose for their process."""
    yield
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture
def train(call, tmp_path) -> Callable[..., Path]:
    """Return a function that trains on 20 rows of a script, with 4 in a batch, and returns the output folder."""

    def run(output: str, name: str, *options: object) -> Path:
        row, data = SCRIPTS[name], tmp_path / f"data-{name}"
        if not data.exists():
            row.write(data, train=20, validation=6)
        paths = ["--dataset_path", data, "--output_dir", tmp_path / output, "--do_train"]
        rate = ["--learning_rate", 0.01, "--per_device_train_batch_size", 4]
        call(name, *row.data, *row.short, *row.model, *rate, *paths, *options)
        return tmp_path / output

    return run
