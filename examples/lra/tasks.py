"""The inputs of a model for each task of Long Range Arena, and the points in which the papers' code differs."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, concatenate_datasets
from tokenizers import processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lra.listops import TOKENS
from luna_mega import training as lib

GRAYS = 256


@dataclass(frozen=True)
class LraTask:
    """One task.

    Args:
        columns: Input columns, two for pairs.
        classes: Number of classes.
        max_length: Number of positions in the benchmark.
        preset: Class method of `LunaConfig` and `MegaConfig` with the model of the paper.
        kind: "words", "bytes" or "pixels".
        scale: Mean and standard deviation of pixels from 0 to 1, as in the recipes of Mega.
    """

    columns: tuple[str, ...]
    classes: int
    max_length: int
    preset: str
    kind: str
    scale: tuple[float, float] = (0.5, 0.5)

    @property
    def pairs(self) -> bool:
        return len(self.columns) == 2


TASKS = {
    "listops": LraTask(("source",), 10, 2000, "lra_listops", "words"),
    "text": LraTask(("text",), 2, 4096, "lra_text", "bytes"),
    "retrieval": LraTask(("text1", "text2"), 2, 4000, "lra_retrieval", "bytes"),
    "image": LraTask(("image",), 10, 1024, "lra_image", "pixels", (0.48, 0.24)),
    "pathfinder": LraTask(("image",), 2, 1024, "lra_pathfinder", "pixels"),
    "pathx": LraTask(("image",), 2, 16_384, "lra_pathfinder128", "pixels"),
}


@dataclass(frozen=True)
class Convention:
    """Choices that apply to all tasks, see the table in examples/README.md.

    Args:
        first_token: Whether sequences start with `<s>`, the `<CLS>` of the original code.
        cuts_end: Whether truncation also removes `</s>`.
        pixels: "values" or "tokens".
        decays_all: Whether weight decay also applies to biases, norms and moving averages.
        tests_on: Tasks whose test rows are used for validation, and whose validation rows for training.
        fields: Fields of the configuration.
    """

    first_token: bool = False
    cuts_end: bool = False
    pixels: str = "values"
    decays_all: bool = False
    tests_on: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


CONVENTIONS = {
    "ours": Convention(fields={"pooling": "mean"}),
    "luna": Convention(True, True, "tokens", True, ("text",)),  # pooling of the preset
    "mega": Convention(False, True, "values", True, ("text",), {"pooling": "mean"}),
}


def choose_splits(splits: dict[str, Dataset], task: str, convention: Convention) -> dict[str, Dataset]:
    """Return the splits of the convention."""
    if task not in convention.tests_on:
        return splits
    train = concatenate_datasets([splits[name] for name in ("train", "validation") if name in splits])
    return {"train": train, "validation": splits["test"], "test": splits["test"]}


def label_names(split: Dataset, classes: int) -> tuple[str, ...]:
    """Return the label names, by default the ids; exit if their number is wrong."""
    feature = split.features["label"]
    if not isinstance(feature, ClassLabel):
        return tuple(map(str, range(classes)))
    if feature.num_classes != classes:
        lib.fail(f"the labels have {feature.num_classes} classes; this task has {classes}")
    return tuple(feature.names)


def make_tokenizer(kind: str, convention: Convention, max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, bytes or gray levels that adds `</s>`."""
    options = {"mask_token": lib.tokenizers.MASK_TOKEN, "model_max_length": max_length}
    options["split_special_tokens"] = True  # texts contain no special tokens
    if kind == "bytes":
        tokenizer = lib.tokenizers.make_bytes(**options)
    else:
        words = TOKENS if kind == "words" else map(str, range(GRAYS))
        tokenizer = lib.tokenizers.make_words(words, **options)
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    template = "<s> $A </s>" if convention.first_token else "$A </s>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=ends)
    return tokenizer


def encode_bytes(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, convention: Convention, max_length: int
) -> list[list[int]]:
    """Return the ids of bytes; the tokenizer is 50 times slower, because it processes a text as one word."""
    ids = np.array(tokenizer.convert_tokens_to_ids([symbol for _, symbol in sorted(bytes_to_unicode().items())]))
    if (ids == tokenizer.unk_token_id).any():
        lib.fail("the tokenizer of the model does not support bytes: some of the 256 have no token")
    first = [tokenizer.bos_token_id] * convention.first_token
    most = max_length if convention.cuts_end else max_length - len(first) - 1
    rows = [ids[np.frombuffer(text.encode(), np.uint8)[:most]].tolist() for text in texts]
    return [[*first, *row, tokenizer.eos_token_id][:max_length] for row in rows]


def encode_words(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, convention: Convention, max_length: int
) -> list[list[int]]:
    """Return the ids of words."""
    cut = {} if convention.cuts_end else {"truncation": True, "max_length": max_length}
    ids = tokenizer(texts, return_attention_mask=False, verbose=False, **cut)["input_ids"]
    return [row[:max_length] for row in ids]


def encode_texts(
    split: Dataset,
    task: LraTask,
    tokenizer: PreTrainedTokenizerFast,
    convention: Convention,
    max_length: int,
    **options,
) -> Dataset:
    """Return a split with `input_ids`, `pair_input_ids` for pairs, and `labels`."""
    names = dict(zip(("input_ids", "pair_input_ids"), task.columns, strict=False))
    to_ids = encode_bytes if task.kind == "bytes" else encode_words

    def encode(batch: dict[str, list]) -> dict[str, list]:
        ids = {name: to_ids(batch[column], tokenizer, convention, max_length) for name, column in names.items()}
        return ids | {"labels": batch["label"]}

    return split.map(encode, batched=True, remove_columns=split.column_names, **options)


def encode_images(
    split: Dataset,
    name: str,
    task: LraTask,
    tokenizer: PreTrainedTokenizerFast | None,
    convention: Convention,
    max_length: int,
) -> Dataset:
    """Return the split with `input_values` or, with a tokenizer, `input_ids`, which are computed on access."""
    (column,), side = task.columns, math.isqrt(max_length)
    scale, (mean, deviation) = lib.images.pixel_scale(split, column), task.scale
    if tokenizer is not None:
        zero, first, last = tokenizer.convert_tokens_to_ids(["0", "<s>", "</s>"])

    def encode_one(value: Any) -> torch.Tensor:
        image = lib.images.read_image(value, 1, scale)
        if image.size != (side, side):
            size = " x ".join(map(str, image.size))
            lib.fail(f"split {name}: an image has {size} pixels, but {max_length} positions require {side} x {side}")
        grays = torch.from_numpy(np.array(image).reshape(-1))
        if tokenizer is None:
            return (grays / (GRAYS - 1) - mean) / deviation
        ids = grays.long() + zero
        if convention.first_token:
            ids = torch.nn.functional.pad(torch.nn.functional.pad(ids, (1, 0), value=first), (0, 1), value=last)
        return ids[:max_length]

    def encode(batch: dict[str, list]) -> dict[str, list]:
        key = "input_values" if tokenizer is None else "input_ids"
        return {key: [encode_one(value) for value in batch[column]], "labels": batch["label"]}

    encode_one(split[0][column])
    return split.with_transform(encode)


def gray_levels(values: torch.Tensor, task: LraTask) -> torch.Tensor:
    """Return the gray levels 0 to 255 of input values."""
    mean, deviation = task.scale
    return ((values * deviation + mean) * (GRAYS - 1)).round().long()
