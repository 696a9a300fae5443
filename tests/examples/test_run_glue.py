import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from luna_mega.training.classification import hide_tokens
from luna_mega.training.tokenizers import train_bpe
from tests.examples import runs
from tests.examples.runs import assert_complete, assert_error, sentence, write, write_splits

RUN = ["run_glue", "--max_seq_length", 32]
TINY = f"{runs.TINY},dropout=0.1"


def rows(task: str, size: int, seed: int) -> list[dict]:
    draw = random.Random(seed)
    examples = []
    for index in range(size):
        label = draw.randrange({"mnli": 3}.get(task, 2))
        pair = {"premise": sentence(label == 0, draw), "hypothesis": sentence(label == 2, draw)}
        if task == "sst2":
            examples.append({"sentence": sentence(label == 1, draw), "label": label, "idx": index})
        elif task == "mnli":
            examples.append({**pair, "label": label})
        else:
            examples.append({"sentence1": pair["premise"], "sentence2": pair["hypothesis"], "label": 2.5 * label})
    return examples


@pytest.fixture
def sst2(tmp_path):
    return write_splits(partial(rows, "sst2"), tmp_path / "sst2", train=64, validation=32, test=8)


def scratch(task: str, data: Path, output: Path) -> list:
    return [
        *("--task_name", task, "--dataset_path", data, "--output_dir", output, "--do_train"),
        *("--config_overrides", TINY, "--vocab_size", 300, "--per_device_train_batch_size", 8),
    ]


def test_single_sentences_from_scratch_and_then_another_task(run, sst2, tmp_path):
    output = tmp_path / "out"
    summary = run(
        *scratch("sst2", sst2, output),
        *("--do_eval", "--do_predict", "--learning_rate", 0.02, "--num_train_epochs", 6, "--eval_strategy", "epoch"),
        *("--save_strategy", "epoch", "--load_best_model_at_end", "--early_stopping_patience", 2),
        *("--train_sampling_strategy", "group_by_length"),  # must not change the order of the predictions
    )
    assert summary["eval_accuracy"] == 1.0
    assert_complete(output)
    assert json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["best_metric"] == 1.0

    # The saved folder is sufficient to reproduce the written predictions and label names.
    model = AutoModelForSequenceClassification.from_pretrained(output).eval()
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert model.config.id2label == {0: "negative", 1: "positive"}
    texts = [row["sentence"] for row in rows("sst2", 8, seed=8)]
    with torch.no_grad():
        predicted = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.argmax(-1).tolist()
    table = pd.read_csv(output / "SST-2.tsv", sep="\t")
    assert table.columns.tolist() == ["index", "prediction"]
    assert table["prediction"].tolist() == predicted == [row["label"] for row in rows("sst2", 8, seed=8)]

    # The script evaluates the folder with the same result as after training, and fine-tunes it for another task.
    again = ["--task_name", "sst2", "--dataset_path", sst2, "--output_dir", tmp_path / "again", "--do_eval"]
    again = run(*again, "--model_name_or_path", output)
    assert again["eval_loss"] == pytest.approx(summary["eval_loss"], abs=1e-6) and "train_loss" not in again
    for split, size in (("train", 8), ("validation", 8), ("test", 4)):
        write(rows("stsb", size, seed=size), tmp_path / "stsb" / f"{split}.csv")
    second = ["--task_name", "stsb", "--dataset_path", tmp_path / "stsb", "--output_dir", tmp_path / "second"]
    second += ["--model_name_or_path", output, "--do_train", "--do_eval", "--do_predict", "--max_steps", 1]
    summary = run(*second, "--ignore_mismatched_sizes", "--config_overrides", "dropout=0.3")
    assert {"eval_pearson", "eval_spearmanr", "eval_combined_score"} <= set(summary)
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "second").config
    assert (config.num_labels, config.problem_type, config.dropout, config.hidden_size) == (1, "regression", 0.3, 16)
    assert np.isfinite(pd.read_csv(tmp_path / "second" / "STS-B.tsv", sep="\t")["prediction"]).all()


def test_pairs_with_two_validation_sets(run, tmp_path):
    for split in ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"):
        write(rows("mnli", 16, seed=len(split)), tmp_path / "data" / f"{split}.jsonl")
    output = tmp_path / "out"
    summary = run(
        *scratch("mnli", tmp_path / "data", output),
        *("--do_eval", "--do_predict", "--max_steps", 2, "--eval_strategy", "steps", "--eval_steps", 1),
        *("--save_steps", 1, "--load_best_model_at_end", "--max_predict_samples", 5),
    )
    assert {"eval_matched_accuracy", "eval_mismatched_accuracy"} <= set(summary)
    for name in ("MNLI-m.tsv", "MNLI-mm.tsv"):
        predicted = pd.read_csv(output / name, sep="\t")["prediction"]
        assert len(predicted) == 5
        assert set(predicted) <= {"entailment", "neutral", "contradiction"}
    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["best_metric"] == max(entry.get("eval_matched_accuracy", 0) for entry in state["log_history"])


def test_command_line_overrides_recipe(run, script, sst2, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task_name: sst2\ndo_train: true\nlearning_rate: 1e-5\nmax_steps: 7\nseed: 3\n", encoding="utf-8")
    data, _, training, _ = script("run_glue").parse(["--recipe", str(recipe), "--max_steps", "1", "--output_dir", "x"])
    assert (data.task_name, training.do_train, training.seed) == ("sst2", True, 3)
    assert (training.learning_rate, training.max_steps) == (1e-5, 1)
    assert training.metric_for_best_model == "accuracy"


ERRORS = {
    "unknown task": (["--task_name", "squad"], "--task_name squad must be one of cola, mnli"),
    "unknown field": (["--config_overrides", "width=3"], "luna has no field width"),
    "bad field value": (["--config_overrides", "hidden_size=16,num_attention_heads=3"], "must be divisible"),
    "bad choice": (["--config_overrides", "pooling=max"], "pooling must be one of"),
    "small vocabulary": (["--vocab_size", "100"], r"vocab_size \(100\) must be at least 261"),
    "vocabulary above the model's": (["--config_overrides", f"{TINY},vocab_size=200"], "the model has vocab_size=200"),
    "no checkpoint": (["--resume_from_checkpoint", "last"], "--resume_from_checkpoint last: no checkpoint there"),
    "early stopping": (["--early_stopping_patience", "2"], "needs --load_best_model_at_end"),
    "strategies": (["--load_best_model_at_end"], "save and eval strategy"),
    "no training samples": (["--max_train_samples", "0"], "split train is empty"),
}


@pytest.mark.parametrize(("options", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_options_are_one_line(options, message, run, sst2, tmp_path):
    assert_error(run, message, *scratch("sst2", sst2, tmp_path / "out"), *options, output=tmp_path / "out")


def test_another_padding_token_than_the_tokenizer(run, sst2, tmp_path):
    """Trainer sets the padding token of the tokenizer, and the first position does not change."""
    output = tmp_path / "out"
    run(*scratch("sst2", sst2, output), "--max_steps", 1, "--config_overrides", f"{TINY},pad_token_id=5")
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert (config["pad_token_id"], config["first_position"]) == (1, 6)


def test_nothing_to_do_and_nothing_to_evaluate(run, tmp_path):
    with pytest.raises(SystemExit, match="nothing to do"):
        run("--task_name", "sst2", "--output_dir", tmp_path)
    with pytest.raises(SystemExit, match="need --model_name_or_path"):
        run("--task_name", "sst2", "--output_dir", tmp_path, "--do_eval")


def test_checkpoints_of_another_run_are_not_overwritten(run, sst2, tmp_path):
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(SystemExit, match="checkpoint-5 already exists; pass --resume_from_checkpoint last"):
        run(*scratch("sst2", sst2, tmp_path / "out"))


WRONG_DATA = {
    "empty": ([], "empty|cannot load"),
    "no text column": ([{"text": "a", "label": 0}], "split train has no column sentence, only text, label"),
    "no label column": ([{"sentence": "a"}], "no column label"),
    "label out of range": ([{"sentence": "a", "label": 1}, {"sentence": "b", "label": 2}], "row 1: label 2 is not one"),
    "no text": ([{"sentence": "a", "label": 0}, {"sentence": None, "label": 0}], "row 1: sentence is None"),
}


@pytest.mark.parametrize("case", WRONG_DATA)
def test_invalid_data_is_one_line(case, run, tmp_path):
    examples, message = WRONG_DATA[case]
    write(examples, tmp_path / "data" / "train.jsonl")
    assert_error(run, message, *scratch("sst2", tmp_path / "data", tmp_path / "out"))


def test_missing_split_mixed_files_and_hub_without_network(run, sst2, tmp_path):
    (sst2 / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(SystemExit, match="has no split test"):
        run(*scratch("sst2", sst2, tmp_path / "out"), "--do_predict")
    write(rows("sst2", 4, seed=0), sst2 / "test.jsonl")
    with pytest.raises(SystemExit, match="same data file format for all splits"):
        run(*scratch("sst2", sst2, tmp_path / "out"), "--do_predict")
    with pytest.raises(SystemExit, match="cannot load nyu-mll/glue"):
        run("--task_name", "sst2", "--output_dir", tmp_path / "out", "--do_train")


def test_hidden_tokens(script):
    """The share of hidden tokens is close to the option; they are never special tokens, and differ by epoch."""
    tokenizer = train_bpe(["a b c d e f"] * 9, 300, 64)
    plain = Dataset.from_dict({"input_ids": [tokenizer("a b c d e f " * 9)["input_ids"]] * 40, "label": [0] * 40})
    hidden = hide_tokens(plain, tokenizer, 0.3, 0)
    first, again = ([row["input_ids"] for row in hidden] for _ in range(2))
    assert first == again and first[0] != first[1]
    hidden.set_epoch(1)
    assert first != [row["input_ids"] for row in hidden] and hidden[0]["label"] == 0
    changed = np.array(first) != np.array(plain["input_ids"][:])
    assert 0.25 < changed[:, 1:-1].mean() < 0.35 and not changed[:, [0, -1]].any()
    assert (np.array(first)[changed] == tokenizer.mask_token_id).all()
    assert hide_tokens(plain, tokenizer, 0.0, 0) is plain
    with pytest.raises(SystemExit, match="token_dropout 1.0"):
        hide_tokens(plain, tokenizer, 1.0, 0)


@pytest.mark.parametrize(
    "text, message", [("learning_rat: 1", "unknown option learning_rat"), ("- 1", "option: value"), ("a: [", "recipe")]
)
def test_wrong_recipes(text, message, run, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        run("--recipe", recipe)
