"""Classifiers: labels, inputs of texts and text pairs, accuracy and test predictions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from datasets import ClassLabel, Dataset
from torch.utils.data import Dataset as TorchDataset
from transformers import EvalPrediction, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.hf_argparser import HfArg

from luna_mega.escaping import terminal
from luna_mega.training.arguments import fail
from luna_mega.training.data import ClassifierArguments
from luna_mega.training.models import CheckpointArguments, are_default, label_names
from luna_mega.training.runs import save, write_lines
from luna_mega.training.streams import Redrawn


class Labels(NamedTuple):
    """Labels of a classifier.

    Attributes:
        names: Label names of the head, in the order of its outputs.
        outputs: Output of each label name of the data.
    """

    names: list[str]
    outputs: dict[str, int]


def class_names(splits: dict[str, Dataset], column: str) -> list[str]:
    """Return the label names of the training split or, without one, of all splits; empty without labels."""
    chosen = {"train": splits["train"]} if "train" in splits else splits
    chosen = {name: split for name, split in chosen.items() if column in split.column_names}
    for split in chosen.values():
        if isinstance(split.features[column], ClassLabel):
            return split.features[column].names
    labels = {label for name, split in chosen.items() for label in split[column] if not _is_hidden(label, name)}
    if not labels - {None} and not all(name.startswith("test") for name in chosen):
        fail(f"the column {column} has no labels; fill it, or pass another --label_column")
    return [str(label) for label in sorted(labels - {None})]


def match_labels(model: CheckpointArguments, names: Sequence[str], training: TrainingArguments) -> Labels:
    """Match the label `names` of the data with the names of the model; the case of letters may differ.

    A head whose names contain those of the data keeps its names and their order. A new head, and a head whose names are
    transformers' defaults (`LABEL_0`), have the names of the data. Exit if the names differ, unless a new head is
    trained (`--ignore_mismatched_sizes`).
    """
    own, source = label_names(model), model.model_name_or_path
    if own is None or (are_default(own) and not set(own) & set(names)):
        return _match_order(source, own, names, training)
    outputs = {name: index for index, name in enumerate(own)}
    folded = {name.casefold(): index for name, index in outputs.items()}
    if len(folded) == len(own):
        outputs |= {name: folded[name.casefold()] for name in names if name.casefold() in folded}
    unknown = [name for name in names if name not in outputs]
    if unknown and training.do_train and model.ignore_mismatched_sizes:
        _say(training, f"the labels {_listed(own)} of {source} are replaced by a new head for {_listed(names)}")
        return Labels(list(names), {name: index for index, name in enumerate(names)})
    if unknown:
        advice = "pass --ignore_mismatched_sizes to train a new head" if training.do_train else "rename the latter"
        fail(f"{source} has the labels {_listed(own)}, but not {_listed(unknown)} of the data; {advice}")
    if names and list(names) != own:
        _say(training, f"labels are matched by name: {source} keeps {_listed(own)}; the data has {_listed(names)}")
    return Labels(own, outputs)


def _match_order(
    source: str | None, own: list[str] | None, names: Sequence[str], training: TrainingArguments
) -> Labels:
    """Return the labels of a head that has no label names."""
    outputs = {name: index for index, name in enumerate(names)}
    if training.do_train or own is None:
        return Labels(list(names), outputs)
    if all(name.isdecimal() and int(name) < len(own) for name in names):  # ids, or no labels
        return Labels(own, {name: int(name) for name in names})
    if len(names) != len(own):
        fail(f"{source} has {len(own)} labels without names, but the data has {len(names)}: {_listed(names)}")
    _say(training, f"{source} has no label names; its outputs are, in the order of the data, {_listed(names)}")
    return Labels(list(names), outputs)


def _say(training: TrainingArguments, line: str) -> None:
    if training.process_index == 0:
        print(terminal(" ".join(line.split())), flush=True)


def _listed(names: Iterable[str], most: int = 20) -> str:
    """Return the first names as text, separated by commas."""
    names = list(names)
    return ", ".join(names[:most]) + (f", ... ({len(names)} labels)" if len(names) > most else "")


def _is_hidden(label: Any, name: str) -> bool:
    """Return whether a label is unknown: None or -1 in a test split."""
    return name.startswith("test") and label in (None, -1)


def class_numbers(
    split: Dataset, column: str, outputs: dict[str, int], name: str, classes: Sequence[str] = ()
) -> list[int]:
    """Return the outputs of the head for the labels of a split; exit if a label is not in `outputs`.

    Missing labels are -100: all of them if there is no such column, and None and -1 in a test split.

    Args:
        split: The split.
        column: Column with label names, or with ids if it is a `ClassLabel` or `classes` are given.
        outputs: Output of each label name.
        name: Name of the split.
        classes: Names of the ids of a column without names.
    """
    if column not in split.column_names:
        return [-100] * len(split)
    feature, numbers = split.features[column], []
    classes = feature.names if isinstance(feature, ClassLabel) else classes
    for row, label in enumerate(split[column]):
        if isinstance(label, int) and 0 <= label < len(classes):
            label = classes[label]
        hidden = _is_hidden(label, name)
        if not hidden and str(label) not in outputs:
            fail(f"split {name}, row {row}: label {label!r} is not one of {_listed(outputs)}")
        numbers.append(-100 if hidden else outputs[str(label)])
    return numbers


@dataclass
class TextArguments(ClassifierArguments):
    """Options of text classifiers."""

    token_dropout: float = HfArg(default=0.0, help="share of the training tokens to replace by the mask token")
    max_seq_length: int = HfArg(default=512, help="maximum length; longer inputs are truncated")


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

    `--token_dropout` hides tokens of the split `train`.
    """

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [batch[column] for column in columns]
        return dict(tokenizer(*texts, truncation=True, max_length=data.max_seq_length))

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
        ids = row["input_ids"]
        hidden = (torch.rand(len(ids), generator=numbers) < share).tolist()
        pairs = zip(ids, hidden, strict=True)
        return row | {"input_ids": [mask if hide and token not in special else token for token, hide in pairs]}

    return Redrawn(split, hide, seed)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the accuracy over the rows with a label."""
    known = prediction.label_ids != -100
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right[known].mean())} if known.any() else {}


def write_predictions(trainer: Trainer, split: Dataset) -> dict[str, Any]:
    """Write the predicted labels of the test split; return the metrics."""
    output = trainer.predict(split)
    names = trainer.model.config.id2label
    lines = [f"{index}\t{names[best]}" for index, best in enumerate(output.predictions.argmax(-1))]
    write_lines(trainer, "predictions.tsv", ["index\tprediction", *lines])
    return save(trainer, "test", output.metrics)
