"""Load two old checkpoints, train a small Luna and a small Mega where the order of words decides, and share a model.

    make demo

Nothing is downloaded. The task is to evaluate boolean expressions in prefix form, such as
`( and true ( not ( or false true ) ) )`: ListOps (Nangia and Bowman 2018) with two values. The checkpoints are test
fixtures that transformers 4 and fairseq wrote, and the Hub is the server of the tests on the loopback address.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import os
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    hub = runpy.run_path(str(ROOT / "tests" / "hub" / "server.py"))["LoopbackHub"]()
    os.environ |= hub.settings()  # before huggingface_hub is imported

import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.hf_argparser import HfArg
from transformers.utils.logging import disable_progress_bar

import luna_mega
import luna_mega_cli
from luna_mega import training as lib

FIXTURES = ROOT / "tests" / "parity" / "fixtures"
LABELS = ["false", "true"]
LENGTHS = (12, 48)  # tokens of an expression
# Mega's default initializer_range, 0.02, is too small for narrow models.
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "initializer_range": 0.1}
CONFIGS = {
    "luna": (luna_mega.LunaConfig, {"num_attention_heads": 4, "projection_length": 16}),
    "mega": (luna_mega.MegaConfig, {"nffn_hidden_size": 128, "shared_representation_size": 32}),
}
# In this program the code comes from the repository, because luna_mega cannot be imported.
WITHOUT_PACKAGE = """
import sys
sys.modules["luna_mega"] = None
from transformers import pipeline
classify = pipeline("text-classification", "tester/mega", trust_remote_code=True)
print(classify(sys.argv[1])[0]["score"])
"""


@dataclass
class Arguments:
    output_dir: str = HfArg(
        default="outputs/demo", help="folder for the plot and the models; `models` in it is replaced"
    )
    num_train_epochs: float = HfArg(default=4.0, help="epochs of training")
    learning_rate: float = HfArg(default=3e-3, help="peak learning rate")
    seed: int = HfArg(default=0, help="seed of the expressions, the weights and the order of the rows")


@contextmanager
def step(title: str) -> Iterator[None]:
    print(f"\n{title}", flush=True)
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:.0f} s", flush=True)


def load_folder_of_transformers_4() -> None:
    """Load a Mega that transformers 4.46 saved, and compare its logits with those that transformers 4.46 returned."""
    folder = FIXTURES / "mega" / "hf_mlm_softmax_chunk_short"
    saved = load_file(folder / "io.safetensors")
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(saved["input_ids"], attention_mask=saved["attention_mask"]).logits
    real = saved["attention_mask"].bool()
    difference = (logits - saved["logits"])[real].abs().max()
    print(f"  {type(model).__name__}: the logits differ by {difference:.1e} at most")
    if difference > 1e-4:
        lib.fail("the logits differ from those of transformers 4.46")


def convert_checkpoint_of_fairseq(folder: Path) -> None:
    """Convert a Luna that fairseq saved, then compare its outputs with those that fairseq computed."""
    source, recorded = FIXTURES / "luna" / "bert_heads", str(folder.with_name("recorded.safetensors"))
    checkpoint, results = source / "checkpoint.pt", load_file(source / "io.safetensors")
    record = {"input_ids": results["A.src_tokens"], "logits": results["A.logits"]}
    for layer in range(3):
        record[f"hidden_states.{layer}"] = results[f"A.hidden.{layer}.x"]
        record[f"packed_hidden_states.{layer}"] = results[f"A.hidden.{layer}.p"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    sha256 = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    save_file(record, recorded, {"sha256": sha256, "source": "fairseq"})
    for command in (["convert", str(checkpoint), "--output", str(folder)], ["verify", str(folder), recorded]):
        print(f"$ luna-mega {command[0]} ...", flush=True)
        if luna_mega_cli.main(command):
            raise SystemExit(1)


def draw_expression(depth: int, draw: random.Random) -> tuple[list[str], bool]:
    """Return the tokens and the value of a random expression with at most `depth` nested operators."""
    if depth == 0 or draw.random() < 0.2:
        value = draw.random() < 0.5
        return [LABELS[value]], value
    operator = draw.choice(["and", "or", "not"])
    parts = [draw_expression(depth - 1, draw) for _ in range(1 if operator == "not" else 2)]
    values = [value for _, value in parts]
    value = {"and": all(values), "or": any(values), "not": not values[0]}[operator]
    return ["(", operator, *(token for tokens, _ in parts for token in tokens), ")"], value


def draw_expressions(seed: int, sizes: dict[str, int]) -> dict[str, Dataset]:
    """Return distinct expressions of 12 to 48 tokens for each split; half of them are true."""
    draw, splits, seen = random.Random(seed), {}, set()
    for name, size in sizes.items():
        texts: list[list[str]] = [[], []]
        while min(map(len, texts)) < size // 2:
            tokens, value = draw_expression(5, draw)
            text = " ".join(tokens)
            if LENGTHS[0] <= len(tokens) <= LENGTHS[1] and text not in seen and len(texts[value]) < size // 2:
                seen.add(text)
                texts[value].append(text)
        splits[name] = Dataset.from_dict({"text": sum(texts, []), "labels": [0] * (size // 2) + [1] * (size // 2)})
    return splits


def bag_of_words(data: dict[str, Dataset]) -> np.ndarray:
    """Return the answers of a logistic regression that reads TF-IDF of words and bigrams."""
    features = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2))
    classifier = make_pipeline(features, LogisticRegression(C=30, max_iter=1000))
    classifier.fit(data["train"]["text"][:], data["train"]["labels"][:])
    return classifier.predict(data["test"]["text"][:])


def train(name: str, data: dict[str, Dataset], options: Arguments, folder: Path) -> tuple[Trainer, np.ndarray]:
    """Train a model and save it with its tokenizer. Return the trainer and the answers for the test."""
    tokenizer = lib.tokenizers.train_bpe(data["train"]["text"], 300, model_max_length=128)
    tokens = {split: rows.map(lambda row: tokenizer(row["text"], truncation=True)) for split, rows in data.items()}
    config_class, fields = CONFIGS[name]
    config = config_class(vocab_size=len(tokenizer), pooling="mean", **SIZES, **fields, **lib.label_fields(LABELS))
    torch.manual_seed(options.seed)
    model = AutoModelForSequenceClassification.from_config(config)
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=options.num_train_epochs,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=60,
        weight_decay=0.01,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=100,
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=options.seed,
        use_cpu=True,
    )
    sets = {"train_dataset": tokens["train"], "eval_dataset": tokens["test"], "compute_metrics": lib.accuracy}
    trainer = Trainer(model, arguments, processing_class=tokenizer, **sets)
    trainer.train()
    trainer.save_model()
    trainer.args.train_sampling_strategy = "random"  # else the answers are in the order of lengths
    return trainer, trainer.predict(tokens["test"]).predictions.argmax(axis=-1)


def share(trainer: Trainer, hub: Any, text: str) -> None:
    """Push a model, load it in a process without luna-mega, and compare the score of a text with the score here."""
    trainer.push_to_hub()
    folder, names = Path(trainer.args.output_dir), sorted(hub.repositories["tester/mega"])
    print(f"  pushed {len(names)} files: {', '.join(name for name in names if '/' not in name)}")
    command, environment = [sys.executable, "-c", WITHOUT_PACKAGE, text], os.environ | {"HF_HOME": f"{folder}-cache"}
    result = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", errors="replace")
    if result.returncode:
        lib.fail(f"the model cannot be loaded without luna-mega:\n{result.stderr}")
    here, there = pipeline("text-classification", str(folder))(text)[0], float(result.stdout)
    print(f"  {text}: {here['label']} {here['score']:.4f}, without the package {there:.4f}")
    if abs(here["score"] - there) > 1e-5:
        lib.fail("the scores differ")


def plot(curves: dict[str, list[float]], right: dict[str, np.ndarray], lengths: np.ndarray, file: Path) -> None:
    """Plot the accuracy after each epoch, and the last accuracy by the length of the expression."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, bars = figure.subplots(1, 2, sharey=True)
    borders = np.linspace(*LENGTHS, 5).round().astype(int)
    groups, centers = np.digitize(lengths, borders[1:-1]), (borders[1:] + borders[:-1]) / 2
    for number, (name, values) in enumerate(right.items()):
        style = {
            "color": f"C{number}" if name in curves else "gray",
            "label": name.replace("luna", "Luna").replace("mega", "Mega"),
        }
        if name in curves:
            left.plot(range(1, len(curves[name]) + 1), curves[name], marker="o", **style)
        else:
            left.axhline(values.mean(), linestyle="--", **style)
        heights = [values[groups == group].mean() for group in range(len(centers))]
        bars.bar(centers + 2.4 * (number - 1), heights, width=2.2, **style)
    left.set(xlabel="epoch", ylabel="test accuracy", ylim=(0.5, 1), title="Value of boolean expressions")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(loc="upper left")
    bars.set(xlabel="tokens of the expression", title="After training, by length", xticks=borders)
    figure.savefig(file, dpi=120)


def main(argv: list[str] | None = None, hub: Any = None) -> dict[str, float]:
    (options,) = lib.parse_arguments((Arguments,), argv)
    lib.check_least(options, 0, "num_train_epochs", "learning_rate")
    disable_progress_bars()
    disable_progress_bar()
    torch.set_num_threads(1)  # two are slower for such small models, 10 times on a busy machine
    lib.use_onednn("cpu")
    output = Path(options.output_dir)
    shutil.rmtree(output / "models", ignore_errors=True)
    with step("1. A folder of transformers 4 loads as it is"):
        load_folder_of_transformers_4()
    with step("2. A checkpoint of fairseq is converted and compared with fairseq's outputs"):
        convert_checkpoint_of_fairseq(output / "models" / "converted")
    with step("3. Is a boolean expression true? The order of its words decides"):
        data = draw_expressions(options.seed, {"train": 4000, "test": 1000})
        texts, labels = data["test"]["text"][:], np.array(data["test"]["labels"][:])
        answers = {"bag of words": bag_of_words(data)}
        print(f"  {texts[0]} = {LABELS[labels[0]]}")
        print(f"  {len(data['train'])} for training, {len(labels)} for the test")
    curves = {}
    for number, name in enumerate(CONFIGS, start=4):
        with step(f"{number}. Train a {name.capitalize()} with Trainer"):
            trainer, answers[name] = train(name, data, options, output / "models" / name)
            curves[name] = [row["eval_accuracy"] for row in trainer.state.log_history if "eval_accuracy" in row]
    with step("6. A model is pushed to a Hub, and loads without luna-mega"):
        share(trainer, hub, texts[0])
    right = {name: values == labels for name, values in answers.items()}
    results = {name: float(values.mean()) for name, values in right.items()}
    plot(curves, right, np.array([len(text.split()) for text in texts]), output / "accuracy.png")
    (output / "accuracy.json").write_text(json.dumps(results | {"seed": options.seed}) + "\n", encoding="utf-8")
    print(f"\nPlot: {output / 'accuracy.png'}")
    print(
        "Two old checkpoints return the results of the programs that wrote them. Test accuracy on boolean expressions: "
        + ", ".join(f"{name} {value:.3f}" for name, value in results.items())
        + ". The Mega was shared with its code."
    )
    return results


if __name__ == "__main__":
    main(hub=hub)
