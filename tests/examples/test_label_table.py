"""Rows without a label: one decision for all splits, file types and scripts."""

import csv
import gzip
import json
import math
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset

from luna_mega import LunaConfig
from luna_mega.training import classification, data
from luna_mega.training.models import CheckpointArguments, label_fields
from tests.examples.rows import COLUMNS
from tests.examples.runs import assert_error

KINDS = ("csv", "jsonl", "parquet")
NAMES = ("None", "NA", "nan", "null", "-1", -1, "01", "1e5", "True", "a\nb", "a\tb", ' "a" ')
UNKNOWN = ("None", "NA", "nan", "-1", -1, "", None, math.nan)


def save(labels: list, path) -> None:
    """Write rows with a text and these labels in the format of the suffix."""
    path.parent.mkdir(exist_ok=True)
    rows = [{"text": f"text {index}", "label": label} for index, label in enumerate(labels)]
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        rows = [row | {"label": None if row["label"] != row["label"] else row["label"]} for row in rows]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)


def match(folder, names: list[str] | None = None) -> dict[str, list[int]]:
    """Return the numbers of the labels of each split, for a head with these names or for a new model."""
    splits = data.load_files(data.find_files(str(folder)))
    model = CheckpointArguments()
    if names:
        place = folder.with_name(f"{folder.name}-model")
        LunaConfig(**label_fields(names)).save_pretrained(place)
        model.model_name_or_path = str(place)
    training = SimpleNamespace(do_train="train" in splits)
    outputs = classification.match_labels(model, classification.class_names(splits, "label"), training).outputs
    return {name: classification.class_numbers(split, "label", outputs, name)[1] for name, split in splits.items()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_names_of_classes(name, kind, tmp_path):
    """A name of the training data is a class; only empty fields have no label."""
    other = 1 if name == -1 else "other"
    labels = [name, other, name]
    for split in ("train", "validation", "test"):
        save(labels if split == "train" else [*labels, None], tmp_path / f"{split}.{kind}")
    first = 0 if str(name) == min(str(name), str(other)) else 1
    numbers = [first, 1 - first, first]
    assert match(tmp_path) == {"train": numbers, "validation": numbers, "test": [*numbers, -100]}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unknown", UNKNOWN, ids=repr)
def test_names_that_are_no_class(unknown, kind, tmp_path, capsys):
    """A name that is not a class of the model means no label, and a line counts the rows."""
    numbers = isinstance(unknown, int | float)
    labels = [0, unknown, 1] if numbers else ["bad", unknown, "good"]
    for split in ("validation", "test"):
        save(labels, tmp_path / f"{split}.{kind}")
    assert match(tmp_path, ["0", "1"] if numbers else ["bad", "good"]) == {"validation": [0, 1], "test": [0, -100, 1]}
    lines = capsys.readouterr().out.splitlines()
    counts = "split {}: 1 of 3 rows have no label"
    assert sorted(lines) == [counts.format("test"), f"{counts.format('validation')} and are left out"]
    assert match(tmp_path, ["LABEL_0", "LABEL_1"])["test"] == [0, -100, 1]
    save(labels, tmp_path / f"train.{kind}")
    message = r"(split train, row 1: label .* is not one of|has the labels .*, but not)"
    assert_error(match, message, tmp_path, ["0", "1"] if numbers else ["bad", "good"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unknown", UNKNOWN, ids=repr)
def test_ids_of_a_task(unknown, kind, tmp_path):
    """GLUE and the Long Range Arena name the ids of their columns."""
    numbers = isinstance(unknown, int | float)
    save([1, unknown, 0] if numbers else ["1", unknown, "0"], tmp_path / f"train.{kind}")
    split = data.load_files(data.find_files(str(tmp_path)))["train"]
    options = [split, "label", {"no": 1, "yes": 0}]
    rows, found = classification.class_numbers(*options, "validation", ("no", "yes"))
    assert found == [0, 1] and rows["text"][:] == ["text 0", "text 2"]
    message = "split train, row 1: label .* is not one of no, yes; 1 of 3 rows have no label, remove them"
    assert_error(classification.class_numbers, message, *options, "train", ("no", "yes"))


def test_ids_of_a_class_label(capsys):
    """-1 is no label, also if a class has that name."""
    split = Dataset.from_dict({"label": [0, -1, 1]}).cast_column("label", ClassLabel(names=["-1", "1"]))
    assert classification.class_numbers(split, "label", {"-1": 0, "1": 1}, "test")[1] == [0, -100, 1]
    assert capsys.readouterr().out == "split test: 1 of 3 rows have no label\n"


@pytest.mark.parametrize("kind", KINDS)
def test_integers_with_empty_fields(kind, tmp_path):
    """Such columns contain floating-point numbers."""
    save([10, 9, 9], tmp_path / f"train.{kind}")
    save([9.0, None, 10.0], tmp_path / f"test.{kind}")
    assert match(tmp_path) == {"train": [1, 0, 0], "test": [0, -100, 1]}


@pytest.mark.parametrize("label", [["a", "b"], {"name": "a"}], ids=["list", "struct"])
def test_lists_as_labels(label):
    split = Dataset.from_dict({"text": ["a"], "label": [label]})
    message = r"split train, row 0: label .* is not a name or a number; each row has one label"
    assert_error(classification.class_names, message, {"train": split}, "label")
    assert_error(classification.class_numbers, message, split, "label", {"a": 0}, "train")


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unknown", [*UNKNOWN, "good"], ids=repr)
def test_scores(unknown, kind, tmp_path):
    save([0.5, unknown, 2] if isinstance(unknown, int | float) else ["0.5", unknown, "2"], tmp_path / f"train.{kind}")
    split = data.load_files(data.find_files(str(tmp_path)))["train"]
    if unknown == "good":
        assert_error(classification.read_scores, "row 1: label 'good' is not a number", split, "test")
    else:
        assert classification.read_scores(split, "validation")[1] == [0.5, 2.0]
        message = "split train, row 1: label .* is not a number; 1 of 3 rows have no label, remove them"
        assert_error(classification.read_scores, message, split, "train")


def test_columns_of_csv_files(tmp_path):
    """They keep their text; the splits may have different columns, and be folders."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.csv").write_text("text,label\n007,01\nNA,None\n,\n", encoding="utf-8")
    (tmp_path / "test.csv").write_text("text\n1.50\n", encoding="utf-8")
    arguments = data.SourceArguments(dataset_path=str(tmp_path))
    splits = data.load_splits({"train": None, "test": None}, arguments)
    assert splits["train"][:] == {"text": ["007", "NA", None], "label": ["01", "None", None]}
    assert splits["test"][:] == {"text": ["1.50"]}


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_headers_of_csv_files(tmp_path, suffix):
    """Byte order marks, empty names and repeated names are read as by pandas."""
    content = "\ufeff,a,a\n1,01,2\n".encode()
    (tmp_path / f"train.{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    rows = data.load_files(data.find_files(str(tmp_path)))["train"][:]
    assert rows["Unnamed: 0"] == ["1"] and rows["a"] == ["01"]


def test_lines_of_predictions(tmp_path):
    names = ["a\nb", "a\tb", "a\u2028b", "c"]
    output = SimpleNamespace(predictions=np.eye(4), metrics={})
    trainer = SimpleNamespace(
        predict=lambda split: output,
        model=SimpleNamespace(config=LunaConfig(**label_fields(names))),
        args=SimpleNamespace(output_dir=str(tmp_path)),
        is_world_process_zero=lambda: True,
        log_metrics=lambda *_: None,
        save_metrics=lambda *_: None,
    )
    classification.write_predictions(trainer, None)
    lines = (tmp_path / "predictions.tsv").read_text(encoding="utf-8").splitlines()
    assert lines == ["index\tprediction", "0\ta\\nb", "1\ta\\tb", "2\ta\\u2028b", "3\tc"]


IMAGES = ["--model_type", "mega", "--patch_size", 4]
# Labels and options of each script; the labels are a class, an unknown one (not in the split train) and the other.
SCRIPTS = {
    "run_glue": ([0, -1, 1], ["--task_name", "rte", "--max_seq_length", 16]),
    "run_text_classification": (["x", None, "y"], ["--max_seq_length", 16]),
    "run_audio": (["x", "", "y"], []),
    "run_image_classification": ([0.0, math.nan, 1.0], IMAGES),
    "run_race": (["A", "NA", "B"], ["--max_seq_length", 16]),
    "lra.run_lra": ([0, -1, 1], ["--task_name", "text", "--max_seq_length", 16]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name, script, tmp_path, capsys):
    """Each script evaluates the rows with a label, and says how many have none."""
    labels, options = SCRIPTS[name]
    column = "answer" if name == "run_race" else "label"
    for split in ("train", "validation", "test"):
        rows = [COLUMNS[name] | {column: label} for label in (labels[::2] if split == "train" else labels)]
        Dataset.from_list(rows).to_parquet(tmp_path / f"{split}.parquet")
    options = ["--do_train", "--do_eval", "--do_predict", "--output_dir", tmp_path / "out", "--use_cpu", *options]
    if name in ("run_glue", "run_text_classification", "run_race"):
        options += ["--vocab_size", 300]
    module = script(name)
    parsed = module.parse([str(option) for option in ["--dataset_path", tmp_path, *options]])
    splits = next(part for part in module.load_data(*parsed[:3]) if isinstance(part, dict))
    found = {split: [int(row.get("labels", row.get("label", -100))) for row in rows] for split, rows in splits.items()}
    test = [-100] * 3 if name == "run_glue" else [0, -100, 1]  # GLUE does not publish the labels of test splits
    assert found == {"train": [0, 1], "validation": [0, 1], "test": test}
    assert capsys.readouterr().out.count("1 of 3 rows have no label") == 2 - (name == "run_glue")
