"""Texts and pairs of texts for a classifier: a pair is one sequence, or has a tower for each text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerBase

from common.arguments import fail
from common.data import ClassifierArguments
from common.model import pair_class


@dataclass
class TextArguments(ClassifierArguments):
    """Options of classifiers of texts."""

    two_towers: bool = field(
        default=False,
        metadata={"help": "encode the two texts of a pair one by one, and classify the pair of their vectors"},
    )
    token_dropout: float = field(
        default=0.0, metadata={"help": "hide this share of the training tokens, anew each time"}
    )


def check_pairs(data: TextArguments, columns: Sequence[str]) -> None:
    """End the script when it is asked for two towers for the texts of one column."""
    if data.two_towers and len(columns) == 1:
        fail(f"--two_towers: {columns[0]} is one column of texts, and pairs have two")


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[list[str]], max_length: int, two_towers: bool
) -> dict[str, list]:
    """Return the inputs of a model for one or two columns of texts; those of a second tower are called `pair_*`."""
    cut = {"truncation": True, "max_length": max_length}
    if not two_towers:
        return dict(tokenizer(*texts, **cut))
    first, second = (tokenizer(column, **cut) for column in texts)
    return dict(first) | {f"pair_{name}": value for name, value in second.items()}


def choose_model(
    data: TextArguments, model_type: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[type, Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]]:
    """Return the class of the model, and the function that makes a batch of rows."""
    if not data.two_towers:
        return AutoModelForSequenceClassification, DataCollatorWithPadding(tokenizer)
    return pair_class(model_type, "--two_towers"), make_pair_collator(tokenizer)


def make_pair_collator(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """Return the function that makes a batch of rows in which each tower is as long as its longest text."""
    collate_first = DataCollatorWithPadding(tokenizer)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        names = [name for name in rows[0] if name.startswith("pair_")]
        padded = tokenizer.pad(
            {name.removeprefix("pair_"): [row[name] for row in rows] for name in names}, return_tensors="pt"
        )
        first = [{name: value for name, value in row.items() if name not in names} for row in rows]
        return dict(collate_first(first)) | {f"pair_{name}": value for name, value in padded.items()}

    return collate
