"""The baseline of text classification learns from words, compares pairs, and requires labels."""

import random

import pytest

from tests.examples.runs import assert_error, sentence, write


def rows(size: int, seed: int) -> list[dict]:
    draw = random.Random(seed)
    return [{"text": sentence(good, draw), "label": int(good)} for good in (draw.random() < 0.5 for _ in range(size))]


def pairs(size: int, seed: int, score: bool) -> list[dict]:
    draw = random.Random(seed)
    found = []
    for _ in range(size):
        first, same = sentence(True, draw), draw.random() < 0.5
        found.append({"text": first, "other": first if same else "nothing in common here", "label": int(same)})
    return [row | {"label": row["label"] * 4.5 + 0.5} for row in found] if score else found


@pytest.mark.parametrize("kind", ["texts", "pairs", "scores"])
def test_baseline(script, tmp_path, kind):
    for split, size in (("train", 40), ("validation", 20)):
        made = rows(size, size) if kind == "texts" else pairs(size, size, kind == "scores")
        write(made, tmp_path / "data" / f"{split}.jsonl")
    columns = ["text"] if kind == "texts" else ["text", "other"]
    metrics = script("bag_of_words").main(["--dataset_path", str(tmp_path / "data"), "--text_columns", *columns])
    if kind == "scores":
        assert metrics["pearson"] > 0.99 and metrics["spearmanr"] > 0.7
    else:
        assert metrics["accuracy"] == metrics["f1"] == metrics["matthews_correlation"] == 1.0


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([("a film", 0), ("a book", 1)], [("a film", -1)], "--split test: rows of this split .* have no label"),
        ([("a film", 0), ("a book", 0)], [("a film", 0)], "at least 2 classes"),
        ([("!", 0), ("?", 1)], [("!", 0)], "empty vocabulary"),
    ],
)
def test_data_without_a_baseline(script, tmp_path, train, test, message):
    for name, pairs in (("train", train), ("test", test)):
        write([{"text": text, "label": label} for text, label in pairs], tmp_path / "data" / f"{name}.jsonl")
    options = ["--dataset_path", str(tmp_path / "data"), "--split", "test"]
    assert_error(script("bag_of_words").main, message, options)
