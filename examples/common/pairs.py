"""Models with a tower for each text of a pair, and their batches."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

import luna_mega
from common.arguments import fail


def pair_class(model_type: str, option: str, others: str = "luna or mega") -> type[PreTrainedModel]:
    """Return the class that encodes the two inputs of a pair one by one.

    Where there is none the script ends, and says which `option` asked for it and which types to take.
    """
    name = f"{model_type.capitalize()}ForSequencePairClassification"
    if not hasattr(luna_mega, name):
        fail(f"{option}: there is no {name}; take {others}")
    return getattr(luna_mega, name)


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
