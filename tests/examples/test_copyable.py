"""Scripts are self-contained: a copy in an empty folder trains for two steps with the installed package."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import test_run_audio as audio, test_run_image_classification as image, test_run_race as race
from tests.examples.conftest import EXAMPLES
from tests.examples.runs import QUIET, TINY, steps, write, write_splits
from tests.examples.test_run_mlm import texts
from tests.marks import slow_but

SCRIPTS = sorted(EXAMPLES.glob("run_*.py"))
METRIC = EXAMPLES / "metrics" / "glue_metrics"
LUNA = ["--config_overrides", TINY, "--vocab_size", 300]
MEGA = ["--model_type", "mega", "--config_overrides", audio.MEGA]


def lines(folder: Path, *columns: str) -> Path:
    """Write splits with one sentence per column and row; labels alternate between 0 and 1."""
    for split, size in (("train", 40), ("validation", 12)):
        rows = [
            {"label": index % 2} | dict.fromkeys(columns, text) for index, text in enumerate(texts(size, seed=size))
        ]
        write(rows, folder / f"{split}.jsonl")
    return folder


def splits(rows, folder: Path) -> Path:
    return write_splits(rows, folder, train=16, validation=8)


# Script -> function that writes its data to a folder and returns the script's own options.
OPTIONS = {
    "run_glue": lambda to: [
        *("--task_name", "sst2", "--metric_path", METRIC, *LUNA, "--dataset_path", lines(to, "sentence")),
    ],
    "run_text_classification": lambda to: [*LUNA, "--dataset_path", lines(to, "text")],
    "run_race": lambda to: [*LUNA, "--dataset_path", splits(race.race_rows, to)],
    "run_mlm": lambda to: [*LUNA, "--max_seq_length", 16, "--dataset_path", lines(to, "text")],
    "run_clm": lambda to: [*MEGA, "--block_size", 16, "--tokenization", "byte", "--dataset_path", lines(to, "text")],
    "run_audio": lambda to: [*MEGA, "--audio_column", "clip", "--dataset_path", splits(audio.rows, to)],
    "run_image_classification": lambda to: [
        *("--model_type", "mega", "--config_overrides", image.MEGA, "--patch_size", 4),
        *("--dataset_path", splits(image.rows, to)),
    ],
    "run_translation": lambda to: [*LUNA, "--dataset_path", lines(to, "en", "de")],
}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Return a function that imports a copy of a script, while no other script can be imported."""

    def load(path: Path):
        (tmp_path / "empty").mkdir()
        copy = tmp_path / "empty" / path.name
        copy.write_bytes(path.read_bytes())
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.startswith(str(EXAMPLES))])
        for name in [name for name in sys.modules if name.startswith("run_")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.chdir(tmp_path / "empty")
        spec = importlib.util.spec_from_file_location(f"copied_{path.stem}", copy)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look up the module of their class
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("path", slow_but([EXAMPLES / "run_glue.py"], SCRIPTS), ids=lambda path: path.stem)
def test_a_copied_script_trains(path, copied, tmp_path):
    options = [*OPTIONS[path.stem](tmp_path / "data"), "--output_dir", "out", "--max_steps", 2]
    options += [*QUIET, "--do_train", "--do_eval", "--save_strategy", "no"]
    results = copied(path).main([str(option) for option in options])
    assert (
        json.loads(Path("out", "all_results.json").read_text(encoding="utf-8")) == results and steps(Path("out")) == 2
    )
    assert Path("out", "model.safetensors").is_file()
    assert results["train_loss"] > 0 and results["eval_loss"] > 0 and results["train_runtime"] > 0
    assert Path("out", "README.md").is_file() and Path("out", "training.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path if path.stem == "run_race" else pytest.param(path, marks=pytest.mark.exhaustive) for path in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_a_script_that_runs_can_be_hashed(path, tmp_path):
    """Datasets hashes functions with all that they refer to; classes of `__main__` are pickled, not imported."""
    options = [*OPTIONS[path.stem](tmp_path / "data"), "--output_dir", tmp_path / "out", "--max_steps", 1]
    command = [sys.executable, path, *options, *QUIET, "--do_train", "--save_strategy", "no"]
    result = subprocess.run([str(part) for part in command], capture_output=True, encoding="utf-8", check=True)
    # dill also warns about `safe_open`, but only if the package is imported from a checkout.
    assert "<class '__main__." not in result.stderr
