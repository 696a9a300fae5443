"""Classifiers: labels, inputs of texts and text pairs, accuracy and test predictions."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from datasets import ClassLabel, Dataset
from torch.utils.data import Dataset as TorchDataset
from transformers import EvalPrediction, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.hf_argparser import HfArg

from luna_mega.errors import shown
from luna_mega.escaping import tsv_field
from luna_mega.training.arguments import fail, say
from luna_mega.training.data import ClassifierArguments
from luna_mega.training.models import CheckpointArguments, are_default, label_names
from luna_mega.training.runs import save, write_lines
from luna_mega.training.streams import Redrawn

# Names in lower case that mean "no label" unless a class has such a name. Empty fields are never a class.
UNKNOWN = ("none", "na", "n/a", "nan", "null", "-1")


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
    names = {label for name, split in chosen.items() for label in _read_labels(split, column, name)} - {None}
    if not names and not all(name.startswith("test") for name in chosen):
        fail(f"the column {column} has no labels; fill it, or pass another --label_column")
    # The order of numbers does not depend on whether the file stores them as text.
    numbers = all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", label) for label in names)
    return sorted(names, key=lambda label: (float(label), label)) if numbers else sorted(names)


def _read_labels(split: Dataset, column: str, name: str, classes: Sequence[str] = ()) -> list[str | None]:
    """Return the label names of a split, None for empty labels; exit if a label is not a name or a number."""
    feature, labels = split.features[column], []
    classes = feature.names if isinstance(feature, ClassLabel) else classes
    for row, label in enumerate(split[column]):
        if isinstance(label, list | dict | bytes):
            fail(f"split {name}, row {row}: label {shown(label)} is not a name or a number; each row has one label")
        # A column of integers with empty fields contains floating-point numbers; in CSV files, numbers are text.
        text = str(label)
        number = int(float(text)) if re.fullmatch(r"-?[0-9]{1,15}(\.0+)?", text) else None
        if label is None or text.strip() == "" or (isinstance(label, float) and math.isnan(label)):
            labels.append(None)
        elif classes and number is not None and not (isinstance(label, str) and label in classes):
            known = 0 <= number < len(classes)
            labels.append(classes[number] if known else None if number == -1 else text)
        else:
            labels.append(str(number) if isinstance(label, float) and number is not None else text)
    return labels


def match_labels(model: CheckpointArguments, names: Sequence[str], training: TrainingArguments) -> Labels:
    """Match the label `names` of the data with the names of the model; the case of letters may differ.

    A head whose names contain those of the data keeps its names and their order. A new head, and a head whose names are
    transformers' defaults (`LABEL_0`), have the names of the data. Exit if the names differ, unless a new head is
    trained (`--ignore_mismatched_sizes`). In an evaluation, names that mean "no label" (`UNKNOWN`) may differ.
    """
    own, source = label_names(model), model.model_name_or_path
    if own is None and len(names) == 1:
        advice = "shuffle the rows of the data if it has more, or raise --max_train_samples"
        fail(f"the split train has a single label, {names[0]}; {advice}")
    if own is None or (are_default(own) and not set(own) & set(names)):
        return _match_order(source, own, names, training)
    outputs = {name: index for index, name in enumerate(own)}
    folded = {name.casefold(): index for name, index in outputs.items()}
    if len(folded) == len(own):
        outputs |= {name: folded[name.casefold()] for name in names if name.casefold() in folded}
    outputs |= {name: outputs[_whole(name)] for name in names if name not in outputs and _whole(name) in outputs}
    if not training.do_train:
        names = [name for name in names if name in outputs or not _is_unknown(name)]
    unknown = [name for name in names if name not in outputs]
    if unknown and training.do_train and model.ignore_mismatched_sizes:
        say(f"the labels {_listed(own)} of {source} are replaced by a new head for {_listed(names)}")
        return Labels(list(names), {name: index for index, name in enumerate(names)})
    if unknown:
        advice = "pass --ignore_mismatched_sizes to train a new head" if training.do_train else "rename the latter"
        fail(f"{source} has the labels {_listed(own)}, but not {_listed(unknown)} of the data; {advice}")
    if names and list(names) != own:
        say(f"labels are matched by name: {source} keeps {_listed(own)}; the data has {_listed(names)}")
    return Labels(own, outputs)


def _match_order(
    source: str | None, own: list[str] | None, names: Sequence[str], training: TrainingArguments
) -> Labels:
    """Return the labels of a head that has no label names."""
    outputs = {name: index for index, name in enumerate(names)}
    if training.do_train or own is None:
        return Labels(list(names), outputs)
    known = [name for name in names if not _is_unknown(name)]
    if all(_whole(name).isdecimal() and int(_whole(name)) < len(own) for name in known):  # ids, or no labels
        return Labels(own, {name: int(_whole(name)) for name in known})
    names = known if len(known) == len(own) else names
    if len(names) != len(own):
        fail(f"{source} has {len(own)} labels without names, but the data has {len(names)}: {_listed(names)}")
    say(f"{source} has no label names; its outputs are, in the order of the data, {_listed(names)}")
    return Labels(list(names), {name: index for index, name in enumerate(names)})


def _listed(names: Iterable[str]) -> str:
    """Return the first names as text, separated by commas."""
    names = list(names)
    return ", ".join(names[:20]) + (f", ... ({len(names)} labels)" if len(names) > 20 else "")


def _is_unknown(name: str) -> bool:
    """Return whether a label name means "no label" unless it is a class."""
    return _whole(name.strip()).casefold() in UNKNOWN


def _whole(name: str) -> str:
    """Return "1" for "1.0", as which pandas writes an integer in a CSV file if other rows are empty."""
    return name.partition(".")[0] if re.fullmatch(r"-?[0-9]+\.0+", name) else name


def class_numbers(
    split: Dataset, column: str, outputs: dict[str, int], name: str, classes: Sequence[str] = ()
) -> tuple[Dataset, list[int]]:
    """Return the rows of a split and their outputs of the head; exit if a label is not in `outputs`.

    Rows have no label if it is empty (None, NaN or empty text), or a name of `UNKNOWN` that is not in `outputs`. They
    are an error in the split `train`, -100 in a test split, and left out otherwise; a line is printed with their count.

    Args:
        split: The split.
        column: Column with label names, or with ids if it is a `ClassLabel` or `classes` are given; all rows of a split
            without the column have no label.
        outputs: Output of each label name.
        name: Name of the split.
        classes: Names of the ids of a column without names.
    """
    if column not in split.column_names:
        return split, [-100] * len(split)
    labels, numbers = _read_labels(split, column, name, classes), []
    problem = f"not one of {_listed(outputs)}"
    for row, label in enumerate(labels):
        number = -100 if label is None else outputs.get(label, outputs.get(_whole(label)))
        if number is None and not _is_unknown(label):
            fail(f"split {name}, row {row}: label {split[column][row]!r} is {problem}")
        numbers.append(-100 if number is None else number)
    if name == "train" and (named := [label for label in outputs if label in labels and _is_unknown(label)]):
        say(f"{_listed(map(repr, named))} is a class of the training data; rows without a label have an empty field")
    return _leave_out(split, column, numbers, -100, name, problem)


def _leave_out(
    split: Dataset, column: str, labels: list, unknown: Any, name: str, problem: str
) -> tuple[Dataset, list]:
    """Return the rows and labels that are not `unknown` or, of a test split, all; print how many rows have no label.

    A model is not trained on a part of the rows: exit if labels of the split `train` are unknown.
    """
    kept = [row for row, label in enumerate(labels) if label != unknown]
    if len(kept) == len(labels):
        return split, labels
    count = f"{len(labels) - len(kept)} of {len(labels)} rows have no label"
    if name == "train" or not (kept or name.startswith("test")):
        row = labels.index(unknown)
        fail(f"split {name}, row {row}: label {split[column][row]!r} is {problem}; {count}, remove them")
    if name.startswith("test"):
        say(f"split {name}: {count}")
        return split, labels
    say(f"split {name}: {count} and are left out")
    return split.select(kept), [labels[row] for row in kept]


def read_scores(split: Dataset, name: str) -> tuple[Dataset, list[float]]:
    """Return the rows and labels of a regression as `class_numbers` does; exit unless they are finite numbers."""
    scores: list[float | None] = []
    for row, label in enumerate(_read_labels(split, "label", name)):
        try:
            scores.append(None if label is None or _is_unknown(label) else float(label))
            valid = scores[-1] is None or math.isfinite(scores[-1])
        except ValueError:
            valid = False
        if not valid:
            fail(f"split {name}, row {row}: label {label!r} is not a number")
    return _leave_out(split, "label", scores, None, name, "not a number")


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
    if tokenizer.pad_token_id is None:
        fail("the tokenizer has no padding token; pass another --tokenizer_name")

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
    lines = [f"{index}\t{tsv_field(names[best])}" for index, best in enumerate(output.predictions.argmax(-1))]
    write_lines(trainer, "predictions.tsv", ["index\tprediction", *lines])
    return save(trainer, "test", output.metrics)
