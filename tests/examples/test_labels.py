"""Labels: a table means the same in all formats and scripts, and a saved head keeps its names and their order."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import ClassLabel, Dataset
from hypothesis import given, strategies as st
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
)

import luna_mega
from luna_mega import LunaConfig
from luna_mega.training import classification, data
from luna_mega.training.classification import match_labels
from luna_mega.training.models import CheckpointArguments, label_fields, make_model
from tests.examples.contract import BERT, CLASSIFIERS, SCRIPTS
from tests.examples.runs import QUIET, assert_error, write

SIZES = {name: int(value) for name, value in (item.split("=") for item in BERT.split(","))}
KINDS = ("csv", "jsonl", "parquet")
WORDS = ["a\nb", "a\tb", ' "a" ', *"None NA nan null -1 01 1e5 True bad good Good 10 9".split()]
NUMBERS = [-1, 0, 1, 2, 9, 10]
NO_LABEL = ["None", "NA", "nan", "-1", "N/A", "", None]


def save(labels: list, path: Path) -> None:
    """Write rows with a text and these labels in the format of the suffix."""
    write([{"text": f"text {index}", "label": label} for index, label in enumerate(labels)], path)


def match(folder: Path, names: list[str] | None = None) -> dict[str, list[int]]:
    """Return the numbers of the labels of each split, for a head with these names or for a new model."""
    splits = data.load_files(data.find_files(str(folder)))
    model = CheckpointArguments()
    if names:
        place = folder.with_name(f"{folder.name}-model")
        LunaConfig(**label_fields(names)).save_pretrained(place)
        model.model_name_or_path = str(place)
    training = SimpleNamespace(do_train="train" in splits)
    outputs = match_labels(model, classification.class_names(splits, "label"), training).outputs
    return {name: classification.class_numbers(split, "label", outputs, name)[1] for name, split in splits.items()}


@st.composite
def tables(draw) -> tuple[str, list, list]:
    """Return a format, labels of classes, and rows of classes and of labels that are no class."""
    kind, values = draw(st.sampled_from(KINDS)), draw(st.sampled_from((WORDS, NUMBERS)))
    classes = draw(st.lists(st.sampled_from(values), min_size=2, max_size=4, unique=True))
    missing = [None, math.nan, -1] if values is NUMBERS else NO_LABEL
    missing = [label for label in missing if label not in classes]
    rows = draw(st.lists(st.sampled_from([*classes, *missing]), min_size=1, max_size=4))
    return kind, classes, [classes[0], *rows]


@given(table=tables())
def test_tables(tmp_path_factory, capsys, table):
    """Names of the training data are classes, sorted as numbers if all are; others, and empty fields, are no label."""
    kind, classes, rows = table
    folder = tmp_path_factory.mktemp("table") / "data"
    save([*classes, classes[0]], folder / f"train.{kind}")
    for split in ("validation", "test"):
        save(rows, folder / f"{split}.{kind}")
    names = sorted(map(str, classes))
    if all(re.fullmatch("-?[0-9]+", name) for name in names):
        names.sort(key=int)
    numbers = [names.index(str(label)) if label in classes else -100 for label in rows]
    labeled = [number for number in numbers if number >= 0]
    trained = [names.index(str(label)) for label in [*classes, classes[0]]]
    capsys.readouterr()
    assert match(folder) == {"train": trained, "validation": labeled, "test": numbers}
    count = f"{len(numbers) - len(labeled)} of {len(numbers)} rows have no label"
    expected = [f"split validation: {count} and are left out", f"split test: {count}"] * (labeled != numbers)
    assert sorted(x for x in capsys.readouterr().out.splitlines() if x.startswith("split")) == sorted(expected)

    # the same rows for a saved head with these names, in the reversed order
    (folder / f"train.{kind}").unlink()
    again = match(folder, names[::-1])
    assert again["test"] == [number if number < 0 else len(names) - 1 - number for number in numbers]
    if labeled != numbers:
        save(rows, folder / f"train.{kind}")
        message = "(split train, row .*: label .* is not one of|has the labels .*, but not)"
        assert_error(match, message, folder, names)


@given(ids=st.lists(st.sampled_from([0, 1, *NO_LABEL]), min_size=1, max_size=5), kind=st.sampled_from(KINDS))
def test_ids_of_a_task(tmp_path_factory, ids, kind):
    """GLUE and the Long Range Arena name the ids of their columns; a regression has the same rows without a label."""
    is_text = any(isinstance(label, str) for label in ids)
    folder, rows = tmp_path_factory.mktemp("table"), [0, *ids]
    save([str(label) if is_text and label is not None else label for label in rows], folder / f"train.{kind}")
    split = data.load_files(data.find_files(str(folder)))["train"]
    kept = [index for index, label in enumerate(rows) if label in (0, 1)]
    options = [split, "label", {"no": 1, "yes": 0}]
    found, numbers = classification.class_numbers(*options, "validation", ("no", "yes"))
    assert numbers == [1 - rows[index] for index in kept] and found["text"][:] == [f"text {index}" for index in kept]
    found, scores = classification.read_scores(split, "validation")
    assert scores == [float(rows[index]) for index in kept] and len(found) == len(kept)
    if len(kept) < len(rows):
        advice = f"{len(rows) - len(kept)} of {len(rows)} rows have no label, remove them"
        message = f"split train, row .: label .* is not one of no, yes; {advice}"
        assert_error(classification.class_numbers, message, *options, "train", ("no", "yes"))
        message = f"split train, row .: label .* is not a number; {advice}"
        assert_error(classification.read_scores, message, split, "train")


def test_other_labels(capsys):
    """-1 is no label, also if a class of a `ClassLabel` has that name; a score and a label have one value."""
    split = Dataset.from_dict({"label": [0, -1, 1]}).cast_column("label", ClassLabel(names=["-1", "1"]))
    assert classification.class_numbers(split, "label", {"-1": 0, "1": 1}, "test")[1] == [0, -100, 1]
    assert capsys.readouterr().out == "split test: 1 of 3 rows have no label\n"
    for label in ([["a", "b"]], [{"name": "a"}]):
        split = Dataset.from_dict({"text": ["a"], "label": label})
        message = r"split train, row 0: label .* is not a name or a number; each row has one label"
        assert_error(classification.class_names, message, {"train": split}, "label")
        assert_error(classification.class_numbers, message, split, "label", {"a": 0}, "train")
    for label in ("good", "inf"):
        split = Dataset.from_dict({"label": ["0.5", label]})
        assert_error(classification.read_scores, f"row 1: label '{label}' is not a number", split, "test")


def rows_of(name: str, labels: list) -> list[dict]:
    """Return rows of a script with these labels; RTE has two texts."""
    row = SCRIPTS[name].rows(1, 0)[0]
    return [row | dict.fromkeys(("sentence1", "sentence2"), "a b") | {SCRIPTS[name].label: x} for x in labels]


# The label of a class, of no class, and of the other class, as the data leave them.
LEFT = {
    "run_glue": [0, -1, 1],
    "run_text_classification": ["x", None, "y"],
    "run_audio": ["x", "", "y"],
    "run_image_classification": [0.0, math.nan, 1.0],
    "run_race": ["A", "NA", "B"],
    "lra.run_lra": [0, -1, 1],
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scripts(name, script, tmp_path, capsys):
    """Each script evaluates the rows with a label, and says how many have none."""
    for split in ("train", "validation", "test"):
        labels = LEFT[name][::2] if split == "train" else LEFT[name]
        Dataset.from_list(rows_of(name, labels)).to_parquet(tmp_path / f"{split}.parquet")
    row, task = SCRIPTS[name], ["--task_name", "rte"] * (name == "run_glue")
    paths = ["--dataset_path", tmp_path, "--output_dir", tmp_path / "out", *QUIET]
    options = [*row.data, *row.short, *task, *row.model, *paths, "--do_train", "--do_eval", "--do_predict"]
    module = script(name)
    splits = module.load_data(*module.parse([*map(str, options)])[:3])[0]
    found = {split: [int(one.get("labels", -100)) for one in rows] for split, rows in splits.items()}
    test = [-100] * 3 if name == "run_glue" else [0, -100, 1]  # GLUE does not publish the labels of test splits
    assert found == {"train": [0, 1], "validation": [0, 1], "test": test}
    assert capsys.readouterr().out.count("1 of 3 rows have no label") == 2 - (name == "run_glue")


EVALUATED = {  # the labels of a head and of the data -> the outputs of the latter, or the sentence
    "a subset": (["a", "b", "c"], ["c", "a"], {"c": 2, "a": 0}),
    "no labels": (["a", "b"], [], {}),
    "names in another case": (["BAD", "good"], ["Good", "bad"], {"Good": 1, "bad": 0}),
    "names that differ in case": (["A", "a"], ["a"], {"a": 1}),
    "ids": (["LABEL_0", "LABEL_1", "LABEL_2"], ["0", "2"], {"0": 0, "2": 2}),
    "ids of pandas": (["LABEL_0", "LABEL_1"], ["-1.0", "1.0"], {"1.0": 1}),  # other rows of the column are empty
    "numbers of pandas": (["0", "1"], ["-1.0", "1.0"], {"1.0": 1}),
    "default names": (["LABEL_0", "LABEL_1"], ["LABEL_1", "LABEL_0"], {"LABEL_1": 1, "LABEL_0": 0}),
    "ids of names": (["a", "b"], ["0", "1"], "has the labels a, b, but not 0, 1 of the data; rename the latter"),
    "fewer names": (["LABEL_0", "LABEL_1", "LABEL_2"], ["a", "b"], "3 labels without names, but the data has 2: a, b"),
    "no names": (["LABEL_0", "LABEL_1"], ["bad", "good"], {"bad": 0, "good": 1}),
}
TRAINED = {  # the same for a training; with --ignore_mismatched_sizes, the head has the labels of the data
    "other names": (["bad", "other"], ["bad", "good"], "but not good of the data; pass --ignore_mismatched_sizes to t"),
    "no names, trained": (["LABEL_0", "LABEL_1"], ["bad", "good"], {"bad": 0, "good": 1}),
}


@pytest.mark.parametrize("case", [*EVALUATED, *TRAINED])
def test_labels_of_a_head(case, tmp_path, capsys):
    """A head keeps its names and their order; names that it does not have are an error, or need a new head."""
    own, names, expected = (EVALUATED | TRAINED)[case]
    LunaConfig(**label_fields(own)).save_pretrained(tmp_path)
    training, arguments = SimpleNamespace(do_train=case in TRAINED), CheckpointArguments(str(tmp_path))
    if isinstance(expected, str):
        assert_error(match_labels, expected, arguments, names, training)
    else:
        labels = match_labels(arguments, names, training)
        assert labels.names == (names if case.startswith("no names") else own)
        assert {name: labels.outputs[name] for name in expected} == expected
        assert ("has no label names" in capsys.readouterr().out) == (case == "no names")
    if case == "other names":
        arguments.ignore_mismatched_sizes = True
        assert match_labels(arguments, names, training) == (names, {"bad": 0, "good": 1})
        assert "are replaced by a new head for bad, good" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["luna", "pair", "bert"])
def test_new_head_of_the_same_size(kind, tmp_path):
    """A new head replaces only the output layer, whether or not its size changes."""
    config = (BertConfig if kind == "bert" else LunaConfig)(vocab_size=20, **SIZES, **label_fields(["a", "b", "c"]))
    auto = luna_mega.LunaForSequencePairClassification if kind == "pair" else AutoModelForSequenceClassification
    saved = make_model(auto, CheckpointArguments(), config)
    saved.save_pretrained(tmp_path)
    for names, labels in ((["a", "b", "d"], "new"), (["c", "b", "a"], "same"), (["x", "y"], "fewer")):
        arguments = CheckpointArguments(str(tmp_path), ignore_mismatched_sizes=True)
        config = AutoConfig.from_pretrained(tmp_path)
        config.update(label_fields(names))
        made = make_model(auto, arguments, config).state_dict()
        changed = {name for name, value in saved.state_dict().items() if not torch.equal(made[name], value)}
        assert len(changed) == {"same": 0, "new": 1, "fewer": 2}[labels]  # the bias is initialized to 0
        assert all(name.startswith("classifier") and len(made[name]) == len(names) for name in changed)
