"""Data sets from the Hub or from a local folder, checked before a model sees them."""

import math
import random
import re
from pathlib import Path

from datasets import ClassLabel, Dataset, load_dataset
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

from common.arguments import fail

READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}


def name_data(paths: list[str]) -> str:
    """What a model card calls local data: the path itself, or the names of several."""
    return paths[0] if len(paths) == 1 else " and ".join(Path(path).name for path in paths)


def find_files(folder: str) -> dict[str, list[str]]:
    """The data files of `folder` by split: `train.jsonl`, `train.txt.gz`, or shards `train-00000-of-00001.parquet`."""
    files: dict[str, list[str]] = {}
    for file in sorted(Path(folder).iterdir()):
        name = Path(file.name.removesuffix(".gz"))
        if name.suffix in READERS:
            files.setdefault(re.sub(r"-\d{5}-of-\d{5}$", "", name.stem), []).append(str(file))
    return files


def load_files(files: dict[str, list[str]]) -> dict[str, Dataset]:
    """Loads the splits from their files, which must be of one kind; a text file has one row a line."""
    suffixes = {Path(file.removesuffix(".gz")).suffix for shards in files.values() for file in shards}
    if unknown := suffixes - READERS.keys():
        fail(f"cannot read {' or '.join(sorted(unknown))} files, only {', '.join(READERS)}")
    readers = {READERS[suffix] for suffix in suffixes}
    if len(readers) > 1:
        fail(f"all files must be of one kind, not {' and '.join(sorted(readers))}")
    return load_dataset(readers.pop(), data_files=files) if files else {}


def load_splits(names: list[str], path: str | None, hub_name: str, hub_config: str | None) -> dict[str, Dataset]:
    """Loads the splits `names` from the folder `path` or, without one, from the Hub."""
    source = path or hub_name
    try:
        if path is None:
            splits = load_dataset(hub_name, hub_config)
        else:
            files = find_files(path)
            splits = load_files({name: files[name] for name in names if name in files})
    except (DatasetsError, OSError, ValueError) as error:
        fail(f"cannot load {source}: {error}")
    if missing := [name for name in names if name not in splits]:
        fail(f"{source} has no split {', '.join(missing)}; files are called NAME{'|'.join(READERS)}")
    return {name: splits[name] for name in names}


def check_split(split: Dataset, name: str, text_columns: tuple[str, ...], labels: tuple[str, ...] | None) -> None:
    """Ends the script unless `split` has text in `text_columns` and a usable `label`.

    `labels` are the names of the classes, `()` for regression and None where labels are not looked at.
    """
    if len(split) == 0:
        fail(f"split {name} is empty")
    columns = text_columns if labels is None else (*text_columns, "label")
    if missing := [column for column in columns if column not in split.column_names]:
        fail(f"split {name} has no column {', '.join(missing)}, only {', '.join(split.column_names)}")
    for column in text_columns:
        for row, text in enumerate(split[column]):
            if not isinstance(text, str):
                fail(f"split {name}, row {row}: {column} is {text!r} instead of text")
    if labels is None:
        return
    feature = split.features["label"]
    if isinstance(feature, ClassLabel) and tuple(feature.names) != labels:
        fail(f"split {name}: labels mean {', '.join(feature.names)} instead of {', '.join(labels)}")
    for row, label in enumerate(split["label"]):
        if labels and not (isinstance(label, int) and 0 <= label < len(labels)):
            fail(f"split {name}, row {row}: label {label!r} is not one of 0 to {len(labels) - 1}")
        if not labels and not (isinstance(label, int | float) and math.isfinite(label)):
            fail(f"split {name}, row {row}: label {label!r} is not a number")


def hide_tokens(split: Dataset, tokenizer: PreTrainedTokenizerBase, share: float) -> Dataset:
    """`split` with `share` of its tokens, drawn anew whenever a row is read, replaced by `<mask>`; specials stay."""
    if not 0.0 <= share < 1.0:
        fail(f"--token_dropout {share}: must be in [0, 1)")
    if share and tokenizer.mask_token_id is None:
        fail("--token_dropout needs a tokenizer with a mask token")
    special, mask = set(tokenizer.all_special_ids), tokenizer.mask_token_id

    def hide(batch: dict[str, list]) -> dict[str, list]:
        rows = batch["input_ids"]
        hidden = [[mask if i not in special and random.random() < share else i for i in row] for row in rows]
        return batch | {"input_ids": hidden}

    return split.with_transform(hide) if share else split
