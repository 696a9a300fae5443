"""Loading of datasets from the Hub or a local folder, and checks of their columns."""

import glob
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from datasets import ClassLabel, Dataset, IterableDataset, load_dataset
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from luna_mega.errors import reason
from luna_mega.training.arguments import fail

READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}


@dataclass
class SourceArguments:
    """Options that specify the dataset."""

    dataset_name: str | None = HfArg(default=None, help="dataset on the Hub: Salesforce/wikitext")
    dataset_config: str | None = HfArg(default=None, help="configuration of the dataset: wikitext-103-raw-v1")
    dataset_path: str | None = HfArg(default=None, help="local folder with parquet, json(l), csv or txt files by split")


@dataclass
class LimitArguments:
    """Options that limit the number of rows."""

    max_train_samples: int | None = HfArg(default=None, help="use only the first N")
    max_eval_samples: int | None = HfArg(default=None, help="use only the first N")
    max_predict_samples: int | None = HfArg(default=None, help="use only the first N")


@dataclass
class ClassifierArguments(LimitArguments):
    """Options of tasks that select the best checkpoint by a metric."""

    early_stopping_patience: int | None = HfArg(default=None, help="stop after N evaluations without a better metric")


def check_source(data: SourceArguments) -> None:
    """Exit unless exactly one dataset is specified."""
    if (data.dataset_name is None) == (data.dataset_path is None):
        fail("pass one of --dataset_name and --dataset_path")


def name_source(data: object) -> dict[str, str | None]:
    """Return the arguments of `training_card` for the dataset: a path, names of folders, or a Hub name."""
    paths = getattr(data, "train_files", None) or data.dataset_path
    if isinstance(paths, list):
        paths = paths[0] if len(paths) == 1 else " and ".join(Path(path).name for path in paths)
    return {"dataset": paths} if paths else {"dataset": data.dataset_name, "dataset_config": data.dataset_config}


def choose_splits(
    training: TrainingArguments,
    data: object,
    validation: tuple[str, ...] = ("validation",),
    test: tuple[str, ...] = ("test",),
) -> dict[str, int | None]:
    """Return the required splits with their maximum numbers of rows (None = all)."""
    splits: dict[str, int | None] = {}
    for needed, names, limit in (
        (training.do_train, ("train",), "max_train_samples"),
        (training.do_eval, validation, "max_eval_samples"),
        (training.do_predict, test, "max_predict_samples"),
    ):
        splits |= dict.fromkeys(names, getattr(data, limit, None)) if needed else {}
    return splits


def find_files(folder: str) -> dict[str, list[str]]:
    """Return the data files of a folder by split.

    Names are `train.jsonl`, `train-00000-of-00001.parquet` for shards, or `train.txt.gz` for compressed files.
    """
    files: dict[str, list[str]] = {}
    for file in sorted(Path(folder).iterdir()):
        name = Path(file.name.removesuffix(".gz"))
        if name.suffix in READERS:
            files.setdefault(re.sub(r"-\d{5}-of-\d{5}$", "", name.stem), []).append(str(file))
    return files


def load_files(files: dict[str, list[str]], streaming: bool = False) -> dict[str, Dataset]:
    """Load splits from files of one format; a text file has one row per line."""
    suffixes = {Path(file.removesuffix(".gz")).suffix for shards in files.values() for file in shards}
    if unknown := suffixes - READERS.keys():
        fail(f"cannot read {' or '.join(sorted(unknown))} files, only {', '.join(READERS)}")
    readers = {READERS[suffix] for suffix in suffixes}
    if len(readers) > 1:
        fail(f"all files must be of one kind, not {' and '.join(sorted(readers))}")
    if not files:
        return {}
    reader = readers.pop()
    # datasets removes a byte order mark from csv and json files, but not from text files.
    options = {"encoding": "utf-8-sig"} if reader == "text" else {}
    files = {name: [glob.escape(file) for file in shards] for name, shards in files.items()}  # for glob
    return load_dataset(reader, data_files=files, streaming=streaming, **options)


def load_splits(
    limits: dict[str, int | None],
    path: str | None,
    hub_name: str | None,
    hub_config: str | None,
    *,
    files: dict[str, list[str]] | None = None,
    streaming: bool = False,
) -> dict[str, Dataset | IterableDataset]:
    """Load splits from a folder, from files or from the Hub.

    Args:
        limits: Maximum number of rows of each split (None = all).
        path: Folder with files named by split, or with one subfolder per split.
        hub_name: Dataset on the Hub, if `path` and `files` are None.
        hub_config: Configuration of that dataset.
        files: Files of each split.
        streaming: Whether to stream the split `train`; the others are loaded.
    """
    source = path or ("the files" if files else hub_name)
    try:
        if path is None and files is None:
            splits = load_dataset(hub_name, hub_config, streaming=streaming)
        elif files is None and any(Path(path, name).is_dir() for name in limits):  # such as images
            splits = load_dataset(path, streaming=streaming)
        else:
            files = find_files(path) if files is None else files
            splits = load_files({name: files[name] for name in limits if name in files}, streaming)
        if streaming:
            next(iter(splits.get("train", [None])))
    except Exception as error:  # datasets raises the errors of its readers, and StopIteration for an empty file
        fail(f"cannot load {source}: {reason(error)}")
    if missing := [name for name in limits if name not in splits]:
        fail(f"{source} has no split {', '.join(missing)}; files are called NAME{'|'.join(READERS)}")
    splits = {name: splits[name] if limit is None else splits[name].take(limit) for name, limit in limits.items()}
    if streaming:
        return {name: split if name == "train" else Dataset.from_list(list(split)) for name, split in splits.items()}
    return splits


def check_columns(split: Dataset, name: str, columns: Iterable[str]) -> None:
    """Exit unless `split` has rows and all of `columns`."""
    if len(split) == 0:
        fail(f"split {name} is empty")
    if missing := [column for column in columns if column not in split.column_names]:
        fail(f"split {name} has no column {', '.join(missing)}, only {', '.join(split.column_names)}")


def check_texts(split: Dataset, name: str, columns: tuple[str, ...]) -> None:
    """Exit unless `split` has text in all of `columns`."""
    check_columns(split, name, columns)
    for column in columns:
        for row, text in enumerate(split[column]):
            if not isinstance(text, str):
                fail(f"split {name}, row {row}: {column} is {text!r} instead of text")


def check_labels(split: Dataset, name: str, labels: tuple[str, ...]) -> None:
    """Exit unless all labels of `split` are ids of `labels` or, for regression without `labels`, finite numbers."""
    check_columns(split, name, ["label"])
    feature = split.features["label"]
    if isinstance(feature, ClassLabel) and tuple(feature.names) != labels:
        fail(f"split {name}: the labels are {', '.join(feature.names)} instead of {', '.join(labels)}")
    for row, label in enumerate(split["label"]):
        if labels and not (isinstance(label, int) and 0 <= label < len(labels)):
            fail(f"split {name}, row {row}: label {label!r} is not one of 0 to {len(labels) - 1}")
        if not labels and not (isinstance(label, int | float) and math.isfinite(label)):
            fail(f"split {name}, row {row}: label {label!r} is not a number")
