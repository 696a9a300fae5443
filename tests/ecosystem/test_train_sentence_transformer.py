"""examples/train_sentence_transformer.py on tiny data."""

import json
import random

import pytest
import torch
from huggingface_hub import ModelCard

from tests.examples.conftest import call, offline, script  # noqa: F401  (fixtures)
from tests.examples.runs import TINY, assert_error, sentence, write

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

MODELS = {
    "luna": TINY,
    "mega": "hidden_size=16,num_hidden_layers=1,intermediate_size=16,nffn_hidden_size=16"
    ",use_chunking=true,chunk_size=4",
    "roberta": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16",
}
RUN = ["train_sentence_transformer", "--max_seq_length", 24, "--vocab_size", 300]


@pytest.fixture
def run(call):  # noqa: F811
    return lambda *arguments, **options: call(*RUN, *arguments, **options)


@pytest.fixture
def data(tmp_path):
    """Pairs of reviews with the same label are similar; scores are from 0 to 5."""
    draw = random.Random(0)
    for name, size in (("train", 64), ("validation", 32)):
        rows = []
        for _ in range(size):
            good, score = draw.random() < 0.5, draw.choice([0.0, 1.0, 4.0, 5.0])
            other = good if score > 2 else not good
            rows.append({"sentence1": sentence(good, draw), "sentence2": sentence(other, draw), "label": score})
        write(rows, tmp_path / "data" / f"{name}.jsonl")
    return tmp_path / "data"


def arguments(data, output, *more):
    sts = ["--sts_path", data, "--sts_columns", "sentence1", "sentence2", "label"]
    return ["--dataset_path", data, "--score_column", "label", "--min_score", 4, *sts, "--output_dir", output, *more]


@pytest.mark.parametrize("model", MODELS)
def test_trains_and_is_evaluated(model, run, data, tmp_path):
    given = arguments(data, tmp_path / "out", "--do_train", "--do_eval", "--model_type", model)
    options = ["--config_overrides", MODELS[model], "--learning_rate", 1e-2, "--num_train_epochs", 3]
    summary = run(*given, *options, "--per_device_train_batch_size", 4)
    assert 0.1 < summary["eval_sts_spearman_cosine"] <= 1 and summary["train_samples_per_second"] > 0
    assert summary["train_samples"] < 64
    card = (tmp_path / "out" / "README.md").read_text()
    assert ModelCard(card).data.library_name == "sentence-transformers"
    assert "/tmp" not in card.replace(str(tmp_path), "")

    # The folder by itself can embed, and the script evaluates it as after training.
    trained = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert trained.max_seq_length == 24
    assert torch.as_tensor(trained.encode(["the film was so so so fine"])).isfinite().all()
    again = ["--model_name_or_path", tmp_path / "out", "--output_dir", tmp_path / "again", "--do_eval"]
    again += ["--sts_path", data, "--sts_columns", "sentence1", "sentence2", "label"]
    assert run(*again)["eval_sts_spearman_cosine"] == pytest.approx(summary["eval_sts_spearman_cosine"], abs=1e-6)


def test_resumed_run_ends_with_the_same_weights(run, data, tmp_path):
    weights = []
    for name, more in (
        ("complete", []),
        ("resumed", ["--resume_from_checkpoint", tmp_path / "complete" / "checkpoint-2"]),
    ):
        given = arguments(data, tmp_path / name, "--do_train", "--config_overrides", TINY, "--max_steps", 4)
        run(*given, "--save_steps", 2, "--per_device_train_batch_size", 4, *more)
        model = sentence_transformers.SentenceTransformer(str(tmp_path / name), device="cpu")
        weights.append(model.state_dict())
    torch.testing.assert_close(*weights)
    assert json.loads((tmp_path / "complete" / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4


ERRORS = {
    "no data for the evaluation": (["--do_eval"], [], "one of --sts_name and --sts_path"),
    "no data": (["--do_train"], [], "one of --dataset_name and --dataset_path"),
    "one column": (
        ["--do_train", "--dataset_path", "DATA"],
        ["--text_columns", "sentence1"],
        "must be two or three columns",
    ),
    "no such column": (["--do_train", "--dataset_path", "DATA"], ["--text_columns", "a", "b"], "no column a, b"),
    "scores": (
        ["--do_train", "--dataset_path", "DATA"],
        ["--score_column", "label", "--min_score", 6],
        "label of at least --min_score 6",
    ),
    "pooling": (["--do_train", "--dataset_path", "DATA"], ["--pooling", "sum"], "--pooling sum must be one of"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_invalid_options_are_one_line(case, run, data, tmp_path):
    needed, more, message = ERRORS[case]
    given = [data if value == "DATA" else value for value in needed]
    given += ["--model_name_or_path", "nowhere"] if "--do_eval" in needed else []
    assert_error(run, message, *given, *more, "--output_dir", tmp_path / "out", output=tmp_path / "out")
