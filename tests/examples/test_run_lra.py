"""Long Range Arena: every task with every model, the conventions, self-pretraining, the report, invalid input."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import luna_mega
from tests.examples.runs import TINY, assert_error, sentence, steps
from tests.marks import slow_but

RUN = ["lra.run_lra", "--per_device_train_batch_size", 4]
SIDE = 8
MODELS = {
    "luna": TINY,
    "mega": "hidden_size=16,num_hidden_layers=1,intermediate_size=16,nffn_hidden_size=16,shared_representation_size=8"
    ",ema_projection_size=4,use_chunking=true,chunk_size=16,relative_positional_bias=simple",
    "transformer": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16",
}
LENGTHS = {"listops": 40, "text": 32, "retrieval": 24, "image": SIDE**2, "pathfinder": SIDE**2, "pathx": SIDE**2}


def image(side: int, draw: random.Random) -> PILImage.Image:
    return PILImage.fromarray(np.array([[draw.randrange(256) for _ in range(side)] for _ in range(side)], np.uint8))


def rows(task: str, size: int, script) -> list[dict]:
    draw = random.Random(size)
    if task == "listops":
        trees = script("lra.listops").trees(size, script("lra.listops").Shape(10, 10, 3, 40))
        return [next(trees) for _ in range(size)]
    labels = [draw.randrange(10 if task == "image" else 2) for _ in range(size)]
    if task == "text":
        return [{"text": sentence(label == 1, draw), "label": label} for label in labels]
    if task == "retrieval":
        return [
            {"text1": sentence(True, draw), "text2": sentence(label == 1, draw), "label": label} for label in labels
        ]
    return [{"image": image(SIDE, draw), "label": label} for label in labels]


@pytest.fixture
def folder(script, tmp_path):
    """Return a function that writes the files of a task as `prepare.py` does."""

    def make(task: str, **changes) -> Path:
        classes = script("lra.tasks").TASKS[task].classes
        for split, size in (("train", 12), ("validation", 6), ("test", 5)):
            table = [row | changes for row in rows(task, size, script)]
            features = {name: Image() if name == "image" else Value("string") for name in table[0]}
            features["label"] = ClassLabel(num_classes=classes) if "label" not in changes else Value("int64")
            path = tmp_path / task / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(exist_ok=True)
            Dataset.from_list(table, features=Features(features)).to_parquet(path)
        return tmp_path / task

    return make


def options(task: str, path: Path, output: Path, *more, model: str = "mega") -> list:
    models = ["--model_type", model, "--config_overrides", MODELS[model]]
    lengths = ["--task_name", task, "--max_seq_length", LENGTHS[task]]
    return ["--dataset_path", path, "--output_dir", output, "--do_train", *lengths, *models, *more]


TWO_STEPS = ["--max_steps", 2, "--save_strategy", "no"]


TRAINED = [("listops", "mega"), ("retrieval", "transformer"), ("retrieval", "luna"), ("image", "mega")]
MORE = [("text", "transformer"), ("retrieval", "mega"), ("pathfinder", "luna")]


@pytest.mark.parametrize(("task", "model"), slow_but(TRAINED, TRAINED + MORE))
def test_predictions_of_the_saved_model(run, script, folder, tmp_path, task, model):
    output, pretraining = tmp_path / "out", ["--self_pretraining_steps", 1] * (model == "mega")
    arguments = options(task, folder(task), output, "--do_eval", "--do_predict", *TWO_STEPS, *pretraining, model=model)
    summary = run(*arguments)
    results = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    assert ("self_pretraining_loss" in results) == (model == "mega")
    assert steps(output) == 2 and 0 <= summary["test_accuracy"] <= 1
    body = AutoModel.from_pretrained(output)
    values = task in ("image", "pathfinder", "pathx")
    assert body.config.input_type == ("values" if values else "tokens") and body.config.pooling == "mean"

    # The saved model reproduces the written predictions.
    if task == "retrieval" and model != "transformer":
        trained = getattr(luna_mega, f"{model.capitalize()}ForSequencePairClassification").from_pretrained(output)
    else:
        trained = AutoModelForSequenceClassification.from_pretrained(output)
    table = rows(task, 5, script)
    if values:
        mean, deviation = (0.48, 0.24) if task == "image" else (0.5, 0.5)
        grays = np.stack([np.asarray(row["image"], np.float32).ravel() for row in table])
        inputs = {"input_values": torch.from_numpy((grays / 255 - mean) / deviation)}
    else:
        tokenizer, cut = AutoTokenizer.from_pretrained(output), {"padding": True, "return_tensors": "pt"}
        cut |= {"truncation": True, "max_length": LENGTHS[task]}
        columns = {"listops": ["source"], "text": ["text"], "retrieval": ["text1", "text2"]}[task]
        inputs = {}
        for prefix, column in zip(("", "pair_"), columns, strict=False):
            encoded = tokenizer([row[column] for row in table], **cut)
            inputs |= {prefix + name: encoded[name] for name in ("input_ids", "attention_mask")}
            assert encoded["input_ids"][0][encoded["attention_mask"][0].bool()][-1] == tokenizer.eos_token_id
    with torch.no_grad():
        predicted = trained.eval()(**inputs).logits.argmax(-1).tolist()
    lines = (output / "predictions.tsv").read_text(encoding="utf-8").splitlines()[1:]
    assert [int(line.split("\t")[1]) for line in lines] == predicted


def encode(script, task: str, convention: str, **fields) -> dict:
    """Return one encoded row of a task in the given convention."""
    module = script("lra.tasks")
    chosen, task = module.CONVENTIONS[convention], module.TASKS[task]
    tokenizer = module.make_tokenizer(task.kind, chosen, fields["max_length"])
    split = Dataset.from_dict({column: [fields["value"]] for column in task.columns} | {"label": [0]})
    if task.kind == "pixels":
        return module.encode_images(split, "train", task, tokenizer, chosen, fields["max_length"])[0]
    return module.encode_texts(split, task, tokenizer, chosen, fields["max_length"])[0]


def test_conventions_of_sequences(script):
    """Truncation keeps `</s>` only in `ours`; `luna` adds `<CLS>` and drops the last pixel of an image."""
    cls, end, a = 0, 2, encode(script, "text", "ours", value="a", max_length=9)["input_ids"][0]
    full, long = {"value": "aaa", "max_length": 9}, {"value": "a" * 9, "max_length": 4}
    for convention, first in (("ours", []), ("luna", [cls]), ("mega", [])):
        assert encode(script, "text", convention, **full)["input_ids"] == [*first, a, a, a, end]
        assert len(encode(script, "text", convention, **long)["input_ids"]) == 4
    assert encode(script, "text", "ours", **long)["input_ids"] == [a, a, a, end]
    assert encode(script, "text", "mega", **long)["input_ids"] == [a] * 4
    grays = [4 + gray for gray in (7, 0, 255, 1)]
    image = {"value": bytes([7, 0, 255, 1])}
    assert encode(script, "image", "luna", **image, max_length=4)["input_ids"].tolist() == [cls, *grays[:3]]
    assert encode(script, "image", "luna", **image, max_length=6)["input_ids"].tolist() == [cls, *grays, end]
    assert encode(script, "image", "mega", **image, max_length=4)["input_ids"].tolist() == grays


@pytest.mark.parametrize("convention", ["ours", "luna"])
def test_bytes_match_the_tokenizer(script, convention):
    """Bytes match the tokenizer for two-byte and four-byte characters, complete and cut within a character."""
    module, text = script("lra.tasks"), "Größe \n 🦀 <s>"
    tokenizer = module.make_tokenizer("bytes", module.CONVENTIONS[convention], 99)
    expected = tokenizer(text)["input_ids"]
    assert encode(script, "text", convention, value=text, max_length=99)["input_ids"] == expected
    assert len(expected) == len(text.encode()) + 1 + (convention == "luna")
    cut = encode(script, "text", convention, value=text, max_length=4)["input_ids"]
    assert cut == ([*expected[:3], 2] if convention == "ours" else expected[:4])
    with pytest.raises(SystemExit, match="does not support bytes"):
        module.encode_bytes([text], module.make_tokenizer("words", module.CONVENTIONS[convention], 99), None, 99)


def test_convention_of_the_luna_paper(run, folder, tmp_path):
    """The Luna paper validates on the test rows, uses the first token, and applies weight decay to all parameters."""
    output = tmp_path / "out"
    arguments = options("text", folder("text"), output, "--do_eval", "--do_predict", *TWO_STEPS, model="luna")
    summary = run(*arguments, "--convention", "luna", "--paper_model", "true")
    assert summary["train_samples"] == 18 and summary["eval_accuracy"] == summary["test_accuracy"]
    config = AutoModel.from_pretrained(output).config
    assert (config.pooling, config.classifier_activation, config.tie_key_value) == ("cls", "relu", False)
    assert (config.hidden_size, config.num_attention_heads, config.max_position_embeddings) == (16, 2, 32)


def test_sizes_of_the_paper_models(script, tmp_path):
    """The recipes of the paper's models have as many parameters as the original models."""
    module, recipes = script("lra.run_lra"), Path(__file__).resolve().parents[2] / "examples" / "recipes" / "lra"
    for name, millions in (("image_mega", 2.839), ("pathfinder_mega", 1.387), ("pathx_mega", 0.382)):
        arguments = [
            "--recipe",
            recipes / f"{name}.yaml",
            "--dataset_path",
            tmp_path,
            "--output_dir",
            tmp_path,
            "--use_cpu",
        ]
        data, model, _, _ = module.parse([*map(str, arguments)])
        config = module.choose_config(data, model, None, tuple(map(str, range(module.TASKS[data.task_name].classes))))
        with torch.device("meta"):
            network = AutoModelForSequenceClassification.from_config(config)
        assert network.num_parameters() == pytest.approx(millions * 1e6, abs=500)


def test_lengths_of_the_benchmark(script):
    """Maximum lengths of Tay et al. (2021); sequences of the image tasks have one position per pixel."""
    lengths = {name: task.max_length for name, task in script("lra.tasks").TASKS.items()}
    texts = {"listops": 2000, "text": 4096, "retrieval": 4000}
    assert lengths == texts | {"image": 32**2, "pathfinder": 32**2, "pathx": 128**2}


def test_weight_decay_and_warm_up(script, folder, tmp_path, monkeypatch):
    module = script("lra.run_lra")
    monkeypatch.setattr(module.lib.Run, "fit", lambda run, trainer, **steps: trainer)
    arguments = options("image", folder("image"), tmp_path / "out", *TWO_STEPS, "--weight_decay", 0.1, "--use_cpu")
    arguments += ["--warmup_power", 2, "--warmup_steps", 4, "--max_steps", 8]
    decayed = {}
    for convention in ("ours", "mega"):
        trainer = module.main([*map(str, arguments), "--convention", convention])
        decayed[convention] = set(trainer.get_decay_parameter_names(trainer.model))
    assert decayed["mega"] == {name for name, _ in trainer.model.named_parameters()}
    assert not any(name.endswith(".bias") for name in decayed["ours"])
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    schedule = trainer.create_scheduler(8, optimizer).lr_lambdas[0]
    assert [schedule(step) for step in range(9)] == [0, 1 / 16, 1 / 4, 9 / 16, 1, 0.75, 0.5, 0.25, 0]


def test_pixels_as_tokens(run, folder, tmp_path):
    run(*options("pathx", folder("pathx"), tmp_path / "out", "--pixels", "tokens", *TWO_STEPS, model="transformer"))
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert (config.input_type, config.vocab_size, config.layer_types) == ("tokens", 4 + 256 + 1, ["full_attention"])


@pytest.mark.slow
@pytest.mark.parametrize("task, model", [("image", "mega"), ("retrieval", "luna")])
def test_self_pretraining(run, folder, tmp_path, task, model):
    """Self-pretraining changes the body before the labels are used, and does nothing with a learning rate of 0."""
    path = folder(task)

    def body(name: str, *more) -> dict:
        run(*options(task, path, tmp_path / name, *TWO_STEPS, *more, model=model))
        body = AutoModel.from_pretrained(tmp_path / name)
        return {key: value for key, value in body.named_parameters() if not key.startswith("pooler")}

    pretrained = ["--self_pretraining_steps", 3]
    plain, frozen = body("plain", "--learning_rate", 0), body("frozen", *pretrained, "--learning_rate", 0)
    torch.testing.assert_close(frozen, plain, rtol=0, atol=0)
    trained = body("trained", *pretrained)
    assert any(not torch.equal(trained[name], plain[name]) for name in plain)
    assert (
        json.loads((tmp_path / "trained" / "all_results.json").read_text(encoding="utf-8"))["self_pretraining_loss"] > 0
    )


def test_masks_of_self_pretraining(script):
    module, task = script("lra.pretraining"), script("lra.tasks").TASKS["image"]
    grays = torch.arange(200, dtype=torch.uint8)
    values = (grays / 255 - 0.48) / 0.24
    row = module.mask_split([{"input_values": values, "labels": 3}], task, None, 0.25, 0)[0]
    masked = row["labels"] != -100
    assert 20 < masked.sum() < 80 and torch.equal(row["labels"][masked], grays[masked].long())
    assert torch.equal(row["input_values"][~masked], values[~masked]) and not row["input_values"][masked].any()


def test_bad_data(run, folder, tmp_path):
    """Labels, image sizes and images that do not fit the task."""
    output, large = tmp_path / "out", ["--max_seq_length", 256]
    damaged = {"image": {"bytes": b"\x89PNG", "path": None}}
    for task, path, message, more in (
        ("text", folder("text", label=2), "row 0: label 2 is not one of 0, 1", []),
        ("image", folder("pathfinder"), "the labels have 2 classes; this task has 10", []),
        ("image", folder("image"), "has 8 x 8 pixels, but 256 positions require 16 x 16", large),
        ("pathx", folder("pathx", **damaged), "an image cannot be read", []),
    ):
        assert_error(run, message, *options(task, path, output, *TWO_STEPS, *more), output=output)


def test_missing_pair_model(run, folder, tmp_path):
    arguments = options("retrieval", folder("retrieval"), tmp_path / "out", *TWO_STEPS, "--model_type", "roberta")
    assert_error(run, "PairClassification; use luna, mega or transformer", *arguments, "--config_overrides", "")
