"""Long Range Arena: its data are correct and reproducible; every task with every model, and the conventions."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Audio, ClassLabel, Dataset, Features, load_dataset
from huggingface_hub import DatasetCard
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel

from tests.examples.contract import BERT, CHUNKS, images, reviews
from tests.examples.runs import TINY, assert_error, wav, write
from tests.marks import slow_but

SHORT = ["--min_length", 8, "--max_length", 40]


@pytest.fixture
def prepare(script, tmp_path):
    """Return a function that prepares a task in a folder and returns its splits."""

    def run(task: str, output: str, *options: object) -> dict[str, Dataset]:
        script("lra.prepare").main([task, "--output_dir", str(tmp_path / output), *map(str, options)])
        return load_dataset(str(tmp_path / output))

    return run


def value(tokens: list[str], depth: int = 9) -> int:
    """Evaluate a ListOps tree with NumPy from its first token, and check its depth and numbers of arguments."""
    token = tokens.pop(0)
    if token.isdigit():
        return int(token)
    assert depth > 0
    values = []
    while tokens[0] != "]":
        values.append(value(tokens, depth - 1))
    tokens.pop(0)
    assert 2 <= len(values) <= 10
    functions = {"[MIN": np.min, "[MAX": np.max, "[MED": np.median, "[SM": lambda numbers: np.sum(numbers) % 10}
    return int(functions[token](values))


def test_listops(prepare, tmp_path):
    """Values are correct, lengths are within their limits, trees are unique and do not depend on processes."""
    options = [*SHORT, "--train", 70, "--validation", 3, "--test", 5, "--processes"]
    splits = prepare("listops", "1", *options, 1)
    assert {name: len(split) for name, split in splits.items()} == {"train": 70, "validation": 3, "test": 5}
    rows = [row for split in splits.values() for row in split]
    assert len({row["source"] for row in rows}) == 78
    for row in rows:
        tokens = row["source"].split()
        assert 8 < len(tokens) < 40 and value(tokens) == row["label"] and not tokens
    card = DatasetCard.load(tmp_path / "1" / "README.md")
    assert "| train | 70 |" in card.text and card.data.tags == ["long-range-arena", "listops"]
    prepare("listops", "2", *options, 2)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).glob("*.parquet")} for name in "12"]
    assert files[0] == files[1] and len(files[0]) == 3
    # further batches replace trees that occur twice
    options = ["--train", 180, "--validation", 0, "--test", 0, "--processes", 1, "--min_length", 3, "--max_length", 5]
    assert len(set(prepare("listops", "3", *options)["train"]["source"])) == 180


def test_shape_of_the_trees(script):
    """Trees are within the benchmark's limits for depth, arguments, and length."""
    trees = script("lra.listops").trees(0, script("lra.listops").Shape())
    for row in [next(trees) for _ in range(20)]:
        tokens = row["source"].split()
        assert 500 < len(tokens) < 2000 and value(tokens) == row["label"]


@pytest.mark.parametrize(("size", "count"), slow_but([(32, 8)], [(32, 8), (128, 2)]))
def test_pathfinder(script, size, count):
    """Labels match the geometry of the snakes, and the image has light at their paddles and at the discs."""
    sizes = script("lra.drawing").find_drawing(size)
    for index in range(count):
        image = script("lra.pathfinder").draw_image(np.random.default_rng([7, index]), sizes)
        ends = [(snake[0].tolist(), snake[-1].tolist()) for snake in image.snakes]
        assert image.label == (tuple(image.discs.tolist()) in ends)
        assert image.snakes.shape == (2, sizes.contour_length + 1, 2)
        assert image.pixels.shape == (size, size) and image.pixels.min() == 0 and image.pixels.max() == 255
        for snake in image.snakes:  # paddles end at their heads
            back = snake[1:-1] - snake[2:]
            steps = 0.6 * sizes.paddle_length * back / np.linalg.norm(back, axis=1, keepdims=True)
            light = image.pixels[tuple(np.round(snake[2:] + steps).astype(int).T)]
            assert (light > 40).mean() > 0.8 and np.median(image.pixels) < 20
        assert min(image.pixels[tuple(disc)] for disc in image.discs) > 165


def test_released_listops(prepare, tmp_path):
    """All brackets are kept. A copy without brackets, a wrong value, or a missing file raises an error."""
    line = "( ( ( ( [MAX 2 ) ( ( ( [MIN 4 ) 7 ) ] ) ) ) 0 ) ] )\t4"
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_text(f"Source\tTarget\n{line}\n", encoding="utf-8")
    (row,) = prepare("listops", "out", "--source", tmp_path)["test"]
    assert row == {"source": "[MAX 2 [MIN 4 7 ] 0 ]", "label": 4}
    for harm, message in (
        (("] ", ""), "line 2: .* lost its brackets"),
        (("\t4", "\t5"), "evaluates to 4, but Target is 5"),
    ):
        (tmp_path / "basic_val.tsv").write_text(f"Source\tTarget\n{line.replace(*harm)}\n", encoding="utf-8")
        assert_error(prepare, message, "listops", "damaged", "--source", tmp_path)
    (tmp_path / "basic_val.tsv").unlink()
    assert_error(prepare, "No such file .*basic_val.tsv", "listops", "damaged", "--source", tmp_path)


def test_released_pathfinder(prepare, tmp_path, capsys):
    source = tmp_path / "curv_contour_length_14"
    (source / "metadata").mkdir(parents=True)
    (source / "imgs" / "0").mkdir(parents=True)
    lines = [f"imgs/0 sample_{index}.png {index} {index % 2} 1.0 14" for index in range(20)]
    (source / "metadata" / "0.npy").write_text("\n".join(lines), encoding="utf-8")
    for index in range(20):
        Image.fromarray(np.full((32, 32), index, np.uint8)).save(source / "imgs" / "0" / f"sample_{index}.png")
    (source / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    rows = [row for split in prepare("pathfinder", "out", "--source", source).values() for row in split]
    assert "skipped, it is empty" in capsys.readouterr().out
    assert len(rows) == 19 and all(np.asarray(row["image"])[0, 0] % 2 == row["label"] for row in rows)
    assert_error(prepare, "has 32 x 32 pixels, not 128 x 128", "pathx", "damaged", "--source", source)
    (source / "metadata" / "0.npy").write_text(lines[0].replace(" 0 0 ", " 0 2 "), encoding="utf-8")
    assert_error(prepare, "the label is '2', not 0 or 1", "pathfinder", "damaged", "--source", source)


def test_text_and_image(prepare, tmp_path):
    """Validation rows are taken from the training rows; the test rows keep their order; images become gray."""
    red = Image.fromarray(np.full((32, 32, 3), (255, 0, 0), np.uint8))
    for name, size in (("train", 10), ("test", 3)):
        rows = [{"text": f"{name} {index}", "img": red, "label": index % 2} for index in range(size)]
        Dataset.from_list(rows).to_parquet(tmp_path / "source" / f"{name}.parquet")
    splits = prepare("text", "text", "--source", tmp_path / "source", "--validation", 4)
    assert [row["text"] for row in splits["test"]] == ["test 0", "test 1", "test 2"] and len(splits["validation"]) == 4
    texts = sorted([*splits["train"]["text"], *splits["validation"]["text"]])
    assert texts == [f"train {index}" for index in range(10)]
    first = prepare("image", "image", "--source", tmp_path / "source", "--validation", 5)["test"][1]
    assert first["label"] == 1 and np.asarray(first["image"]).tolist() == [[76] * 32] * 32


def test_retrieval(prepare, tmp_path):
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text('1.0\tA1\tB1\ta "quoted" text\tanother\n', encoding="utf-8")
    (row,) = prepare("retrieval", "out", "--source", tmp_path)["validation"]
    assert row == {"text1": 'a "quoted" text', "text2": "another", "label": 1}
    (tmp_path / "new_aan_pairs.test.tsv").write_text("2.0\tA1\tB1\ta\tb\n", encoding="utf-8")
    message = "new_aan_pairs.test.tsv, line 1: two texts and the label 0 or 1 are needed"
    assert_error(prepare, message, "retrieval", "damaged", "--source", tmp_path)


def test_speech(prepare, tmp_path):
    """The unpacked archive; parquet files in the format of the Hub, with a word that is not used; files of ours."""
    source, hub = tmp_path / "speech_commands", tmp_path / "hub"
    for word in ("yes", "no"):
        (source / word).mkdir(parents=True)
        for index in range(3):
            (source / word / f"{index}.wav").write_bytes(wav(np.arange(index + 1)))
    (source / "validation_list.txt").write_text("yes/1.wav\nno/1.wav\n", encoding="utf-8")
    (source / "testing_list.txt").write_text("yes/2.wav\nno/2.wav\n", encoding="utf-8")
    kinds = Features({"audio": Audio(decode=False), "label": ClassLabel(names=["bird", "no", "yes"])})
    clips = {"audio": [{"bytes": wav(np.arange(3)), "path": None}] * 3, "label": ["yes", "bird", "no"]}
    for split in ("train", "validation", "test"):
        Dataset.from_dict(clips).cast(kinds).to_parquet(str(hub / f"{split}.parquet"))
    options = ["speech", "--words", "yes", "no", "--source"]
    for place in (source, hub, tmp_path / "out-hub"):
        rows = prepare(options[0], f"out-{place.name}", *options[1:], place)["test"]
        assert [np.frombuffer(row["audio"], "<i2").tolist() for row in rows] == [[0, 1, 2]] * 2
        assert rows["label"] == [0, 1] and rows.features["label"].names == ["yes", "no"]
    for place, more, message in (
        (source, ["--sampling_rate", 8000], "has 1 channels of 2 bytes at 16000 Hz, not 1, 2 and 8000"),
        (hub, ["--sampling_rate", 8000], "row 0 has 1 channels of 2 bytes at 16000 Hz, not 1, 2 and 8000"),
        (tmp_path / "out-hub", ["--sampling_rate", 8000], "row 0 is not a WAV file at 8000 Hz"),
        (source, ["--words", "maybe"], "has no clips of the word 'maybe'"),
        (hub, ["--words", "yes", "maybe"], "has no clips of the word 'maybe' in the split train"),
    ):
        assert_error(prepare, message, options[0], "damaged", *options[1:], place, *more)
    for content, message in ((b"half", "0.wav is not a WAV file"), (wav(np.arange(0)), "0.wav has no samples")):
        (source / "yes" / "0.wav").write_bytes(content)
        assert_error(prepare, message, options[0], "damaged", *options[1:], source)


MODELS = {"luna": TINY, "mega": f"{CHUNKS},relative_positional_bias=simple", "transformer": BERT}
LENGTHS = {"listops": 40, "text": 32, "retrieval": 24}
TRAINED = [("listops", "mega"), ("retrieval", "luna"), ("image", "mega"), ("pathx", "transformer")]
MORE = [("text", "transformer"), ("retrieval", "transformer"), ("retrieval", "mega"), ("pathfinder", "luna")]


def write_task(task: str, folder: Path, script) -> None:
    """Write a few rows of a task."""
    for split, size in (("train", 12), ("validation", 6), ("test", 5)):
        if task == "listops":
            trees = script("lra.listops").trees(size, script("lra.listops").Shape(10, 10, 3, 40))
            rows = [next(trees) for _ in range(size)]
        elif task in LENGTHS:
            rows = [row | {"text1": row["text"], "text2": "a film"} for row in reviews(size, size)]
        else:
            rows = [row | {"label": index % 2} for index, row in enumerate(images(size, size))]
        write(rows, folder / f"{split}.parquet")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "printed"), [("luna-table3", "listops", 38.36), ("mega-figure4", "text", None)]
)
def test_ablations_of_the_papers(script, tmp_path, name, task, printed):
    """Every model of the table is trained and tested; its accuracy is one of five test rows."""
    write_task(task, tmp_path / task, script)
    options = ["--data", str(tmp_path), "--tasks", task, "--output", str(tmp_path / "out.json"), "--max_steps", "1"]
    options += ["--max_seq_length", str(LENGTHS[task]), "--per_device_train_batch_size", "2", "--use_cpu"]
    options += ["--gradient_accumulation_steps", "1", "--eval_strategy", "no", "--load_best_model_at_end", "false"]
    text = script("papers").main([name, *options, "--save_strategy", "no"])
    *_, last = found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["scores"].items()
    assert [name for name, _ in found] == [*script("papers").ABLATIONS[name].printed]
    assert all(accuracy[task] in (0, 20, 40, 60, 80, 100) for _, accuracy in found)
    cell = f"{last[1][task]:.2f}" + (f" ({printed})" if printed else "")
    assert text.splitlines()[-1] == f"| {last[0]} | {cell} |" and len(text.splitlines()) == 2 + len(found)


@pytest.fixture
def run(call, script, tmp_path):
    """Return a function that trains a model for two steps on a few rows of a task, and returns its metrics."""

    def train(task: str, model: str, output: str, *options: object) -> dict:
        write_task(task, tmp_path / task, script)
        source = ["--task_name", task, "--dataset_path", tmp_path / task, "--output_dir", tmp_path / output]
        source += ["--max_seq_length", LENGTHS.get(task, 64), "--per_device_train_batch_size", 4, "--do_eval"]
        new = ["--model_type", model, "--config_overrides", MODELS.get(model), "--do_train", "--max_steps", 2]
        new = new if model in MODELS else ["--model_name_or_path", tmp_path / model]
        return call("lra.run_lra", *source, *new, "--do_predict", "--save_strategy", "no", *options)

    return train


@pytest.mark.parametrize(("task", "model"), slow_but(TRAINED, TRAINED + MORE))
def test_tasks(run, tmp_path, task, model):
    """The saved model has the inputs of the task, and reproduces the loss and the written predictions."""
    tokens = task in LENGTHS or task == "pathx"
    options = ["--pixels", "tokens"] * (task == "pathx") + ["--self_pretraining_steps", 1] * (model == "mega")
    summary = run(task, model, "out", *options)
    results = json.loads((tmp_path / "out" / "all_results.json").read_text(encoding="utf-8"))
    assert ("self_pretraining_loss" in results) == (model == "mega") and 0 <= summary["test_accuracy"] <= 1
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert (config.input_type, config.pooling) == ("tokens" if tokens else "values", "mean")
    assert task != "pathx" or (config.vocab_size, config.layer_types) == (4 + 256 + 1, ["full_attention"])
    again = run(task, "out", "again", *options[:2])
    assert again["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-5)
    first, second = ((tmp_path / name / "predictions.tsv").read_bytes() for name in ("out", "again"))
    assert first == second


def encode(script, task: str, convention: str, value: object, max_length: int) -> dict:
    """Return one encoded row of a task in the given convention."""
    module = script("lra.tasks")
    chosen, task = module.CONVENTIONS[convention], module.TASKS[task]
    tokens = task.kind != "pixels" or convention == "luna"
    tokenizer = module.make_tokenizer(task.kind, chosen, max_length) if tokens else None
    split = Dataset.from_dict({column: [value] for column in task.columns} | {"label": [0]})
    if task.kind == "pixels":
        return module.encode_images(split, "train", task, tokenizer, chosen, max_length)[0]
    return module.encode_texts(split, task, tokenizer, chosen, max_length)[0]


def test_conventions_of_sequences(script):
    """Truncation keeps `</s>` only in `ours`; `luna` adds `<CLS>` and drops the last pixel of an image."""
    cls, end, a = 0, 2, encode(script, "text", "ours", "a", 9)["input_ids"][0]
    for convention, first in (("ours", []), ("luna", [cls]), ("mega", [])):
        assert encode(script, "text", convention, "aaa", 9)["input_ids"] == [*first, a, a, a, end]
        assert len(encode(script, "text", convention, "a" * 9, 4)["input_ids"]) == 4
    assert encode(script, "text", "ours", "a" * 9, 4)["input_ids"] == [a, a, a, end]
    assert encode(script, "text", "mega", "a" * 9, 4)["input_ids"] == [a] * 4
    image = [7, 0, 255, 1]
    grays = [4 + gray for gray in image]
    assert encode(script, "image", "luna", bytes(image), 4)["input_ids"].tolist() == [cls, *grays[:3]]
    assert encode(script, "image", "luna", bytes(image), 6)["input_ids"].tolist() == [cls, *grays, end]
    values = encode(script, "image", "mega", bytes(image), 4)["input_values"]
    torch.testing.assert_close(values, (torch.tensor(image) / 255 - 0.48) / 0.24)
    two = Dataset.from_dict({"label": [0]}).cast_column("label", ClassLabel(num_classes=2))
    assert_error(script("lra.tasks").label_names, "the labels have 2 classes; this task has 10", two, 10)


@pytest.mark.parametrize("convention", ["ours", "luna"])
def test_bytes_match_the_tokenizer(script, convention):
    """Bytes match the tokenizer for two-byte and four-byte characters, complete and cut within a character."""
    module, text = script("lra.tasks"), "Größe \n 🦀 <s>"
    tokenizer = module.make_tokenizer("bytes", module.CONVENTIONS[convention], 99)
    expected = tokenizer(text)["input_ids"]
    assert encode(script, "text", convention, text, 99)["input_ids"] == expected
    assert len(expected) == len(text.encode()) + 1 + (convention == "luna")
    cut = encode(script, "text", convention, text, 4)["input_ids"]
    assert cut == ([*expected[:3], 2] if convention == "ours" else expected[:4])
    words = module.make_tokenizer("words", module.CONVENTIONS[convention], 99)
    assert_error(module.encode_bytes, "does not support bytes", [text], words, None, 99)


def test_convention_of_the_luna_paper(run, tmp_path):
    """The Luna paper validates on the test rows and uses the first token of its model."""
    summary = run("text", "luna", "out", "--convention", "luna", "--paper_model", "true")
    assert summary["train_samples"] == 18 and summary["eval_accuracy"] == summary["test_accuracy"]
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert (config.pooling, config.classifier_activation, config.tie_key_value) == ("cls", "relu", False)
    assert (config.hidden_size, config.num_attention_heads, config.max_position_embeddings) == (16, 2, 32)


def test_weight_decay(run, tmp_path):
    """It applies to all parameters in the papers; here, norms keep their weights. A step sets decayed ones to 0."""
    decay = ["--learning_rate", 0.1, "--weight_decay", 10, "--max_steps", 1]
    decays_all = {"--convention=ours": False, "--convention=mega": True, "--decay_all_weights": True}
    for number, (option, is_decayed) in enumerate(decays_all.items()):
        run("image", "mega", str(number), *decay, option)
        weights = load_file(tmp_path / str(number) / "model.safetensors")
        norms = [value.abs().max() for name, value in weights.items() if name.endswith("norm.scalar")]
        assert all((norm < 0.11) == is_decayed for norm in norms) and norms


def test_warm_up(script):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    schedule = script("lra.run_lra").lib.optimization.power_warmup_schedule(optimizer, 4, 8, power=2).lr_lambdas[0]
    assert [schedule(step) for step in range(9)] == [0, 1 / 16, 1 / 4, 9 / 16, 1, 0.75, 0.5, 0.25, 0]


def test_self_pretraining(run, script, tmp_path):
    """It changes the body before the labels are used; masked pixels are 0, and their gray levels are predicted."""
    bodies = []
    for steps in (0, 3):
        options = ["--label_smoothing_factor", 0.1, "--eval_on_start"]  # of the training on the labels only
        run("image", "mega", str(steps), "--self_pretraining_steps", steps, *options)
        bodies.append(dict(AutoModel.from_pretrained(tmp_path / str(steps)).named_parameters()))
    assert any(not torch.equal(bodies[0][name], bodies[1][name]) for name in bodies[0])
    module, task = script("lra.pretraining"), script("lra.tasks").TASKS["image"]
    grays = torch.arange(200, dtype=torch.uint8)
    values = (grays / 255 - 0.48) / 0.24
    row = module.mask_split([{"input_values": values, "labels": 3}], task, None, 0.25, 0)[0]
    masked = row["labels"] != -100
    assert 20 < masked.sum() < 80 and torch.equal(row["labels"][masked], grays[masked].long())
    assert torch.equal(row["input_values"][~masked], values[~masked]) and not row["input_values"][masked].any()
