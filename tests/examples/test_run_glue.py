"""run_glue.py: tasks with two validation sets, other tasks than the model, token dropout, and metrics."""

import json
import random

import evaluate
import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, EvalPrediction

from luna_mega.training.classification import hide_tokens
from luna_mega.training.tokenizers import train_bpe
from tests.examples.conftest import EXAMPLES
from tests.examples.contract import LUNA
from tests.examples.runs import TINY, sentence, write

METRIC = str(EXAMPLES / "metrics" / "glue_metrics")
RUN = ["run_glue", "--max_seq_length", 32]


def rows(task: str, size: int, seed: int) -> list[dict]:
    draw = random.Random(seed)
    examples = []
    for _ in range(size):
        label = draw.randrange(3 if task == "mnli" else 2)
        texts = sentence(label == 0, draw), sentence(label == 2, draw)
        columns = {"sst2": ("sentence",), "mnli": ("premise", "hypothesis")}.get(task, ("sentence1", "sentence2"))
        examples.append(dict(zip(columns, texts, strict=False)) | {"label": 2.5 * label if task == "stsb" else label})
    return examples


def test_pairs_with_two_validation_sets(run, tmp_path):
    for split in ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"):
        write(rows("mnli", 16, seed=len(split)), tmp_path / "data" / f"{split}.jsonl")
    output = tmp_path / "out"
    often = ["--eval_strategy", "steps", "--eval_steps", 1, "--save_steps", 1, "--load_best_model_at_end"]
    paths = ["--task_name", "mnli", "--dataset_path", tmp_path / "data", "--output_dir", output]
    options = ["--do_train", "--do_eval", "--do_predict", "--max_steps", 2, "--max_predict_samples", 5]
    summary = run(*paths, *LUNA, *options, *often)
    assert {"eval_matched_accuracy", "eval_mismatched_accuracy"} <= set(summary)
    for name in ("MNLI-m.tsv", "MNLI-mm.tsv"):
        predicted = pd.read_csv(output / name, sep="\t")["prediction"]
        assert len(predicted) == 5
        assert set(predicted) <= {"entailment", "neutral", "contradiction"}
    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["best_metric"] == max(entry.get("eval_matched_accuracy", 0) for entry in state["log_history"])


def test_another_padding_token_than_the_tokenizer(train):
    """Trainer sets the padding token of the tokenizer, and the first position does not change."""
    output = train("out", "run_glue", "--max_steps", 1, "--config_overrides", f"{TINY},pad_token_id=5")
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert (config["pad_token_id"], config["first_position"]) == (1, 6)


def test_hidden_tokens():
    """The share of hidden tokens is close to the option; they are never special tokens, and differ by epoch."""
    tokenizer = train_bpe(["a b c d e f"] * 9, 300, 64)
    plain = Dataset.from_dict({"input_ids": [tokenizer("a b c d e f " * 9)["input_ids"]] * 40, "label": [0] * 40})
    hidden = hide_tokens(plain, tokenizer, 0.3, 0)
    first, again = (np.array([row["input_ids"] for row in hidden]) for _ in range(2))
    hidden.set_epoch(1)
    assert (first == again).all() and any(first[0] != first[1]) and any(first[0] != hidden[0]["input_ids"])
    changed = first != np.array(plain["input_ids"][:])
    assert 0.25 < changed[:, 1:-1].mean() < 0.35 and not changed[:, [0, -1]].any()
    assert (first[changed] == tokenizer.mask_token_id).all()


def test_another_task(train, run, tmp_path):
    """A classifier is fine-tuned for a regression, with another dropout."""
    first = train("first", "run_glue", "--max_steps", 1)
    for split, size in (("train", 8), ("validation", 8), ("test", 4)):
        write(rows("stsb", size, seed=size), tmp_path / "stsb" / f"{split}.csv")
    options = ["--task_name", "stsb", "--dataset_path", tmp_path / "stsb", "--output_dir", tmp_path / "second"]
    options += ["--model_name_or_path", first, "--do_train", "--do_eval", "--do_predict", "--max_steps", 1]
    summary = run(*options, "--ignore_mismatched_sizes", "--config_overrides", "dropout=0.3")
    assert {"eval_pearson", "eval_spearmanr", "eval_combined_score"} <= set(summary)
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "second").config
    assert (config.num_labels, config.problem_type, config.dropout, config.hidden_size) == (1, "regression", 0.3, 16)
    assert np.isfinite(pd.read_csv(tmp_path / "second" / "STS-B.tsv", sep="\t")["prediction"]).all()


EXPECTED = {task: {"accuracy": accuracy_score} for task in ("mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "wnli")}
EXPECTED["mrpc"]["f1"] = EXPECTED["qqp"]["f1"] = f1_score
EXPECTED["cola"] = {"matthews_correlation": matthews_corrcoef}
EXPECTED["stsb"] = {
    "pearson": lambda references, predictions: pearsonr(references, predictions).statistic,
    "spearmanr": lambda references, predictions: spearmanr(references, predictions).statistic,
}


@pytest.mark.parametrize("task", EXPECTED)
def test_equals_scikit_learn_and_scipy(task):
    draw = np.random.default_rng(0)
    if task == "stsb":
        references, predictions = draw.uniform(0, 5, 200), draw.normal(2, 2, 200)
    else:
        references, predictions = draw.integers(0, 3 if task == "mnli" else 2, (2, 200))
    expected = {name: function(references, predictions) for name, function in EXPECTED[task].items()}
    metric = evaluate.load(METRIC, task, keep_in_memory=True)
    assert metric.compute(predictions=predictions, references=references) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("predictions", [[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
def test_correlation_with_a_constant_is_zero_and_not_nan(predictions, script):
    references = [1.0, 2.0, 3.0] if predictions[0] else [2.5, 2.5, 2.5]
    module = script("run_glue")
    compute = module.make_metrics(module.DataArguments(task_name="stsb"), [])
    result = compute(EvalPrediction(np.array(predictions)[:, None], np.array(references)))
    assert result == {"pearson": 0.0, "spearmanr": 0.0, "combined_score": 0.0}


def test_metrics_of_a_head_in_another_order(script):
    """F1 counts predictions of the task's label 1 for any order of the head's labels."""
    module, draw = script("run_glue"), np.random.default_rng(0)
    data = module.DataArguments(task_name="mrpc", metric_path=METRIC)
    logits, labels = draw.normal(size=(30, 2)), draw.integers(0, 2, 30)
    expected = module.make_metrics(data, [0, 1])(EvalPrediction(logits, labels))
    assert module.make_metrics(data, [1, 0])(EvalPrediction(logits[:, ::-1], 1 - labels)) == expected
    assert expected["f1"] != pytest.approx(expected["accuracy"])
