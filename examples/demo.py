"""Load two old checkpoints, then train a small Luna and a small Mega on text: the main functions in two minutes.

    make demo

Nothing is downloaded. The texts are sentences from docstrings of Python's standard library, and the classes are the
packages in which they stand. The checkpoints are test fixtures that transformers 4 and fairseq wrote.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import ast
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
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

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "parity" / "fixtures"
CLASSES = ["asyncio", "email", "xml"]
# Mega's default initializer_range, 0.02, is too small for narrow models.
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "initializer_range": 0.1}
CONFIGS = {
    "luna": (luna_mega.LunaConfig, {"num_attention_heads": 4, "projection_length": 16}),
    "mega": (luna_mega.MegaConfig, {"nffn_hidden_size": 128, "shared_representation_size": 32}),
}
# In this program the code comes from the folder, because luna_mega cannot be imported.
WITHOUT_PACKAGE = """
import sys
sys.modules["luna_mega"] = None
from transformers import pipeline
classify = pipeline("text-classification", sys.argv[1], trust_remote_code=True)
print(classify(sys.argv[2])[0]["score"])
"""


@dataclass
class Arguments:
    output_dir: str = HfArg(
        default="outputs/demo", help="folder for the plot and the models; `models` in it is replaced"
    )
    num_train_epochs: float = HfArg(default=6.0, help="epochs of training")
    learning_rate: float = HfArg(default=3e-3, help="peak learning rate")
    seed: int = HfArg(default=0, help="seed of the split, the weights and the order of the sentences")


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


def sentences(folder: Path) -> list[str]:
    """Return the distinct sentences of at least four words in the docstrings of a package: lowercase words only."""
    found = set()
    for file in folder.rglob("*.py"):
        with warnings.catch_warnings(action="ignore"):  # about escape sequences
            nodes = ast.walk(ast.parse(file.read_text("utf-8")))
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found |= set(re.split(r"(?<=[.!?])\s+|\n\s*\n", ast.get_docstring(node) or ""))
    words = (re.findall("[a-z]+", sentence.lower()) for sentence in found)
    return sorted({" ".join(sentence) for sentence in words if len(sentence) >= 4})


def load_sentences(seed: int) -> dict[str, Dataset]:
    """Return 80 % of the sentences of each class for training and 20 % for the test."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [sentences(library / name) for name in CLASSES]
    texts, labels = sum(found, []), np.repeat(range(len(CLASSES)), [len(part) for part in found])
    parts = train_test_split(texts, labels, test_size=0.2, stratify=labels, random_state=seed)
    return {
        name: Dataset.from_dict({"text": parts[i], "labels": parts[i + 2]}) for i, name in enumerate(("train", "test"))
    }


def bag_of_words(data: dict[str, Dataset]) -> float:
    """Return the test accuracy of a logistic regression that reads TF-IDF of words and bigrams."""
    classifier = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(C=30, max_iter=1000))
    classifier.fit(data["train"]["text"][:], data["train"]["labels"][:])
    return classifier.score(data["test"]["text"][:], data["test"]["labels"][:])


def train(name: str, data: dict[str, Dataset], options: Arguments, folder: Path) -> list[float]:
    """Train a model, save it with its tokenizer, and return the test accuracy after each epoch."""
    tokenizer = lib.tokenizers.train_bpe(data["train"]["text"], 2000, model_max_length=128)
    tokens = {split: rows.map(lambda row: tokenizer(row["text"], truncation=True)) for split, rows in data.items()}
    config_class, fields = CONFIGS[name]
    config = config_class(vocab_size=len(tokenizer), pooling="mean", **SIZES, **fields, **lib.label_fields(CLASSES))
    torch.manual_seed(options.seed)
    model = AutoModelForSequenceClassification.from_config(config)
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=options.num_train_epochs,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.1,
        per_device_train_batch_size=32,
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
    return [row["eval_accuracy"] for row in trainer.state.log_history if "eval_accuracy" in row]


def load_without_package(folder: Path, text: str) -> None:
    """Load a model in a process without luna-mega, and compare the score of a text with the score in this process."""
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(folder), text]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if result.returncode:
        lib.fail(f"{folder} cannot be loaded without luna-mega:\n{result.stderr}")
    here = pipeline("text-classification", str(folder))(text)[0]
    print(f"  {text!r}: {here['label']} {here['score']:.4f}, without the package {float(result.stdout):.4f}")
    if abs(here["score"] - float(result.stdout)) > 1e-5:
        lib.fail("the scores differ")


def plot(curves: dict[str, list[float]], baseline: float, file: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, accuracies in curves.items():
        axes.plot(range(1, len(accuracies) + 1), accuracies, marker="o", label=name.capitalize())
    axes.axhline(baseline, color="gray", linestyle="--", label="bag of words")
    axes.set(
        xlabel="epoch",
        ylabel="test accuracy",
        title=f"Sentences of the documentation of Python {platform.python_version()}",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    figure.savefig(file, dpi=120)


def main(argv: list[str] | None = None) -> dict[str, float]:
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
    with step(f"3. Which package of {', '.join(CLASSES)} is a sentence of the documentation from?"):
        data = load_sentences(options.seed)
        baseline = bag_of_words(data)
        print(f"  {len(data['train'])} sentences for training, {len(data['test'])} for the test")
    curves = {}
    for number, name in enumerate(CONFIGS, start=4):
        with step(f"{number}. Train a {name.capitalize()} with Trainer"):
            curves[name] = train(name, data, options, output / "models" / name)
    with step("6. The saved folder loads without luna-mega"):
        load_without_package(output / "models" / "mega", data["test"]["text"][0])
    plot(curves, baseline, output / "accuracy.png")
    results = {name: accuracies[-1] for name, accuracies in curves.items()} | {"bag of words": baseline}
    print("\nTest accuracy: " + ", ".join(f"{name} {value:.3f}" for name, value in results.items()))
    print(f"Plot: {output / 'accuracy.png'}")
    return results


if __name__ == "__main__":
    main()
