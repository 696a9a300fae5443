"""The contract of the training scripts: a row per script says how its data and its options differ from the others.

`test_contract.py` runs, repeats and copies every row, `test_resume.py` interrupts it, `test_mistakes.py` misuses it,
and `test_labels.py` trains it on other labels. A new script is a new row of `SCRIPTS`.
"""

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from luna_mega.escaping import tsv_field
from tests.examples.runs import TINY, sentence, write

MEGA = "hidden_size=16,num_hidden_layers=1,intermediate_size=16,nffn_hidden_size=16,shared_representation_size=8"
MEGA += ",ema_projection_size=4"
CHUNKS = f"{MEGA},use_chunking=true,chunk_size=8"
BERT = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs"}
COLORS = ["red", "blue", "green", "black", "white", "brown", "gray", "pink"]
RATE, TONES = 1000, {"low": 20, "high": 110}
SIDE, HALVES = 8, ["left", "right"]


def reviews(size: int, seed: int) -> list[dict]:
    """Return reviews whose last word determines the label."""
    draw = random.Random(seed)
    rows = [{"label": index % 2} for index in range(size)]
    return [dict.fromkeys(("sentence", "text"), sentence(row["label"] == 1, draw)) | row for row in rows]


def named_reviews(size: int, seed: int) -> list[dict]:
    """Return reviews with the names of their labels; a tab is written as an escape."""
    return [row | {"label": ("bad", "go\tod")[row["label"]]} for row in reviews(size, seed)]


def texts(size: int, seed: int) -> list[str]:
    """Return lines of counting sequences, in which a masked word follows from its neighbors."""
    draw, words = random.Random(seed), list(WORDS)
    starts = [draw.randrange(6) for _ in range(size)]
    return [" ".join(words[(start + step) % 6] for step in range(draw.randrange(8, 16))) for start in starts]


def lines(size: int, seed: int) -> list[dict]:
    """Return texts and, between them, empty ones."""
    return [{"text": text} for text in [*texts(4 * size, seed), "", "  \n"]]


def questions(size: int, seed: int, level: str = "middle") -> list[dict]:
    """Return rows of RACE whose correct option contains "good"."""
    draw = random.Random(seed)
    examples = []
    for index in range(size):
        label = draw.randrange(4)
        options = [f"{'good' if option == label else 'bad'} {draw.choice(COLORS)}" for option in range(4)]
        question = draw.choice(["The door is _ .", "What is\n the  door ?", "_ and _", "Why ? "])
        article = f" The door\nis   {draw.choice(COLORS)} .\n" * draw.randrange(1, 6)
        row = {"article": article, "question": question, "options": options, "answer": "ABCD"[label]}
        examples.append({"example_id": f"{level}{index // 2}.txt", **row})
    return examples


def pairs(size: int, seed: int) -> list[dict]:
    """Return the same numbers in two languages, translated word by word."""
    draw = random.Random(seed)
    chosen = [draw.choices(list(WORDS), k=draw.randint(1, 4)) for _ in range(size)]
    return [
        {"translation": {"en": f"{' '.join(words)}.", "de": f"{' '.join(map(WORDS.get, words))}."}} for words in chosen
    ]


def draw_pixels(label: int, draw: np.random.Generator) -> np.ndarray:
    """Return an image that is bright in its left (label 0) or right half (label 1)."""
    pixels = draw.integers(0, 90, (SIDE, SIDE))
    pixels[:, SIDE // 2 * label :][:, : SIDE // 2] += 120
    return pixels.astype(np.uint8)


def images(size: int, seed: int) -> list[dict]:
    """Return raw gray pixels with the names of their labels."""
    draw = np.random.default_rng(seed)
    return [{"image": draw_pixels(index % 2, draw).tobytes(), "label": HALVES[index % 2]} for index in range(size)]


def tone(name: str, length: int, phase: float, rate: int = RATE) -> np.ndarray:
    """Return samples of a tone."""
    return 0.5 * np.sin(phase + 2 * np.pi * TONES[name] * np.arange(length) / rate).astype(np.float32)


def clips(size: int, seed: int, rate: int = RATE) -> list[dict]:
    """Return 16-bit samples of low and high tones; `take` is a number that clips of both have."""
    draw = np.random.default_rng(seed)
    examples = []
    for index in range(size):
        label = index % 2
        clip = tone(list(TONES)[label], int(draw.integers(40, 90)) * rate // RATE, draw.uniform(0, 6), rate)
        content = {"clip": (32767 * clip).astype("<i2").tobytes(), "sampling_rate": rate}
        examples.append(content | {"label": label, "take": index // 2 % 4})
    return examples


Predict = Callable[[ModuleType, Any, Any, list[dict]], list[str]]


def classify(inputs: Callable[..., dict[str, torch.Tensor]], names: str | None = None) -> Predict:
    """Return a function of a script, a model, its processor and rows that returns the names of the best outputs."""

    def predict(module: ModuleType, model: Any, processor: Any, rows: list[dict]) -> list[str]:
        with torch.no_grad():
            best = model(**inputs(module, processor, rows)).logits.argmax(-1).tolist()
        return [tsv_field(str((names or model.config.id2label)[index])) for index in best]

    return predict


def read_texts(module: ModuleType, tokenizer: Any, rows: list[dict]) -> dict[str, torch.Tensor]:
    """Return the inputs of a classifier of texts."""
    options = {"padding": True, "truncation": True, "max_length": 32, "return_tensors": "pt"}
    return tokenizer([row["text"] for row in rows], **options)


def read_options(module: ModuleType, tokenizer: Any, rows: list[dict]) -> dict[str, torch.Tensor]:
    """Return the inputs of a multiple-choice model."""
    data = module.DataArguments(max_seq_length=48)
    encoded = module.encode_split(Dataset.from_list(rows), "test", tokenizer, data)["input_ids"]
    batch = tokenizer.pad({"input_ids": [ids for options in encoded for ids in options]}, return_tensors="pt")
    return {name: value.view(len(rows), 4, -1) for name, value in batch.items()}


def read_clips(module: ModuleType, extractor: Any, rows: list[dict]) -> dict[str, torch.Tensor]:
    """Return the inputs of a classifier of audio."""
    samples = [np.frombuffer(row["clip"], "<i2") / 32768 for row in rows]
    return extractor(samples, sampling_rate=RATE, padding=True, return_tensors="pt")


def read_images(module: ModuleType, processor: Any, rows: list[dict]) -> dict[str, torch.Tensor]:
    """Return the inputs of a classifier of images."""
    pixels = [np.frombuffer(row["image"], np.uint8).reshape(1, SIDE, SIDE) for row in rows]
    return processor(pixels, input_data_format="channels_first", return_tensors="pt")


def translate(module: ModuleType, model: Any, tokenizer: Any, rows: list[dict]) -> list[str]:
    """Return translations."""
    found = [model.generate(**tokenizer(row["translation"]["en"], return_tensors="pt"))[0] for row in rows]
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


def is_right(summary: dict) -> bool:
    """Return whether nearly all validation rows are classified correctly."""
    return summary["eval_accuracy"] > 0.9


LUNA = ["--config_overrides", f"{TINY},dropout=0.1,pooling=mean", "--vocab_size", 300]
SMALL_MEGA = ["--model_type", "mega", "--config_overrides"]
EIGHT = ["--config_overrides", f"{TINY},max_position_embeddings=8"]
REDUCED = "--max_seq_length {} is reduced to 8, because the model has 8 positions"


class Script(NamedTuple):
    """A training script; the defaults are those of a classifier of texts.

    Attributes:
        rows: Function of a number and a seed that returns rows of the data.
        model: Options of a tiny new model.
        auto: Class that loads the saved model.
        learned: Function of the metrics that returns whether the model has learned.
        steps: Number of training steps after which it has.
        data: Options of the data.
        short: Options of short inputs.
        predict: Function of the script, the model, its processor and rows that returns the predictions.
        written: File of the predictions.
        texts: Columns that contain text.
        label: Column that is required except in test splits.
        suffix: Format of the files.
        processor: Class that loads the saved tokenizer or processor.
        limits: Options of a model with fewer positions than the default lengths of the script.
        reduced: What the script prints about each of these lengths.
    """

    rows: Callable[[int, int], list[dict]]
    model: list = LUNA
    auto: type = AutoModelForSequenceClassification
    learned: Callable[[dict], bool] = is_right
    steps: int = 40
    data: list = []
    short: list = ["--max_seq_length", 32]
    predict: Predict | None = classify(read_texts)
    written: str | None = "predictions.tsv"
    texts: tuple[str, ...] = ("text",)
    label: str | None = "label"
    suffix: str = "jsonl"
    processor: type = AutoTokenizer
    limits: list = EIGHT
    reduced: tuple[str, ...] = (REDUCED.format(512),)

    def write(self, folder: Path, **sizes: int) -> Path:
        """Write splits of these sizes, and return their folder."""
        for split, size in sizes.items():
            write(self.rows(size, len(split)), folder / f"{split}.{self.suffix}")
        return folder


WITHOUT_LABELS: dict[str, Any] = {"predict": None, "written": None, "label": None}
WITHOUT_TEXTS: dict[str, Any] = {"texts": (), "suffix": "parquet", "limits": [], "reduced": (), "short": []}
SCRIPTS = {
    "run_glue": Script(
        reviews,
        data=["--task_name", "sst2"],
        predict=classify(read_texts, "01"),
        written="SST-2.tsv",
        texts=("sentence",),
        suffix="csv",
        reduced=(REDUCED.format(128),),
    ),
    "run_text_classification": Script(named_reviews),
    "run_race": Script(
        questions,
        auto=AutoModelForMultipleChoice,
        learned=lambda summary: summary["eval_accuracy"] > 0.8,
        steps=48,
        short=["--max_seq_length", 48],
        predict=classify(read_options, "ABCD"),
        texts=("article", "question"),
        label="answer",
        suffix="parquet",
    ),
    "run_mlm": Script(
        lines,
        auto=AutoModelForMaskedLM,
        learned=lambda summary: summary["eval_perplexity"] < 20,
        suffix="parquet",
        **WITHOUT_LABELS,
    ),
    "run_clm": Script(
        lines,
        model=[*SMALL_MEGA, CHUNKS],
        auto=AutoModelForCausalLM,
        learned=lambda summary: summary["eval_loss"] < 2.2,
        steps=32,
        data=["--tokenization", "char", "--line_end", "newline"],
        short=["--block_size", 16, "--eval_context", 32],
        limits=["--model_type", "luna", *EIGHT],
        reduced=("--block_size 512 is reduced to 8", "--eval_context 8192 is reduced to 8"),
        **WITHOUT_LABELS,
    ),
    "run_audio": Script(
        clips,
        model=[*SMALL_MEGA, f"{CHUNKS},pooling=mean,normalization_type=batchnorm"],
        steps=32,
        data=["--audio_column", "clip"],
        predict=classify(read_clips),
        processor=AutoFeatureExtractor,
        **WITHOUT_TEXTS,
    ),
    "run_image_classification": Script(
        images,
        model=[*SMALL_MEGA, f"{MEGA},pooling=mean", "--patch_size", 4],
        auto=AutoModelForImageClassification,
        steps=32,
        data=["--center_crop", "false"],
        predict=classify(read_images),
        processor=AutoImageProcessor,
        **WITHOUT_TEXTS,
    ),
    "lra.run_lra": Script(
        reviews,
        model=["--config_overrides", f"{TINY},dropout=0.1"],
        learned=lambda summary: 0 <= summary["eval_accuracy"] <= 1,
        steps=8,
        data=["--task_name", "text"],
        reduced=(REDUCED.format(4096),),
    ),
    "run_translation": Script(
        pairs,
        model=["--config_overrides", f"{TINY},dropout=0.1", "--vocab_size", 270],
        auto=AutoModelForSeq2SeqLM,
        learned=lambda summary: 0 <= summary["eval_bleu"] <= 100,
        steps=8,
        short=["--max_source_length", 24, "--max_target_length", 24],
        predict=translate,
        written="translations.test.de",
        texts=(),
        label=None,
        suffix="parquet",
        limits=["--config_overrides", f"{TINY},max_position_embeddings=9,max_target_positions=7", "--vocab_size", 270],
        reduced=("--max_source_length 128 is reduced to 9", "--max_target_length 128 is reduced to 7"),
    ),
}
CLASSIFIERS = [name for name, row in SCRIPTS.items() if row.label]
