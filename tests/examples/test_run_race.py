"""run_race.py: inputs equal those of fairseq; levels, limits and unknown answers."""

import re

import pandas as pd
import pytest

from luna_mega.training.tokenizers import train_bpe
from tests.examples.contract import SCRIPTS, questions as race_rows
from tests.examples.runs import assert_error, write

RUN = ["run_race", *SCRIPTS["run_race"].short]
NEW = ["--do_train", *SCRIPTS["run_race"].model]
BOS, EOS = 0, 2


def csqa_rows(size: int, seed: int, answers: bool = True) -> list[dict]:
    """Return the questions with a fifth option, in the format of CommonsenseQA."""
    examples = []
    for index, row in enumerate(race_rows(size, seed)):
        choices = {"label": list("ABCDE"), "text": [*row["options"], "bad red"]}
        example = {"id": f"{index:04x}", "question": row["question"], "choices": choices}
        examples.append(example | {"answerKey": row["answer"] if answers else ""})
    return examples


@pytest.fixture
def tokenizer():
    texts = [text for row in race_rows(40, seed=1) for text in (row["article"], row["question"], *row["options"])]
    return train_bpe([*texts, "Q: A: What is"], vocab_size=400, model_max_length=512)


def encode(script, tokenizer, examples: list[dict], name: str, **options) -> list[list[list[int]]]:
    module = script("run_race")
    data = module.DataArguments(task_name=name, **options)
    return module.encode_split(module.Dataset.from_list(examples), "train", tokenizer, data)["input_ids"]


def fairseq_race(row: dict, tokenizer, max_option_length: int, max_positions: int) -> list[list[int]]:
    """Return the inputs of preprocess_RACE.py, the BPE encoder, fairseq-preprocess and the ranking task in turn."""

    def binarize(line: str) -> list[int]:
        return tokenizer.encode(line.strip(), add_special_tokens=False) + [EOS]

    passage = [EOS] + binarize(re.sub(r"\s+", " ", row["article"].replace("\n", " ")))
    inputs = []
    for option in row["options"]:
        if "_" in row["question"]:
            merged = row["question"].replace("_", option)
        else:
            merged = " ".join([row["question"], option])
        merged = [BOS] + binarize(re.sub(r"\s+", " ", merged))
        inputs.append((merged[:max_option_length] + passage)[:max_positions])
    return inputs


@pytest.mark.parametrize(("option_length", "length"), [(128, 512), (9, 512), (8, 40), (128, 12), (5, 5)])
def test_race_inputs_equal_fairseq(option_length, length, script, tokenizer):
    examples = race_rows(30, seed=2)
    inputs = encode(script, tokenizer, examples, "race", max_option_length=option_length, max_seq_length=length)
    assert inputs == [fairseq_race(row, tokenizer, option_length, length) for row in examples]


def test_csqa_inputs_equal_fairseq(script, tokenizer):
    """Inputs are never truncated."""

    def binarize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False) + [EOS]

    examples = csqa_rows(20, seed=2)
    expected = [
        [[BOS] + binarize("Q: " + row["question"]) + binarize("A: " + text) for text in row["choices"]["text"]]
        for row in examples
    ]
    assert encode(script, tokenizer, examples, "csqa") == expected
    message = r"an input has \d\d tokens, above --max_seq_length 12"
    assert_error(lambda: encode(script, tokenizer, examples, "csqa", max_seq_length=12), message)


def test_options_that_truncation_makes_equal(script, tokenizer, capsys):
    """They are counted in one line; options that are equal in the data are not."""
    rows = race_rows(6, seed=0)
    for row in rows:
        row["question"] = "red blue green black"
    rows[1]["options"] = ["red"] * 4
    rows[2] |= {"question": "_", "options": ["red", "blue", "green", "black"]}
    encode(script, tokenizer, rows, "race")
    assert capsys.readouterr().out == ""
    encode(script, tokenizer, rows, "race", max_option_length=5)
    line = "split train: truncation makes options equal in 4 of 6 questions; "
    assert capsys.readouterr().out == f"{line}raise --max_option_length 5 or --max_seq_length 512\n"


@pytest.mark.parametrize("limit, middle, high", [(2, 1, 1), (7, 4, 3), (20, 15, 5), (100, 24, 5)])
@pytest.mark.parametrize("folders", [1, 2])
def test_limited_rows_of_each_level(folders, limit, middle, high, script, tmp_path):
    levels = race_rows(24, seed=0), race_rows(5, seed=1, level="high")
    parts = levels if folders == 2 else [levels[0] + levels[1]]
    paths = [str(write(rows, tmp_path / f"{part}" / "test.jsonl")) for part, rows in enumerate(parts)]
    module = script("run_race")
    split = module.load_split("test", module.TASKS["race"], module.DataArguments(dataset_path=paths), limit)
    names = [row["example_id"] for level, count in zip(levels, (middle, high), strict=True) for row in level[:count]]
    assert split["example_id"][:] == names


def test_csqa_with_unknown_test_answers(run, tmp_path):
    for split, size in (("train", 12), ("validation", 6), ("test", 6)):
        write(csqa_rows(size, seed=size, answers=split != "test"), tmp_path / "csqa" / f"{split}.jsonl")
    paths = ["--task_name", "csqa", "--dataset_path", tmp_path / "csqa", "--output_dir", tmp_path / "out"]
    summary = run(*paths, *NEW, "--do_eval", "--do_predict", "--max_steps", 1)
    assert 0 <= summary["eval_accuracy"] <= 1
    assert not {"test_loss", "test_accuracy"} & summary.keys()
    table = pd.read_csv(tmp_path / "out" / "predictions.tsv", sep="\t", dtype=str)
    assert table["id"].tolist() == [f"{index:04x}" for index in range(6)]
    assert set(table["prediction"]) <= set("ABCDE")


def test_two_levels(run, tmp_path):
    """Accuracies of the levels, also if the test set has only one of them."""
    middle = SCRIPTS["run_race"].write(tmp_path / "middle", train=48, validation=24, test=9)
    for split in ("train", "validation"):
        high = write(race_rows(8, 8, "high"), tmp_path / "high" / f"{split}.parquet")
    summary = run("--dataset_path", middle, high, "--output_dir", tmp_path / "out", *NEW, "--do_eval", "--max_steps", 1)
    assert summary["train_samples"] == 56
    first, second = (summary[f"eval_{level}_accuracy"] for level in ("middle", "high"))
    assert summary["eval_accuracy"] == pytest.approx((24 * first + 8 * second) / 32)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "on the middle and high dataset" in card and "- High Accuracy: " in card
    again = ["--dataset_path", middle, "--output_dir", tmp_path / "again", "--do_eval", "--do_predict"]
    again = run(*again, "--model_name_or_path", tmp_path / "out")
    assert again["eval_middle_accuracy"] == again["eval_accuracy"] == pytest.approx(first)
    assert again["test_middle_accuracy"] == again["test_accuracy"] and "eval_high_accuracy" not in again
    table = pd.read_csv(tmp_path / "again" / "predictions.tsv", sep="\t")
    assert table.columns.tolist() == ["index", "example_id", "prediction"]
    assert table["example_id"].tolist() == [row["example_id"] for row in race_rows(9, seed=4)]
    lists = write([row | {"options": [[1]] * 4} for row in race_rows(2, 0)], tmp_path / "lists" / "train.jsonl")
    message = "split train of the folders has different columns"
    assert_error(run, message, "--dataset_path", middle, lists, "--output_dir", tmp_path / "other", *NEW)
