import math

import pytest

from tests.examples.runs import write


def test_overlap(script):
    """Weights are log(1 + 1 / count): of `on`, which the passage has twice, log(1.5); of the others log(2)."""
    overlap = script("race_overlap").overlap
    passage = "the cat sat on a mat on friday".split()
    assert overlap(passage, {"sat", "on", "dog"}) == pytest.approx(math.log(2) + math.log(1.5))  # `sat on a`
    assert overlap(passage, {"on", "mat", "friday"}) == pytest.approx(2 * math.log(2) + math.log(1.5))
    assert overlap(passage[:2], {"cat", "dog", "mouse"}) == pytest.approx(
        math.log(2)
    )  # a passage shorter than the window
    assert overlap(passage, {"dog"}) == overlap([], {"dog"}) == 0.0


def test_answers(script, tmp_path):
    article = "Anna lives in Rome. She has a red dog and drinks tea."
    question, right = (
        {"article": article, "question": "Where does Anna live?"},
        ["Paris", "in Rome", "far", "at sea now"],
    )
    other = {"article": article, "question": "What does she drink?"}
    rows = [
        {"example_id": "middle1.txt", **question, "options": right, "answer": "B"},
        {"example_id": "middle2.txt", **other, "options": ["milk", "tea", "oil", "much water"], "answer": "D"},
    ]
    write(rows, tmp_path / "race" / "validation.jsonl")
    summary = script("race_overlap").main(["--dataset_path", str(tmp_path / "race"), "--output_dir", str(tmp_path)])
    assert summary["eval_accuracy"] == summary["eval_middle_accuracy"] == 0.5  # the second is a trap
    assert summary["longest_accuracy"] == 0.5 and summary["shortest_accuracy"] == 0.0
    assert (tmp_path / "summary.json").is_file()
