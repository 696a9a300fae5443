import random
import re
from pathlib import Path

import pandas as pd
import pytest

from luna_mega.training.tokenizers import train_bpe
from tests.examples import runs
from tests.examples.contract import COLORS as WORDS, questions as race_rows
from tests.examples.runs import assert_error, write, write_splits

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
RUN = ["run_race", "--max_seq_length", 48]
TINY = f"{runs.TINY},dropout=0.0,attention_dropout=0.0"
BOS, EOS = 0, 2


def csqa_rows(size: int, seed: int, answers: bool = True) -> list[dict]:
    draw = random.Random(seed)
    examples = []
    for index in range(size):
        label = draw.randrange(5)
        texts = [f"{'good' if option == label else 'bad'} {draw.choice(WORDS)}" for option in range(5)]
        choices = {"label": list("ABCDE"), "text": texts}
        row = {"question": f"What  is {draw.choice(WORDS)} ?", "choices": choices}
        examples.append({"id": f"{index:04x}", **row, "answerKey": "ABCDE"[label] if answers else ""})
    return examples


@pytest.fixture
def race(tmp_path):
    return write_splits(race_rows, tmp_path / "middle", train=48, validation=24, test=9)


@pytest.fixture
def csqa(tmp_path):
    for split, size in (("train", 48), ("validation", 24), ("test", 6)):
        write(csqa_rows(size, seed=size, answers=split != "test"), tmp_path / "csqa" / f"{split}.jsonl")
    return tmp_path / "csqa"


@pytest.fixture
def tokenizer(script):
    texts = [text for row in race_rows(40, seed=1) for text in (row["article"], row["question"], *row["options"])]
    return train_bpe([*texts, "Q: A: What is"], vocab_size=400, model_max_length=512)


def scratch(data: Path, output: Path, task: str = "race") -> list:
    return [
        *(
            "--task_name",
            task,
            "--dataset_path",
            data,
            "--output_dir",
            output,
            "--do_train",
            "--config_overrides",
            TINY,
        ),
        *("--vocab_size", 300, "--per_device_train_batch_size", 8),
    ]


def encode(script, tokenizer, examples: list[dict], name: str, **options) -> list[list[list[int]]]:
    module = script("run_race")
    data = module.DataArguments(task_name=name, **options)
    split = module.Dataset.from_list(examples)
    return module.encode_split(split, "train", tokenizer, data)["input_ids"]


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


@pytest.mark.parametrize(
    ("option_length", "length"), [(128, 512), (9, 512), (8, 40), (128, 12), (5, 5)], ids=lambda value: str(value)
)
def test_race_inputs_equal_fairseq(option_length, length, script, tokenizer):
    examples = race_rows(30, seed=2)
    inputs = encode(script, tokenizer, examples, "race", max_option_length=option_length, max_seq_length=length)
    assert inputs == [fairseq_race(row, tokenizer, option_length, length) for row in examples]


def test_race_truncation(script, tokenizer):
    row = {**race_rows(1, seed=0)[0], "question": "red " * 300, "article": "blue " * 900}
    red, blue = (tokenizer.encode(color, add_special_tokens=False)[0] for color in ("red", "blue"))
    for option in encode(script, tokenizer, [row], "race")[0]:
        assert option == [BOS, *[red] * 127, EOS, *[blue] * 383]  # truncation drops the </s> of both texts


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
    data = script("run_race").DataArguments(
        dataset_path=[str(write(rows, tmp_path / f"{part}" / "test.jsonl")) for part, rows in enumerate(parts)]
    )
    split = script("run_race").load_split("test", script("run_race").TASKS["race"], data, limit)
    names = [row["example_id"] for level, count in zip(levels, (middle, high), strict=True) for row in level[:count]]
    assert split["example_id"][:] == names


def test_csqa_inputs_equal_fairseq(script, tokenizer):
    examples = csqa_rows(20, seed=2)

    def binarize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False) + [EOS]

    expected = [
        [[BOS] + binarize("Q: " + row["question"]) + binarize("A: " + text) for text in row["choices"]["text"]]
        for row in examples
    ]
    assert encode(script, tokenizer, examples, "csqa") == expected
    text = tokenizer.decode(expected[0][0])
    assert re.fullmatch(r"<s> Q: What  is \w+ \?</s> A: (good|bad) \w+</s>", text), text


def test_csqa_is_never_truncated(script, tokenizer):
    with pytest.raises(SystemExit, match=r"an input has \d\d tokens, above --max_seq_length 12"):
        encode(script, tokenizer, csqa_rows(1, seed=0), "csqa", max_seq_length=12)


def test_csqa_with_unknown_test_answers(run, csqa, tmp_path):
    summary = run(*scratch(csqa, tmp_path / "out", "csqa"), "--do_eval", "--do_predict", "--max_steps", 2)
    assert 0 <= summary["eval_accuracy"] <= 1
    assert not {"test_loss", "test_accuracy"} & summary.keys()
    table = pd.read_csv(tmp_path / "out" / "predictions.tsv", sep="\t", dtype=str)
    assert table["id"].tolist() == [f"{index:04x}" for index in range(6)]
    assert set(table["prediction"]) <= set("ABCDE")


@pytest.mark.slow
def test_gradient_checkpointing_and_accumulation_change_nothing(run, race, tmp_path):
    arguments = ["--max_steps", 2, "--save_strategy", "no", "--do_eval"]
    plain = run(*scratch(race, tmp_path / "plain"), *arguments)
    split = ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 4, "--gradient_checkpointing", "true"]
    summary = run(*scratch(race, tmp_path / "split"), *arguments, *split)
    assert summary["eval_loss"] == pytest.approx(plain["eval_loss"], abs=1e-5)


RACE_ROW = {"example_id": "middle1.txt", "article": "a", "question": "b", "options": list("wxyz"), "answer": "A"}
CSQA_ROW = {"id": "1", "question": "a", "choices": {"label": list("ABCDE"), "text": list("vwxyz")}, "answerKey": "A"}
DATA_ERRORS = {
    "three options": (RACE_ROW, {"options": list("abc")}, "row 1: 3 options instead of 4"),
    "options as text": (RACE_ROW, {"options": "abcd"}, "instead of a list of texts"),
    "answer out of range": (RACE_ROW, {"answer": "E"}, "row 1: label 'E' is not one of A, B, C, D"),
    "four choices": (CSQA_ROW, {"choices": {"label": list("ABCD"), "text": list("wxyz")}}, "4 options instead of 5"),
    "other labels": (CSQA_ROW, {"choices": {"label": list("abcde"), "text": list("vwxyz")}}, "are called"),
    "unknown key": (CSQA_ROW, {"answerKey": "F"}, "row 1: label 'F' is not one of A, B, C, D, E"),
}


@pytest.mark.parametrize("case", DATA_ERRORS)
def test_invalid_data_is_one_line(case, run, tmp_path):
    row, change, message = DATA_ERRORS[case]
    first = {**row, **change} if case == "options as text" else row  # all rows of a column must have the same type
    folder = write([first, {**row, **change}], tmp_path / "data" / "train.jsonl")
    assert_error(run, message, *scratch(folder, tmp_path / "out", "csqa" if row is CSQA_ROW else "race"))


def test_two_levels(run, race, tmp_path):
    """Accuracies of the levels, also if the test set has only one of them."""
    high = write_splits(lambda size, seed: race_rows(size, seed, "high"), tmp_path / "high", train=8, validation=8)
    arguments = scratch(race, tmp_path / "out")
    arguments.insert(arguments.index(race) + 1, high)
    summary = run(*arguments, "--do_eval", "--max_steps", 1)
    assert summary["train_samples"] == 56
    middle, high = (summary[f"eval_{level}_accuracy"] for level in ("middle", "high"))
    assert summary["eval_accuracy"] == pytest.approx((24 * middle + 8 * high) / 32)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "on the middle and high dataset" in card and "- High Accuracy: " in card
    again = ["--dataset_path", race, "--output_dir", tmp_path / "again", "--do_eval", "--do_predict"]
    again = run(*again, "--model_name_or_path", tmp_path / "out")
    assert again["eval_middle_accuracy"] == again["eval_accuracy"] == pytest.approx(middle)
    assert again["test_middle_accuracy"] == again["test_accuracy"] and "eval_high_accuracy" not in again
    table = pd.read_csv(tmp_path / "again" / "predictions.tsv", sep="\t")
    assert table.columns.tolist() == ["index", "example_id", "prediction"]
    assert table["example_id"].tolist() == [row["example_id"] for row in race_rows(9, seed=9)]
    number = write([{**RACE_ROW, "options": [[1]] * 4}], tmp_path / "lists" / "train.jsonl")
    arguments[arguments.index(race) + 1] = number
    arguments[arguments.index(tmp_path / "out")] = tmp_path / "lists" / "out"
    assert_error(run, "split train of the folders has different columns", *arguments)
