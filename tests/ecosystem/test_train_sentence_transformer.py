"""examples/train_sentence_transformer.py on tiny data."""

import json
import random

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel

import luna_mega_cli
from tests.distillation.models import save_teacher
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
    """Write pairs of reviews with scores from 0 to 5; pairs of the same class have high scores."""
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
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ModelCard(card).data.library_name == "sentence-transformers"
    assert "/tmp" not in card.replace(str(tmp_path), "")

    # The folder is sufficient to embed texts, and the script evaluates it with the same result as after training.
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
    assert (
        json.loads((tmp_path / "complete" / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))[
            "global_step"
        ]
        == 4
    )


EXACT = "dropout=0.0,attention_dropout=0.0"
RATES = r'{"salience$": 0.01, "embeddings\\.": 0.0}'


@pytest.fixture
def student(tmp_path):
    """Return a Luna with 12 rows of P, converted from the sentence encoder in the folder `teacher`."""
    teacher = str(save_teacher(tmp_path / "teacher", modules=("Pooling", "Normalize")))
    options = ["--output", str(tmp_path / "student"), "--projection-length", "12", "--max-length", "40"]
    assert luna_mega_cli.main(["distill", teacher, *options]) == 0
    return tmp_path / "student"


@pytest.fixture
def texts(tmp_path):
    draw = random.Random(0)
    for name, size in (("train", 40), ("validation", 9)):
        rows = [
            {"text": " ".join(draw.choices("abcdefghij", k=draw.randrange(1, 50))), "label": 1} for _ in range(size)
        ]
        write(rows, tmp_path / "texts" / f"{name}.jsonl")
    return tmp_path / "texts"


def distill(student, texts, output, *more):
    """Return the options that train a student on vectors of its teacher."""
    return [
        *("--model_name_or_path", student, "--teacher", student.with_name("teacher"), "--dataset_path", texts),
        *("--text_columns", "text", "--validation_split", "validation", "--max_seq_length", 30, "--do_eval"),
        *("--projection_lengths", 4, 8, "--config_overrides", EXACT, "--learning_rate", 1e-3, "--output_dir", output),
        *("--learning_rate_mapping", RATES, "--per_device_train_batch_size", 4, *more),
    ]


def mean_cosine(output, teacher, texts) -> float:
    """Return the mean cosine of the validation texts, one at a time, with the mean of the teacher's windows."""
    ours, theirs = (sentence_transformers.SentenceTransformer(str(name), device="cpu") for name in (output, teacher))
    values, window = [], 20
    for line in (texts / "validation.jsonl").read_text(encoding="utf-8").splitlines():
        ids = ours.tokenizer(json.loads(line)["text"], truncation=True, max_length=30, return_tensors="pt")["input_ids"]
        parts = [torch.cat([ids[:, :1], part, ids[:, -1:]], 1) for part in ids[:, 1:-1].split(window - 2, dim=1)]
        vectors = []
        with torch.no_grad():
            for model, rows in ((ours, [ids]), (theirs, parts if ids.shape[1] > window else [ids])):
                inputs = ({"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows)
                vectors.append(sum(model(each)["sentence_embedding"][0] for each in inputs))
        values.append(torch.cosine_similarity(*vectors, dim=0).item())
    return sum(values) / len(values)


def test_distillation(run, student, texts, tmp_path):
    """The loss equals that computed from the saved folder, and training with `--learning_rate_mapping` reduces it."""
    teacher, output = tmp_path / "teacher", tmp_path / "out"
    before = run(*distill(student, texts, tmp_path / "before"))
    assert before["eval_loss"] == pytest.approx(1 - mean_cosine(student, teacher, texts), abs=1e-5)
    after = run(*distill(student, texts, output, "--do_train", "--max_steps", 12))
    assert after["eval_loss"] == pytest.approx(1 - mean_cosine(output, teacher, texts), abs=1e-5)
    assert after["eval_loss"] < before["eval_loss"]

    trained, converted = (AutoModel.from_pretrained(folder) for folder in (output, student))
    assert trained.config.projection_length == 12 and trained.config.dropout == 0
    weights = converted.state_dict()
    changed = {name for name, weight in trained.state_dict().items() if not torch.equal(weight, weights[name])}
    assert changed == {name for name in weights if not name.startswith("embeddings.")}
    model = sentence_transformers.SentenceTransformer(str(output), device="cpu")
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Normalize"]
    assert model.max_seq_length == 30
    assert "/tmp" not in (output / "README.md").read_text(encoding="utf-8").replace(str(tmp_path), "")


ERRORS = {
    "no data for the evaluation": (["--do_eval"], [], "requires --validation_split, --sts_name or --sts_path"),
    "two sources": (["--do_eval", "--sts_path", "DATA"], ["--sts_name", "x"], "one of --sts_name and --sts_path"),
    "columns of a teacher": (["--do_train", "--dataset_path", "DATA"], ["--teacher", "DATA"], "must be one column"),
    "no teacher": (["--do_train", "--dataset_path", "DATA"], ["--teacher_window", 9], "require --teacher"),
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
    given = [data if value == "DATA" else value for value in [*needed, *more]]
    given += ["--model_name_or_path", tmp_path] if "--do_eval" in needed else []
    assert_error(run, message, *given, "--output_dir", tmp_path / "out", output=tmp_path / "out")


TEACHERS = {
    "nowhere": (["--teacher", "nowhere"], "--teacher nowhere: "),
    "window": (["--teacher_window", 21], "--teacher_window 21 exceeds the 20 positions of the teacher"),
    "width": (["--teacher", "WIDE"], "vectors of 32 numbers, but the model has 16"),
    "encoder": (["--model_name_or_path", "BERT"], "projection_lengths=.* requires a Luna .*, got BertModel"),
    "split": (["--validation_split", "dev"], "has no split dev"),
}


@pytest.mark.parametrize(("options", "message"), TEACHERS.values(), ids=TEACHERS)
def test_invalid_options_of_a_teacher_are_one_line(options, message, run, student, texts, tmp_path):
    if "WIDE" in options:
        options = [options[0], save_teacher(tmp_path / "wide", modules=(), hidden_size=32)]
    if "BERT" in options:
        options = [options[0], tmp_path / "teacher", "--max_seq_length", 20, "--config_overrides", ""]
    assert_error(run, message, *distill(student, texts, tmp_path / "out"), "--do_train", *options)
