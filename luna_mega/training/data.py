"""Load datasets from the Hub or a local folder, and check their columns."""

import csv
import glob
import gzip
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, Value, config, load_dataset
from datasets.naming import camelcase_to_snakecase
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from luna_mega.errors import ConversionError, reason
from luna_mega.hub.find import find_dataset
from luna_mega.training.arguments import fail, one_line

SUFFIX = r"\.(parquet|jsonl?|csv|txt)(\.gz)?"  # suffixes of data files


@dataclass
class SourceArguments:
    """Options that specify the dataset."""

    _argument_group_name = "data and task"

    dataset_name: str | None = HfArg(default=None, help="dataset on the Hub: Salesforce/wikitext")
    dataset_config: str | None = HfArg(default=None, help="configuration of the dataset: wikitext-103-raw-v1")
    dataset_path: str | None = HfArg(default=None, help="local folder with parquet, json(l), csv or txt files by split")


@dataclass
class StreamArguments(SourceArguments):
    """Options of tasks that can stream their data."""

    streaming: bool = HfArg(default=False, help="stream the training data instead of loading it; requires --max_steps")
    shuffle_buffer: int = HfArg(default=10_000, help="buffer size of the shuffling with --streaming")


@dataclass
class LimitArguments:
    """Options that limit the number of rows."""

    _argument_group_name = "data and task"

    max_train_samples: int | None = HfArg(default=None, help="use only the first N")
    max_eval_samples: int | None = HfArg(default=None, help="use only the first N")
    max_predict_samples: int | None = HfArg(default=None, help="use only the first N")


@dataclass
class ClassifierArguments(LimitArguments):
    """Options of tasks that select the best checkpoint by a metric."""

    early_stopping_patience: int | None = HfArg(default=None, help="stop after N evaluations without a better metric")


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
    """Return the files of each split: `train.jsonl`, `train.txt.gz` or shards `train-00000-of-00001.parquet`.

    A split can also be a subfolder that contains only such files.
    """
    files: dict[str, list[str]] = {}
    for file in sorted(Path(folder).iterdir()):
        if name := re.fullmatch(rf"(.+?)(-\d+-of-\d+)?{SUFFIX}", file.name):
            files.setdefault(name[1], []).append(str(file))
        elif file.is_dir() and (parts := [part for part in sorted(file.iterdir()) if not part.name.startswith(".")]):
            names = [re.fullmatch(rf"(.+){SUFFIX}", part.name) for part in parts]
            if all(name and name[1] != "metadata" for name in names):  # images have metadata.csv
                files.setdefault(file.name, []).extend(map(str, parts))
    return files


def load_files(files: dict[str, list[str]], streaming: bool = False) -> dict[str, Dataset | IterableDataset]:
    """Load splits from files of one format; a text file has one row per line.

    The columns of CSV files are text, and only empty fields are None.
    """
    paths = {name: [Path(file).resolve() for file in shards] for name, shards in files.items() if shards}
    if not paths:
        return {}
    if wrong := [path for shards in paths.values() for path in shards if not re.search(f"{SUFFIX}$", path.name)]:
        fail(f"{wrong[0]} cannot be read; use .parquet, .json, .jsonl, .csv or .txt files, possibly with .gz")
    if empty := [path for shards in paths.values() for path in shards if not path.stat().st_size]:
        fail(f"{empty[0]} is empty")
    first = next(iter(paths.values()))[0]
    if ".csv" in first.suffixes and len(paths) > 1:  # a test split may have no labels
        return {name: load_files({name: files[name]}, streaming)[name] for name in paths}
    # datasets removes a byte order mark from csv and json files, but not from text files.
    options = {"encoding": "utf-8-sig"} if ".txt" in first.suffixes else {}
    if ".csv" in first.suffixes:
        options = {"keep_default_na": False, "na_values": [""], "features": _text_features(first)}
        options["index_col"] = False  # pandas would take the first column as the index if rows end with a comma
    escaped = {name: [glob.escape(str(path)) for path in shards] for name, shards in paths.items()}  # for glob
    loaded = load_dataset(str(first.parent), data_files=escaped, streaming=streaming, **options)
    if first.name.endswith(".txt.gz"):  # datasets ignores the encoding of compressed files
        loaded = loaded.map(lambda rows: {"text": [text.removeprefix("\ufeff") for text in rows["text"]]}, batched=True)
    return loaded


def _text_features(path: Path) -> Features | None:
    """Return the columns of a CSV file, with the names of pandas, as text."""
    read = gzip.open if path.suffix == ".gz" else open
    with one_line(f"cannot load {path}"), read(path, "rt", encoding="utf-8-sig", newline="") as file:
        names = next(filter(None, csv.reader(file)), [])
    return Features({name or f"Unnamed: {index}": Value("string") for index, name in enumerate(names)}) or None


def load_folder(path: str, streaming: bool = False) -> dict[str, Dataset | IterableDataset]:
    """Load the splits that datasets finds in a folder."""
    if glob.has_magic(str(Path(path).resolve())):
        fail(f"{path}: datasets reads *, ? and [ in the name of a folder as a pattern; rename the folder")
    return load_dataset(path, streaming=streaming)


def cache_folder(name: str) -> Path:
    """Return the folder of a dataset of the Hub in the cache of datasets."""
    *namespace, last = name.split("/")
    return Path(config.HF_DATASETS_CACHE, "___".join([*namespace, camelcase_to_snakecase(last)]))


def load_from_hub(
    name: str, configuration: str | None = None, streaming: bool = False, option: str = "dataset_path"
) -> dict[str, Dataset | IterableDataset]:
    """Load the splits of a dataset, or exit with one line that names the `option` for a local folder."""
    try:
        if find_dataset(name, cache_folder(name)):
            config.HF_HUB_OFFLINE = True  # reads the cache without further attempts to connect
    except ConversionError as error:
        fail(f"cannot load {error}, or pass a local folder with --{option}")
    return load_dataset(name, configuration, streaming=streaming)


def load_splits(
    limits: dict[str, int | None],
    data: object,
    texts: Sequence[str] = (),
    columns: Sequence[str] = (),
    *,
    label: str | None = None,
    divide: Callable[[Dataset], tuple[Dataset, Dataset]] | None = None,
    files: dict[str, list[str]] | None = None,
    streaming: bool = False,
) -> dict[str, Dataset | IterableDataset]:
    """Load splits from a folder, from files or from the Hub, and check their columns.

    Args:
        limits: Maximum number of rows of each split (None = all).
        data: Options `dataset_path`, a folder with files named by split or with one subfolder per split, or
            `dataset_name` and `dataset_config` of a dataset on the Hub.
        texts: Columns that must contain text.
        columns: Other required columns.
        label: Column that is required except in test splits.
        divide: Function that divides the split `train` into `train` and `validation`.
        files: Files of each split, instead of the dataset.
        streaming: Whether to stream the split `train`; the others are loaded.
    """
    path, name = data.dataset_path, data.dataset_name
    if isinstance(data, SourceArguments) and files is None and (path is None) == (name is None):
        fail("pass one of --dataset_name and --dataset_path")
    source = "the files" if files else path or name
    needed = dict.fromkeys("train" if divide and split == "validation" else split for split in limits)
    try:
        if files is None and path is None:
            splits = load_from_hub(name, data.dataset_config, streaming)
        elif files is None and any(Path(path, split).is_dir() and split not in find_files(path) for split in needed):
            # such as images
            splits = load_folder(path, streaming)
        else:
            files = files or find_files(path)
            splits = load_files({split: files[split] for split in needed if split in files}, streaming)
        if streaming:
            next(iter(splits.get("train", [None])))
    except Exception as error:  # datasets raises the errors of its readers, or wraps them
        no_rows = isinstance(error, StopIteration) or "corresponds to no data" in str(error)
        fail(f"cannot load {source}: {'a split has no rows' if no_rows else reason(error.__cause__ or error)}")
    if missing := [split for split in needed if split not in splits]:
        found = f", only {', '.join(files or splits)}" if files or splits else ""
        fail(f"{source} has no split {', '.join(missing)}{found}; {_advice(missing, data)}")
    splits = dict(splits)
    if divide and "train" in needed:
        splits["train"], splits["validation"] = divide(splits["train"])
    for split, limit in limits.items():
        splits[split] = splits[split] if limit is None else splits[split].take(limit)
        if streaming and split != "train":
            splits[split] = Dataset.from_list(list(splits[split]))
        required = [*columns, label] if label and not split.startswith("test") else columns
        check_split(splits[split], split, texts, required)
    return {split: splits[split] for split in limits}


def _advice(missing: list[str], data: object) -> str:
    """Return what to do if splits are missing."""
    if ways := [name for name in ("validation_share", "hold_out") if missing == ["validation"] and hasattr(data, name)]:
        return f"pass --{ways[0]} to use a part of the split train"
    if data.dataset_path is None:
        return "pass a dataset or, with --dataset_path, a folder that has it"
    return f"files are called {missing[0]}.parquet, .json, .jsonl, .csv or .txt"


def check_split(split: Dataset | IterableDataset, name: str, texts: Sequence[str], columns: Sequence[str] = ()) -> None:
    """Exit unless a split has rows, `columns` and text in `texts`; only the first row of a stream is checked."""
    rows = Dataset.from_list(list(split.take(1))) if isinstance(split, IterableDataset) else split
    if len(rows) == 0:
        fail(f"split {name} is empty")
    if missing := [column for column in [*texts, *columns] if column not in rows.column_names]:
        fail(f"split {name} has no column {', '.join(missing)}, only {', '.join(rows.column_names)}")
    for column in texts:
        for row, text in enumerate(rows[column]):
            if not isinstance(text, str):
                fail(f"split {name}, row {row}: {column} is {text!r} instead of text")
