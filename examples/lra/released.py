"""Readers of the sources of Long Range Arena.

Each function yields the rows of one split, and raises `ValueError` with the name of an invalid file or row.
"""

import csv
import io
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Audio, ClassLabel, Dataset
from datasets.exceptions import DatasetsError
from PIL import Image

from lra import listops
from luna_mega import training as lib

Rows = Iterator[dict[str, Any]]
SPLITS = ("train", "validation", "test")
SC10 = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_LISTOPS = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
_PAIRS = {name: f"new_aan_pairs.{end}.tsv" for name, end in zip(SPLITS, ("train", "eval", "test"), strict=True)}
_SPEECH_LISTS = {"validation": "validation_list.txt", "test": "testing_list.txt"}
_PATHFINDER_SEED = 42  # S4 and Mega split the images with this seed: 80, 10 and 10 %


def read_listops(source: str, split: str) -> Rows:
    """Read a table of `lra_release/listops-1000`, without its parentheses. Copies without closing brackets raise."""
    name = _LISTOPS[split]
    for number, row in enumerate(_table(Path(source, name), None), start=2):
        tree = " ".join(token for token in (row.get("Source") or "").split() if token not in "()")
        try:
            value = listops.evaluate(tree)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}; is this the copy that lost its brackets?") from error
        if str(value) != row.get("Target"):
            raise ValueError(f"{name}, line {number}: the tree evaluates to {value}, but Target is {row.get('Target')}")
        yield {"source": tree, "label": value}


def read_pathfinder(source: str, split: str, size: int) -> Rows:
    """Read the images and labels of a folder such as `pathfinder32/curv_contour_length_14`.

    They are in `imgs/BATCH/sample_N.png` and `metadata/BATCH.npy`. Empty files are skipped; the release has one.
    """
    folder, found = Path(source), []
    lists = sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.stem))
    if not lists:
        raise ValueError(f"{folder} has no metadata/*.npy; pass a folder such as pathfinder32/curv_contour_length_14")
    for path in lists:  # text files despite their suffix: folder, file, number, label, ...
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
            parent, name, _, label, *_ = [*line.split(), *[""] * 4]
            file = folder / parent / name
            if label not in ("0", "1"):
                raise ValueError(f"{path}, line {number}: the label is {label!r}, not 0 or 1")
            if not file.is_file():
                raise ValueError(f"{path}, line {number}: there is no {file}")
            if file.stat().st_size:
                found.append((file, int(label)))
            elif split == "train":
                print(f"skipped, it is empty: {file}")
    order = np.random.default_rng(_PATHFINDER_SEED).permutation(len(found))
    train, validation = int(0.8 * len(found)), int(0.1 * len(found))
    for index in np.split(order, [train, train + validation])[SPLITS.index(split)]:
        file, label = found[index]
        image = Image.open(file).convert("L")
        if image.size != (size, size):
            raise ValueError(f"{file} has {image.width} x {image.height} pixels, not {size} x {size}")
        yield {"image": image, "label": label}


def read_pairs(source: str, split: str) -> Rows:
    """Read the pairs of papers of `lra_release`, or parquet files with the columns `text1`, `text2` and `label`."""
    name = _PAIRS[split]
    if any(Path(source).glob("*.parquet")):
        name, rows = split, load(source, "text1", "text2", "label")[split]
    else:
        rows = _table(Path(source, name), ["label", "first", "second", "text1", "text2"])
    for number, row in enumerate(rows, start=1):
        if str(row["label"]) not in ("0", "1", "0.0", "1.0") or not (row.get("text1") and row.get("text2")):
            raise ValueError(f"{name}, line {number}: two texts and the label 0 or 1 are needed")
        yield {"text1": row["text1"], "text2": row["text2"], "label": int(float(row["label"]))}


def read_speech(source: str, split: str, words: Sequence[str], sampling_rate: int) -> Rows:
    """Read Speech Commands: its unpacked archive, or a dataset from the Hub or a folder of parquet files.

    A dataset has the columns `audio` (WAV files, or bytes of 16-bit samples with a column `sampling_rate`) and `label`
    (words, or ids of words). Other words are skipped.
    """
    folder, found = Path(source), set()
    archive = folder.is_dir() and not any(folder.rglob("*.parquet"))
    for name, word, audio, own_rate in (_read_archive if archive else _read_clips)(source, split, words):
        if word in words:
            found.add(word)
            samples = audio if own_rate == sampling_rate else _samples(audio, sampling_rate, name)
            yield {"audio": samples, "sampling_rate": sampling_rate, "label": words.index(word)}
    if missing := [word for word in words if word not in found]:
        raise ValueError(f"{source} has no clips of the word {missing[0]!r} in the split {split}")


def _read_archive(source: str, split: str, words: Sequence[str]) -> Iterator[tuple[str, str, bytes, None]]:
    lists = {}
    for name, file in _SPEECH_LISTS.items():
        if not Path(source, file).is_file():
            raise ValueError(f"{source} has no file {file}; pass the unpacked folder of Speech Commands")
        lists |= dict.fromkeys(Path(source, file).read_text(encoding="utf-8-sig").split(), name)
    for word in words:
        for clip in sorted(Path(source, word).glob("*.wav")):
            if lists.get(f"{word}/{clip.name}", "train") == split:
                yield str(clip), word, clip.read_bytes(), None


def _read_clips(source: str, split: str, words: Sequence[str]) -> Iterator[tuple[str, str, bytes, int | None]]:
    rows = load(source, "audio", "label")[split]
    if isinstance(rows.features["audio"], Audio):
        rows = rows.cast_column("audio", Audio(decode=False))
    kind = rows.features["label"]
    for index, row in enumerate(rows):
        word = kind.int2str(row["label"]) if isinstance(kind, ClassLabel) else str(row["label"])
        encoded = isinstance(row["audio"], dict)
        audio = row["audio"]["bytes"] if encoded else row["audio"]
        yield f"{source}, {split}, row {index}", word, audio, None if encoded else row.get("sampling_rate")


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
        raise ValueError(f"{name} is not a WAV file at {rate} Hz: {error}") from error


def _table(path: Path, names: list[str] | None) -> list[dict[str, str]]:
    options = {"sep": "\t", "quoting": csv.QUOTE_NONE, "dtype": str, "keep_default_na": False}
    return pd.read_csv(path, names=names, **options, encoding="utf-8-sig").to_dict("records")


def load(source: str, *columns: str, splits: Sequence[str] = SPLITS) -> dict[str, Dataset]:
    """Load splits with these columns from the Hub or a folder."""
    with lib.one_line(f"cannot load {source}", DatasetsError):
        loaded = lib.load_folder(source) if Path(source).is_dir() else lib.load_from_hub(source, option="source")
    for split in splits:
        if split not in loaded or set(columns) - set(loaded[split].column_names):
            raise ValueError(f"{source} has no split {split} with the columns {', '.join(columns)}")
    return {split: loaded[split] for split in splits}
