"""Training scripts on two processes write their files, and give the results of one process with the same batch."""

import importlib
import json
import os
import random
import sys
from functools import partial
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

import luna_mega  # noqa: F401  (registers the models with the Auto classes)
from tests.examples import (
    test_run_audio as audio,
    test_run_glue as glue,
    test_run_mlm as mlm,
    test_run_race as race,
    test_run_translation as translation,
)
from tests.examples.contract import images
from tests.examples.runs import QUIET, TINY, steps, write, write_splits

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MEGA = (
    "hidden_size=16,num_hidden_layers=1,intermediate_size=16,nffn_hidden_size=16,shared_representation_size=8,"
    "ema_projection_size=2,use_chunking=true,chunk_size=8,dropout_prob=0.0,hidden_dropout_prob=0.0,"
    "attention_probs_dropout_prob=0.0,nffn_activation_dropout_prob=0.0"
)
LUNA = f"{TINY},dropout=0.0,attention_dropout=0.0"


def call(name: str, arguments: list[str]) -> dict:
    """Run a script as a rank; return its summary, or its error message."""
    # launchers set these variables
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    AcceleratorState._reset_state(reset_partial_state=True)  # the state of the previous test
    try:
        return importlib.import_module(name).main(arguments)
    except SystemExit as error:
        return {"error": str(error)}


def scores(results: dict, *prefixes: str) -> dict:
    """Return the results that do not depend on the time."""
    timed = ("_runtime", "_per_second", "_preparation_time")
    return {name: value for name, value in results.items() if name.startswith(prefixes) and not name.endswith(timed)}


def read_losses(output: Path) -> list[float]:
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def write_texts(folder: Path) -> Path:
    write(mlm.texts(60, seed=1), folder / "train.txt")
    return write(mlm.texts(20, seed=2), folder / "validation.txt")


def write_pairs(folder: Path) -> Path:
    random.seed(0)
    for name, count in (("train", 40), ("validation", 9), ("test", 5)):
        write(translation.make_pairs(count), folder / f"{name}.jsonl")
    return folder


# The data and options of each script. Neither evaluation nor prediction splits are a multiple of the batch.
SIZES = {"train": 32, "validation": 9, "test": 5}
SCRIPTS = {
    "run_clm": (
        write_texts,
        ["--model_type", "mega", "--block_size", "32", "--eval_context", "64", "--eval_segment", "32"],
    ),
    "run_mlm": (write_texts, ["--config_overrides", LUNA, "--vocab_size", "300", "--max_seq_length", "32"]),
    "run_glue": (
        partial(write_splits, partial(glue.rows, "sst2"), **SIZES),
        [
            *("--task_name", "sst2"),
            *("--config_overrides", LUNA, "--vocab_size", "300", "--token_dropout", "0.2"),
        ],
    ),
    "run_race": (
        partial(write_splits, race.race_rows, **SIZES),
        ["--config_overrides", LUNA, "--vocab_size", "300", "--max_seq_length", "48"],
    ),
    "run_audio": (
        partial(write_splits, audio.rows, **SIZES),
        ["--audio_column", "clip", "--config_overrides", LUNA, "--random_shift", "0.01", "--random_noise", "0.1"],
    ),
    "run_image_classification": (
        partial(write_splits, images, **SIZES),
        ["--center_crop", "false", "--patch_size", "4", "--model_type", "mega", "--config_overrides", MEGA],
    ),
    "run_translation, tokens": (
        write_pairs,
        [
            *("--config_overrides", translation.TINY["luna"], "--vocab_size", "300", "--max_source_length", "16"),
            *("--max_target_length", "16", "--max_tokens", "48"),
        ],
    ),
    "run_translation": (
        write_pairs,
        [
            *("--config_overrides", translation.TINY["luna"], "--vocab_size", "300", "--max_source_length", "16"),
            *("--max_target_length", "16", "--label_smoothing_factor", "0.1", "--num_beams", "2"),
        ],
    ),
}
SLOW = ("run_clm", "run_glue", "run_translation, tokens")  # the others are exhaustive
WRITTEN = {
    "run_glue": "SST-2.tsv",
    "run_race": "predictions.tsv",
    "run_audio": "predictions.tsv",
    "run_image_classification": "predictions.tsv",
    "run_translation": "translations.test.de",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in SLOW)) for name in SCRIPTS],
)
def test_two_processes_equal_one(name, ranks, tmp_path):
    make, options = SCRIPTS[name]
    name, _, by_tokens = name.partition(", ")
    data = make(tmp_path / "data")
    if name == "run_clm":
        options = [*options, "--config_overrides", MEGA, "--tokenization", "char", "--line_end", "newline"]
    options += ["--do_predict"] * (name in WRITTEN)
    outputs, summaries = {}, {}
    for processes in (1, 2):
        output = outputs[processes] = tmp_path / str(processes)
        number = ["--gradient_accumulation_steps", str(2 // processes)]
        number = number if by_tokens else ["--per_device_train_batch_size", str(8 // processes)]
        batches = [*number, "--per_device_eval_batch_size", "4"]
        paths = ["--dataset_path", str(data), "--output_dir", str(output), "--save_strategy", "no"]
        # Adam would amplify rounding errors of gradients near zero to full steps.
        steps = ["--max_steps", "3", "--optim", "sgd", "--learning_rate", "0.1", "--do_train", "--do_eval"]
        found = ranks(processes, call, name, [*QUIET, *paths, *steps, *batches, *options])
        assert "error" not in found[0], found
        summaries[processes] = found[0]
        saved = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
        assert saved == found[0]
        other = scores(found[-1], "eval_", "test_")
        assert other.items() <= saved.items()
    assert read_losses(outputs[2]) == pytest.approx(read_losses(outputs[1]), rel=1e-6)
    assert len(read_losses(outputs[2])) == 3
    assert scores(summaries[2], "eval_") == pytest.approx(scores(summaries[1], "eval_"), rel=1e-6)
    files = [sorted(path.name for path in output.iterdir()) for output in outputs.values()]
    assert files[0] == files[1]
    if name in WRITTEN:
        one, two = ((output / WRITTEN[name]).read_text(encoding="utf-8") for output in outputs.values())
        assert one == two


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_processes(ranks, tmp_path):
    """A run resumes with the same losses in the second epoch, whose order and masks differ from the first one."""
    data = write_texts(tmp_path / "data")
    options = ["--config_overrides", MEGA, "--model_type", "mega", "--vocab_size", "300", "--max_seq_length", "32"]
    options += ["--dataset_path", str(data), "--do_train", "--optim", "sgd", "--learning_rate", "0.1"]

    def run(processes, output, *more):
        batch = ["--per_device_train_batch_size", str(8 // processes)]
        arguments = [*QUIET, *options, *batch, "--output_dir", str(tmp_path / output), *more, "--save_steps", "4"]
        return ranks(processes, call, "run_mlm", [*arguments, "--num_train_epochs", "3"])[0]

    run(1, "complete")
    assert steps(tmp_path / "complete") > 9 and (tmp_path / "complete/checkpoint-4").is_dir()
    run(2, "two")
    for start, processes in (("two", 2), ("two", 1), ("complete", 2)):
        checkpoint = tmp_path / start / "checkpoint-4"
        assert int(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["epoch"]) == 1
        output = f"{start}-{processes}"
        run(processes, output, "--resume_from_checkpoint", str(checkpoint))
        assert read_losses(tmp_path / output) == pytest.approx(read_losses(tmp_path / "complete"), rel=1e-6)


def test_wrong_numbers_of_processes_raise(ranks, tmp_path):
    options = ["--dataset_path", str(write_texts(tmp_path / "data")), "--output_dir", str(tmp_path / "out")]
    options += ["--do_train", "--vocab_size", "300", "--max_seq_length", "32", "--config_overrides", LUNA]
    large = [*options, "--use_cpu", "--per_device_train_batch_size", "1000"]
    (message,) = {answer["error"] for answer in ranks(2, call, "run_mlm", large)}
    assert "2 processes with --per_device_train_batch_size 1000 need 2000 examples for a batch" in message
    first, second = ranks(2, call, "run_mlm", options)  # without --use_cpu, each process would train separately
    assert (
        "2 processes were launched, but they would train independently; on CPUs, pass --use_cpu true" in first["error"]
    )
    assert second["error"] == "1" and not (tmp_path / "out").exists()
