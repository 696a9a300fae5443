"""Inputs of classifiers of texts and text pairs; a pair is one sequence, or each text has a separate tower."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

import luna_mega
from luna_mega.training.arguments import fail
from luna_mega.training.data import ClassifierArguments
from luna_mega.training.streams import Redrawn


@dataclass
class TextArguments(ClassifierArguments):
    """Options of text classifiers."""

    two_towers: bool = HfArg(default=False, help="encode the texts of a pair separately, and classify their vectors")
    token_dropout: float = HfArg(default=0.0, help="share of the training tokens to replace by the mask token")
    max_seq_length: int = HfArg(default=512, help="maximum length; longer inputs are truncated")


def check_pairs(data: TextArguments, columns: Sequence[str]) -> None:
    """Exit if `--two_towers` is set for a single text column."""
    if data.two_towers and len(columns) == 1:
        fail(f"--two_towers: {columns[0]} is one text column, and pairs have two")


def encode_split(
    split: Dataset,
    name: str,
    columns: Sequence[str],
    labels: Sequence[float] | None,
    tokenizer: PreTrainedTokenizerBase,
    data: TextArguments,
    training: TrainingArguments,
) -> TorchDataset:
    """Return the inputs of one or two text columns and, unless they are None, the `labels`.

    Inputs of a second tower have the prefix `pair_`. `--token_dropout` hides tokens of the split `train`.
    """
    cut = {"truncation": True, "max_length": data.max_seq_length}

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [batch[column] for column in columns]
        if not data.two_towers:
            return dict(tokenizer(*texts, **cut))
        # The texts of a pair have no token types.
        first, second = (tokenizer(column, **cut, return_token_type_ids=False) for column in texts)
        return dict(first) | {f"pair_{name}": value for name, value in second.items()}

    options = {"remove_columns": split.column_names, "keep_in_memory": training.world_size == 1, "desc": name}
    encoded = split.map(encode, batched=True, **options)
    encoded = encoded if labels is None else encoded.add_column("labels", labels)
    return hide_tokens(encoded, tokenizer, data.token_dropout, training.seed) if name == "train" else encoded


def hide_tokens(split: Dataset, tokenizer: PreTrainedTokenizerBase, share: float, seed: int) -> TorchDataset:
    """Replace `share` of the tokens with `<mask>`, differently in each epoch; special tokens are kept."""
    if not share:
        return split
    if not 0.0 <= share < 1.0:
        fail(f"--token_dropout {share}: must be in [0, 1)")
    if tokenizer.mask_token_id is None:
        fail("--token_dropout needs a tokenizer with a mask token")
    special, mask = set(tokenizer.all_special_ids), tokenizer.mask_token_id

    def hide(row: dict[str, Any], numbers: torch.Generator) -> dict[str, Any]:
        return row | {name: hide_some(ids, numbers) for name, ids in row.items() if name.endswith("input_ids")}

    def hide_some(ids: list[int], numbers: torch.Generator) -> list[int]:
        hidden = (torch.rand(len(ids), generator=numbers) < share).tolist()
        return [mask if hide and token not in special else token for token, hide in zip(ids, hidden, strict=True)]

    return Redrawn(split, hide, seed)


def choose_model(
    data: TextArguments, model_type: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[type, Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]]:
    """Return the model class and the collator."""
    if not data.two_towers:
        return AutoModelForSequenceClassification, DataCollatorWithPadding(tokenizer)
    return pair_class(model_type, "--two_towers"), make_pair_collator(tokenizer)


def pair_class(model_type: str, option: str, others: str = "luna or mega") -> type[PreTrainedModel]:
    """Return the class that encodes the inputs of a pair separately; exit if there is none for the `option`."""
    name = f"{model_type.capitalize()}ForSequencePairClassification"
    if not hasattr(luna_mega, name):
        fail(f"{option}: there is no {name}; use {others}")
    return getattr(luna_mega, name)


def make_pair_collator(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """Return a collator that pads each tower to its longest text."""
    pad = DataCollatorWithPadding(tokenizer)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        first = [{name: x for name, x in row.items() if not name.startswith("pair_")} for row in rows]
        second = [{name.removeprefix("pair_"): x for name, x in row.items() if name not in first[0]} for row in rows]
        return dict(pad(first)) | {f"pair_{name}": x for name, x in pad(second).items()}

    return collate
