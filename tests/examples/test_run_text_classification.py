import random

import pandas as pd
import pytest
from transformers import pipeline

from tests.examples import runs
from tests.examples.runs import assert_complete, assert_error, sentence

RUN = ["run_text_classification", "--max_seq_length", 32]


def rows(size: int, seed: int) -> list[dict]:
    """Return reviews that are good or bad, with titles."""
    draw = random.Random(seed)
    examples = []
    for index in range(size):
        good = draw.randrange(2) == 1
        examples.append({"title": f"No. {index}", "text": sentence(good, draw), "label": "good" if good else "bad"})
    return examples


@pytest.fixture
def folder(tmp_path):
    """Write a folder without a validation split, as in IMDB."""
    for split, size in (("train", 80), ("test", 12)):
        path = tmp_path / "reviews" / f"{split}.csv"
        path.parent.mkdir(exist_ok=True)
        pd.DataFrame(rows(size, size)).to_csv(path, index=False)
    return tmp_path / "reviews"


def options(folder, output, *more) -> list:
    model = ["--config_overrides", f"{runs.TINY},dropout=0.1", "--vocab_size", 300, "--per_device_train_batch_size", 8]
    return ["--dataset_path", folder, "--output_dir", output, *model, "--do_train", *more]


def test_names_as_labels_and_rows_held_out(run, folder, tmp_path):
    output = tmp_path / "out"
    more = ["--do_eval", "--do_predict", "--validation_share", 0.2, "--num_train_epochs", 8, "--learning_rate", 0.01]
    summary = run(*options(folder, output, *more, "--eval_strategy", "epoch"))
    assert summary["train_samples"] == 64
    assert summary["eval_accuracy"] == summary["test_accuracy"] == 1.0
    assert_complete(output)
    lines = (output / "predictions.tsv").read_text(encoding="utf-8").split()[2:]
    assert lines[1::2] == [row["label"] for row in rows(12, 12)]
    classify = pipeline("text-classification", model=str(output))
    assert [found["label"] for found in classify([row["text"] for row in rows(12, 12)])] == lines[1::2]

    # The saved folder is evaluated on labels that are class indices; one of them is unknown.
    test = pd.DataFrame(rows(12, 12)).replace({"label": {"good": "good", "bad": None}})
    test.to_csv(folder / "test.csv", index=False)
    again = run(
        "--dataset_path", folder, "--model_name_or_path", output, "--output_dir", tmp_path / "two", "--do_predict"
    )
    assert (
        again["test_accuracy"] == 1.0
        and (tmp_path / "two" / "predictions.tsv").read_text(encoding="utf-8").split()[2:] == lines
    )


@pytest.mark.parametrize(
    "more, message",
    [
        (["--validation_share", 1], r"--validation_share 1.0 must be in \[0, 1\)"),
        (["--text_columns", "a", "b", "c"], "--text_columns a b c must be one column, or two columns for pairs"),
        (["--text_columns", "review"], "split train has no column review, only title, text, label"),
        (["--dataset_name", "stanfordnlp/imdb"], "pass one of --dataset_name and --dataset_path"),
    ],
)
def test_invalid_options_are_one_line(run, folder, tmp_path, more, message):
    assert_error(run, message, *options(folder, tmp_path / "out", *more), output=tmp_path / "out")
