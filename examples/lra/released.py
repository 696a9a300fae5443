"""Readers of `lra_release`, the files of Long Range Arena: ListOps as tab-separated text, Pathfinder as pictures."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lra import listops

LISTOPS_FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
_SPLIT_SEED, _TRAIN, _VALIDATION = 42, 0.8, 0.1  # of the Pathfinder pictures, which have no splits


def read_listops(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split, with all brackets.

    Raises `ValueError` where a file is absent, or a tree is not whole or has another value than the file says: copies
    without closing brackets are about.
    """
    path = folder / LISTOPS_FILES[split]
    if not path.is_file():
        raise ValueError(f"{folder} has no file {path.name}; the three of lra_release/listops-1000 are needed")
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file, delimiter="\t"), start=2):
            source = listops.read_released(row.get("Source") or "")
            try:
                value = listops.evaluate(source)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}; is this the copy that lost its brackets?") from error
            if str(value) != row.get("Target"):
                raise ValueError(f"{path}, line {number}: the tree has the value {value}, the file {row.get('Target')}")
            yield {"source": source, "label": value}


def read_pathfinder(folder: Path, size: int) -> tuple[dict[str, list[tuple[Path, int]]], list[Path]]:
    """Return the picture files and labels of the splits, 80, 10 and 10 % at random, and the files that are empty.

    `folder` has `imgs/BATCH/sample_N.png` and `metadata/BATCH.npy`, as `pathfinder32/curv_contour_length_14` does.
    Raises `ValueError` where these are absent, a picture is of another size, or a label is neither 0 nor 1.
    """
    lists = sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.stem))
    if not lists:
        raise ValueError(f"{folder} has no metadata/*.npy; pass a folder such as pathfinder32/curv_contour_length_14")
    found, empty = [], []
    for path in lists:  # text in spite of its name: folder, file, number, label, ...
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            parent, name, _, label, *_ = [*line.split(), *[""] * 4]
            if label not in ("0", "1"):
                raise ValueError(f"{path}, line {number}: the label is {label!r}, not 0 or 1")
            picture = folder / parent / name
            if not picture.is_file():
                raise ValueError(f"{path}, line {number}: there is no {picture}")
            if picture.stat().st_size:
                found.append((picture, int(label)))
            else:
                empty.append(picture)
    if not found:
        raise ValueError(f"{folder} has no picture")
    with Image.open(found[0][0]) as first:
        if first.size != (size, size):
            raise ValueError(f"{found[0][0]} has {first.width} x {first.height} pixels, not {size} x {size} (--size)")
    found = [found[index] for index in np.random.default_rng(_SPLIT_SEED).permutation(len(found))]
    train, validation = int(_TRAIN * len(found)), int(_VALIDATION * len(found))
    ends = {"train": (0, train), "validation": (train, train + validation), "test": (train + validation, len(found))}
    return {split: found[first:last] for split, (first, last) in ends.items()}, empty


def read_picture(path: Path) -> bytes:
    """Return a grey picture as PNG. Raises `ValueError` where it is none."""
    try:
        with Image.open(path) as picture:
            file = io.BytesIO()
            picture.convert("L").save(file, "PNG")
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path} is no picture: {error}") from error
    return file.getvalue()
