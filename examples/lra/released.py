"""Readers of the benchmark's sources: `lra_release`, IMDB, CIFAR-10 and Speech Commands.

Each returns the rows of the splits, which are read when they are asked for, and raises `ValueError` that names the file
or row at fault. Where a source has no validation split, one is drawn from the training rows by a seed: the published
loaders of Text validate on the test split.
"""

import csv
import io
import wave
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Audio, ClassLabel, Dataset, load_dataset
from datasets.exceptions import DatasetsError
from PIL import Image

from lra import listops

Row = dict[str, Any]
# By the name of the split: how many rows, and the function that returns one of them.
Splits = dict[str, tuple[int, Callable[[int], Row]]]
SC10 = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_LISTOPS = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
_PAIRS = {name: f"new_aan_pairs.{end}.tsv" for name, end in zip(_LISTOPS, ("train", "eval", "test"), strict=True)}
_PATHFINDER_SEED = 42  # with which S4 and Mega split the pictures: 80, 10 and 10 %


def read_listops(folder: Path) -> Splits:
    """Read the three tables of `lra_release/listops-1000`, with all brackets. Copies without the closing ones exist."""
    splits = {}
    for split, name in _LISTOPS.items():
        rows = []
        for number, row in enumerate(_table(folder / name, None), start=2):
            source = listops.read_released(row.get("Source") or "")
            try:
                value = listops.evaluate(source)
            except ValueError as error:
                raise ValueError(f"{name}, line {number}: {error}; is this the copy that lost its brackets?") from error
            if str(value) != row.get("Target"):
                raise ValueError(f"{name}, line {number}: the tree has the value {value}, the file {row.get('Target')}")
            rows.append({"source": source, "label": value})
        splits[split] = (len(rows), rows.__getitem__)
    return splits


def read_pathfinder(folder: Path, size: int) -> Splits:
    """Read the pictures and labels of a folder such as `pathfinder32/curv_contour_length_14`.

    They are in `imgs/BATCH/sample_N.png` and `metadata/BATCH.npy`. Empty files (the release has one) are left out.
    """
    lists = sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.stem))
    if not lists:
        raise ValueError(f"{folder} has no metadata/*.npy; pass a folder such as pathfinder32/curv_contour_length_14")
    found = []
    for path in lists:  # text in spite of its name: folder, file, number, label, ...
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
            parent, name, _, label, *_ = [*line.split(), *[""] * 4]
            picture = folder / parent / name
            if label not in ("0", "1"):
                raise ValueError(f"{path}, line {number}: the label is {label!r}, not 0 or 1")
            if not picture.is_file():
                raise ValueError(f"{path}, line {number}: there is no {picture}")
            if picture.stat().st_size:
                found.append((picture, int(label)))
            else:
                print(f"left out, it is empty: {picture}")
    order = np.random.default_rng(_PATHFINDER_SEED).permutation(len(found)).tolist()
    train, validation = int(0.8 * len(found)), int(0.1 * len(found))
    ends = {"train": (0, train), "validation": (train, train + validation), "test": (train + validation, len(found))}

    def row(first: int, index: int) -> Row:
        path, label = found[order[first + index]]
        return {"image": grey(path.read_bytes(), size, str(path)), "label": label}

    return {split: (last - first, partial(row, first)) for split, (first, last) in ends.items()}


def read_pairs(folder: Path) -> Splits:
    """Read the pairs of papers of `lra_release`, or parquet files with the columns `text1`, `text2` and `label`."""
    if any(folder.glob("*.parquet")):
        return {
            split: (len(rows), lambda index, rows=rows: _pair(rows[index], f"row {index}"))
            for split, rows in _load(str(folder), ("train", "validation", "test"), "text1", "text2", "label").items()
        }
    splits, names = {}, ["label", "first", "second", "text1", "text2"]
    for split, name in _PAIRS.items():
        rows = [_pair(row, f"{name}, line {line}") for line, row in enumerate(_table(folder / name, names), start=1)]
        splits[split] = (len(rows), rows.__getitem__)
    return splits


def read_reviews(source: str, validation: int, seed: int) -> Splits:
    """Read reviews with the columns `text` and `label` from the Hub or a folder, such as `stanfordnlp/imdb`."""

    def row(rows: Dataset, index: int) -> Row:
        found = rows[index]
        if not isinstance(found["text"], str) or found["label"] not in (0, 1):
            raise ValueError(f"row {index} has no text, or its label is {found['label']!r}, not 0 or 1")
        return {"text": found["text"], "label": found["label"]}

    return _with_validation(_load(source, ("train", "test"), "text", "label"), row, validation, seed)


def read_objects(source: str, validation: int, seed: int) -> Splits:
    """Read CIFAR-10 from the Hub or a folder, and make its pictures grey."""

    def row(rows: Dataset, index: int) -> Row:
        found = rows[index]
        if found["label"] not in range(10):
            raise ValueError(f"row {index} has the label {found['label']!r}, not 0 to 9")
        return {"image": grey(found["img"], 32, f"row {index}"), "label": found["label"]}

    return _with_validation(_load(source, ("train", "test"), "img", "label"), row, validation, seed)


def read_speech(source: str, words: Sequence[str], rate: int) -> Splits:
    """Read Speech Commands: its unpacked folder, or parquet files from a folder or the Hub.

    The folder has WAV files for every word, `validation_list.txt` and `testing_list.txt`. Parquet files have the
    columns `audio` (WAV files as `datasets` stores them, or bytes of 16-bit samples beside a column `sampling_rate`)
    and `label` (words, or numbers of words); rows with other words are left out.
    """
    folder = Path(source)
    if not folder.is_dir() or any(folder.rglob("*.parquet")):
        return _read_clips(source, words, rate)
    lists = {}
    for split, name in (("validation", "validation_list.txt"), ("test", "testing_list.txt")):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no file {name}; pass the unpacked folder of Speech Commands")
        lists[split] = set((folder / name).read_text(encoding="utf-8-sig").split())
    files: dict[str, list[tuple[Path, int]]] = {"train": [], "validation": [], "test": []}
    for label, word in enumerate(words):
        clips = sorted((folder / word).glob("*.wav"))
        if not clips:
            raise ValueError(f"{folder} has no clips of the word {word!r}")
        for clip in clips:
            split = next((name for name, listed in lists.items() if f"{word}/{clip.name}" in listed), "train")
            files[split].append((clip, label))

    def row(split: str, index: int) -> Row:
        path, label = files[split][index]
        return {"audio": _samples(path.read_bytes(), rate, str(path)), "sampling_rate": rate, "label": label}

    return {split: (len(rows), partial(row, split)) for split, rows in files.items()}


def grey(picture: Any, size: int, name: str) -> dict[str, Any]:
    """Return a grey PNG as `datasets` stores it. Raises `ValueError` where it is no picture of `size` x `size`."""
    try:
        opened = picture if isinstance(picture, Image.Image) else Image.open(io.BytesIO(picture))
        if opened.size != (size, size):
            raise ValueError(f"{name} has {opened.width} x {opened.height} pixels, not {size} x {size}")
        file = io.BytesIO()
        opened.convert("L").save(file, "PNG")
    except (OSError, SyntaxError, TypeError) as error:
        raise ValueError(f"{name} is no picture: {error}") from error
    return {"bytes": file.getvalue(), "path": None}


def _read_clips(source: str, words: Sequence[str], rate: int) -> Splits:
    splits = {}
    for split, rows in _load(source, ("train", "validation", "test"), "audio", "label").items():
        if isinstance(rows.features["audio"], Audio):
            rows = rows.cast_column("audio", Audio(decode=False))
        kind = rows.features["label"]
        found = [kind.int2str(label) if isinstance(kind, ClassLabel) else str(label) for label in rows["label"]]
        missing = [word for word in words if word not in found]
        if missing:
            raise ValueError(f"{source} has no clips of the word {missing[0]!r} in the split {split}")
        chosen = [index for index, word in enumerate(found) if word in words]
        labels = [words.index(found[index]) for index in chosen]
        splits[split] = (len(chosen), partial(_clip, rows, chosen, labels, rate, f"{source}, {split}"))
    return splits


def _clip(rows: Dataset, chosen: list[int], labels: list[int], rate: int, source: str, index: int) -> Row:
    row, name = rows[chosen[index]], f"{source}, row {chosen[index]}"
    audio = row["audio"]
    if isinstance(audio, dict) and audio.get("bytes"):
        samples = _samples(audio["bytes"], rate, name)
    elif isinstance(audio, bytes) and audio and row.get("sampling_rate") == rate:
        samples = audio
    else:
        raise ValueError(f"{name}: audio is {str(audio)[:40]!r}, neither a WAV file nor 16-bit samples at {rate} Hz")
    return {"audio": samples, "sampling_rate": rate, "label": labels[index]}


def _samples(file: bytes, rate: int, name: str) -> bytes:
    try:
        with wave.open(io.BytesIO(file)) as clip:
            kind = clip.getnchannels(), clip.getsampwidth(), clip.getframerate()
            if kind != (1, 2, rate):
                raise ValueError(
                    f"{name} has {kind[0]} channels of {kind[1]} bytes at {kind[2]} Hz, not 1, 2 and {rate}"
                )
            if not clip.getnframes():
                raise ValueError(f"{name} has no samples")
            return clip.readframes(clip.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{name} is no WAV file: {error}") from error


def _table(path: Path, names: list[str] | None) -> list[dict[str, str]]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no file {path.name}")
    csv.field_size_limit(2**30)  # whole papers
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file, names, delimiter="\t", quoting=csv.QUOTE_NONE))


def _pair(row: dict[str, Any], name: str) -> Row:
    if str(row["label"]) not in ("0", "1", "0.0", "1.0") or not (row.get("text1") and row.get("text2")):
        raise ValueError(f"{name}: two texts and the label 0 or 1 are needed")
    return {"text1": row["text1"], "text2": row["text2"], "label": int(float(row["label"]))}


def _load(source: str, splits: tuple[str, ...], *columns: str) -> dict[str, Dataset]:
    try:
        loaded = load_dataset(source)
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"cannot load {source}: {error}") from error
    for split in splits:
        if split not in loaded or set(columns) - set(loaded[split].column_names):
            raise ValueError(f"{source} has no split {split} with the columns {', '.join(columns)}")
    return {split: loaded[split] for split in splits}


def _with_validation(
    loaded: dict[str, Dataset], row: Callable[[Dataset, int], Row], validation: int, seed: int
) -> Splits:
    """Draw `validation` training rows by the seed; the rest are shuffled, as sources often lie sorted by label."""
    train = loaded["train"]
    if not 0 <= validation < len(train):
        raise ValueError(f"--validation {validation} must be below the {len(train)} training rows")
    order = np.random.default_rng(seed).permutation(len(train)).tolist()
    parts = {"train": (train, order[validation:]), "validation": (train, order[:validation])}
    parts["test"] = (loaded["test"], range(len(loaded["test"])))

    def read(split: str, index: int) -> Row:
        rows, numbers = parts[split]
        return row(rows, numbers[index])

    return {split: (len(numbers), partial(read, split)) for split, (_, numbers) in parts.items()}
