"""Texts and pairs of texts for a classifier: a pair is one sequence, or has a tower for each text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerBase

from common.arguments import fail
from common.data import ClassifierArguments


@dataclass
class TextArguments(ClassifierArguments):
    """Options of classifiers of texts."""

    two_towers: bool = field(
        default=False,
        metadata={"help": "encode the two texts of a pair one by one, and classify the pair of their vectors"},
    )
    token_dropout: float = field(
        default=0.0, metadata={"help": "hide this share of the training tokens, drawn anew in each epoch"}
    )


def check_pairs(data: TextArguments, columns: Sequence[str]) -> None:
    """End the script when it is asked for two towers for the texts of one column."""
    if data.two_towers and len(columns) == 1:
        fail(f"--two_towers: {columns[0]} is one column of texts, and pairs have two")


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[list[str]], max_length: int, two_towers: bool
) -> dict[str, list]:
    """Return the inputs of a model for one or two columns of texts; a second tower reads `pair_*`."""
    cut = {"truncation": True, "max_length": max_length}
    if not two_towers:
        return dict(tokenizer(*texts, **cut))
    first, second = (tokenizer(column, **cut) for column in texts)
    return dict(first) | {f"pair_{name}": value for name, value in second.items()}


def hide_tokens(split: Dataset, tokenizer: PreTrainedTokenizerBase, share: float, seed: int) -> TorchDataset:
    """Replace `share` of the tokens, drawn anew in every epoch, by `<mask>`; special tokens stay."""
    if not share:
        return split
    if not 0.0 <= share < 1.0:
        fail(f"--token_dropout {share}: must be in [0, 1)")
    if tokenizer.mask_token_id is None:
        fail("--token_dropout needs a tokenizer with a mask token")
    from common.redrawn import Redrawn  # read where it is asked for

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
    """Return the class of the model, and the function that makes a batch of rows."""
    if not data.two_towers:
        return AutoModelForSequenceClassification, DataCollatorWithPadding(tokenizer)
    from common.pairs import make_pair_collator, pair_class  # read where it is asked for

    return pair_class(model_type, "--two_towers"), make_pair_collator(tokenizer)
