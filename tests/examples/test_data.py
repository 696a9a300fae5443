"""Data: files and their columns, pixels of any type, datasets and models in the cache, and combined texts."""

import gzip
import io
import sys
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_dataset
from huggingface_hub import DatasetCard
from hypothesis import given, strategies as st
from PIL import Image
from transformers import AutoModelForImageClassification

from luna_mega.hub.find import find_dataset
from luna_mega.training import data, images, streams
from tests.examples.contract import HALVES, SCRIPTS, draw_pixels
from tests.examples.runs import assert_error, write


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_csv_files(tmp_path, suffix):
    """Columns are text, also if their names are empty or repeated; splits may have other columns, and be folders."""
    (tmp_path / "train").mkdir()
    content = {
        "train/a": "text,label\n007,01\nNA,None\n,\n",
        "test": "text\n1.50\n",
        "more": "a,b\n1,2,\n3,4,\n",
        "other": "\ufeff,a,a\n1,01,2\n",
    }
    for name, text in content.items():
        encoded = gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode()
        (tmp_path / f"{name}.{suffix}").write_bytes(encoded)
    arguments = data.SourceArguments(dataset_path=str(tmp_path))
    splits = data.load_splits({"train": None, "test": None}, arguments)
    assert splits["train"][:] == {"text": ["007", "NA", None], "label": ["01", "None", None]}
    assert splits["test"][:] == {"text": ["1.50"]}
    loaded = data.load_files(data.find_files(str(tmp_path)))
    assert loaded["more"][:] == {"a": ["1", "3"], "b": ["2", "4"]}  # fields without a name are left out
    rows = loaded["other"][:]
    assert rows["Unnamed: 0"] == ["1"] and rows["a"] == ["01"]


@given(name=st.text("a[]*? !é", min_size=1, max_size=4).filter(lambda name: name.strip() == name))
def test_names_of_folders_are_not_patterns(tmp_path_factory, name):
    """Datasets would read them as such; it does for folders of splits, which is an error."""
    folder = tmp_path_factory.mktemp("data")
    source = data.SourceArguments(dataset_path=str(folder / name))
    write([{"text": "good"}], folder / name / "train.jsonl")
    assert data.load_splits({"train": None}, source, ["text"])["train"]["text"][:] == ["good"]
    if set("[*?") & set(name):
        (folder / name / "train.jsonl").unlink()
        (folder / name / "train").mkdir()
        message = "datasets reads .* as a pattern; rename the folder"
        assert_error(data.load_splits, message, {"train": None}, source)


LAYOUTS = ("flat", "nested", "fixed")
DTYPES = ("bool", "uint8", "int16", "uint16", "int64", "float16", "float32", "float64")


def as_column(pixels: np.ndarray, layout: str) -> Dataset:
    """Return two images of 8 x 8 pixels as lists, nested lists, or lists of a fixed size."""
    flat = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate([pixels.reshape(-1)] * 2)), pixels.size)
    if layout == "fixed":
        return Dataset(pa.table({"image": flat}))
    rows = flat.flatten() if layout == "flat" else pa.ListArray.from_arrays(range(0, 129, 8), flat.flatten())
    size = 64 if layout == "flat" else 8
    return Dataset(pa.table({"image": pa.ListArray.from_arrays(range(0, 2 * size + 1, size), rows)}))


def read(split: Dataset) -> np.ndarray:
    return np.array(images.read_image(split[1]["image"], 1, images.pixel_scale(split, "image")))


@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    least=st.sampled_from([0, 0, 0, 3, -1]),
    most=st.sampled_from([0.5, 1, 1, 2, 255, 255, 256, 65535]),
    odd=st.sampled_from([0, 0, 0, np.nan, np.inf]),
)
def test_pixels(layout, dtype, least, most, odd):
    """Pixels of any type are from 0 to 255, or floating-point numbers from 0 to 1; other values are an error."""
    is_float, is_bool = dtype.startswith("float"), dtype == "bool"
    values = np.linspace(least, max(least, most), 64).reshape(8, 8)
    with np.errstate(over="ignore", invalid="ignore"):
        pixels = values.astype(dtype)
    if is_float and odd:
        pixels[3, 3] = odd
    exact = pixels.astype(np.float64)
    if np.isnan(exact).any():
        assert_error(read, "column image has pixels that are NaN or None", as_column(pixels, layout))
    elif not is_bool and (exact.min() < 0 or exact.max() > 255):
        assert_error(read, "column image has pixels from .* to .*; convert them", as_column(pixels, layout))
    else:
        scale = 255 if is_bool or (is_float and exact.max() <= 1) else 1
        assert np.abs(read(as_column(pixels, layout)) - exact * scale).max() <= 0.5


@given(head=st.sampled_from([b"", b"\x0a\x05\x01\x08", b"BM", b"\x89PNG\r\n\x1a\n", b"GIF89a"]), seed=st.integers(0, 9))
def test_raw_pixels(head, seed):
    """They may start with the first bytes of image files."""
    pixels = head + np.random.default_rng(seed).bytes(64)[len(head) :]
    split = Dataset.from_dict({"image": [pixels] * 2})
    assert read(split).tobytes() == pixels


def as_file(pixels: np.ndarray, suffix: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, suffix)
    return file.getvalue()


GRAYS = np.arange(64).reshape(8, 8) * 4 + 3  # 3 to 255


@pytest.mark.parametrize("channels", [1, 3, None])
def test_image_files(channels):
    """16 and 32 bits are read like 8 bits if the values are from 0 to 255."""
    for dtype, suffix in (("uint8", "png"), ("uint16", "png"), ("int32", "tiff"), ("float32", "tiff")):
        image = images.read_image(as_file(GRAYS.astype(dtype), suffix), channels)
        assert image.mode == ("RGB" if channels == 3 else "L") and (np.array(image.convert("L")) == GRAYS).all()


INVALID = [
    (as_file(GRAYS.astype(np.uint16) * 257, "png"), "its pixels are from 771 to 65535; convert them to 0 to 255"),
    (as_file(GRAYS.astype(np.int32) - 10, "tiff"), "its pixels are from -7 to 245; convert them to 0 to 255"),
    (as_file((GRAYS / 255).astype(np.float32), "tiff"), "its pixels are floating-point numbers up to 1; convert the"),
    (as_file(np.full((8, 8), np.nan, np.float32), "tiff"), "its pixels are from nan to nan; convert them to 0 to 255"),
    (as_file(GRAYS.astype(np.uint8), "png")[:50], "an image cannot be read"),
    (b"12345", "an image cannot be read"),
    ([[1] * 16] * 4, r"its pixels have the shape \[4, 16\]; only square gray images"),
    ([[[1] * 4] * 8] * 8, r"its pixels have the shape \[8, 8, 4\]; only square gray images"),
    ([1] * 5, "an image cannot be read: cannot reshape array of size 5"),
    ([None, 1, 1, 1], "has pixels that are NaN or None"),
    (["1"] * 4, "contains lists of string; pixels are numbers"),
]


def test_invalid_images():
    for value, message in INVALID:
        assert_error(read, message, Dataset.from_dict({"image": [value] * 2}))


@pytest.fixture
def classify(call, tmp_path):
    """Return a function that trains a classifier on the images in `data`."""
    row = SCRIPTS["run_image_classification"]
    paths = ["--dataset_path", tmp_path / "data", "--output_dir", tmp_path / "out", *row.data]
    new = [*row.model, "--do_train", "--max_steps", 1, "--per_device_train_batch_size", 8]
    return partial(call, "run_image_classification", *paths, *new)


@pytest.mark.parametrize("kind", ["files", "image feature"])
def test_images_in_color(classify, tmp_path, kind):
    draw, labels = np.random.default_rng(0), HALVES * 4
    gray = [draw_pixels(HALVES.index(label), draw) for label in labels]
    colored = [Image.fromarray(np.repeat(pixels[..., None], 3, 2)) for pixels in gray]
    for split in ("train", "validation"):
        if kind == "files":
            for index, (image, label) in enumerate(zip(colored, labels, strict=True)):
                (tmp_path / "data" / split / label).mkdir(parents=True, exist_ok=True)
                image.save(tmp_path / "data" / split / label / f"{index}.{'png' if split == 'train' else 'jpg'}")
        else:
            table = Dataset.from_dict({"image": colored, "label": labels}).cast_column("image", datasets.Image())
            table.to_parquet(tmp_path / "data" / f"{split}.parquet")
    summary = classify("--do_eval", "--horizontal_flip")
    assert summary["train_samples"] == 8 and "eval_accuracy" in summary
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "out").config.num_channels == 3


class SwapHalves:
    """Mock of timm's Mixup: mix every image with the one at the mirrored position of the batch."""

    def __init__(self, mixup_alpha: float, cutmix_alpha: float, label_smoothing: float, num_classes: int):
        self.classes = num_classes

    def __call__(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.batches.append(len(pixels))
        labels = torch.nn.functional.one_hot(labels, self.classes).float()
        return (pixels + pixels.flip(0)) / 2, (labels + labels.flip(0)) / 2


def test_mixup_is_training_only(classify, tmp_path, monkeypatch):
    """Evaluation uses all images and labels unmodified, also during training; odd batch sizes raise an error."""
    SCRIPTS["run_image_classification"].write(tmp_path / "data", train=21, validation=16, test=11)
    monkeypatch.setattr(SwapHalves, "batches", [], raising=False)
    timm = SimpleNamespace(data=SimpleNamespace(Mixup=SwapHalves))
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", timm.data)
    more = ["--mixup", 0.8, "--cutmix", 1.0, "--do_eval", "--do_predict", "--eval_strategy", "epoch"]
    summary = classify(*more, "--max_steps", 4)
    assert SwapHalves.batches == [8] * 4 and 0.0 <= summary["eval_accuracy"] <= 1.0
    assert len((tmp_path / "out" / "predictions.tsv").read_text(encoding="utf-8").splitlines()) == 1 + 11
    message = "--mixup and --cutmix mix pairs; --per_device_train_batch_size must be even"
    odd = [*more, "--per_device_train_batch_size", 7, "--output_dir", tmp_path / "odd"]
    assert_error(classify, message, *odd, output=tmp_path / "odd")


def test_cached_dataset(tmp_path):
    """Without network access, a dataset of the Hub is read from the cache; it may have fewer splits than needed."""
    folder = write([{"text": "a"}, {"text": "b"}], tmp_path / "data" / "train.jsonl")
    builder = datasets.load_dataset_builder("json", data_files=str(folder / "train.jsonl"))
    builder.dataset_name = builder.info.dataset_name = "cached"
    builder.download_and_prepare(tmp_path / "cache" / "tester___cached" / "default" / "0.0.0" / ("0" * 40))
    assert data.load_from_hub("tester/cached")["train"]["text"] == ["a", "b"]
    (tmp_path / "cache" / "tester___cached").rename(tmp_path / "cache" / "Tester___my_data-v1")
    assert find_dataset("Tester/MyData-v1", data.cache_folder("Tester/MyData-v1"))
    (tmp_path / "cache" / "Tester___my_data-v1").rename(tmp_path / "cache" / "tester___cached")
    source = data.SourceArguments(dataset_name="tester/cached")
    message = "tester/cached has no split validation, only train; pass a dataset or, with --dataset_path, a folder"
    assert_error(data.load_splits, message, {"validation": None}, source)


def test_text_of_several_sources(script, tmp_path):
    """Repeated and empty texts are removed; a repeated text belongs to the first source that has it."""
    write([{"text": text} for text in ("One .", " Two . ", "One .", "")], tmp_path / "plain" / "train.jsonl")
    write([{"text": "Three ."}], tmp_path / "plain" / "unsupervised.jsonl")
    write([{"text": "Never read ."}], tmp_path / "plain" / "test.jsonl")
    pairs = [{"translation": {"en": text, "de": "x"}} for text in ("Two .", "Four .", "Five .")]
    write(pairs, tmp_path / "pairs" / "train.jsonl")
    sources = ["--source", str(tmp_path / "plain"), "text", "--source", str(tmp_path / "pairs"), "translation.en"]
    make, folders = script("prepare_text").main, [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, "001", strict=True):
        sizes = make([*sources, "--output_dir", str(folder), "--validation", "2", "--seed", seed])
        assert sizes == {"train": 3, "validation": 2}
    train = pd.read_parquet(folders[0] / "train.parquet")
    held, again, other = (pd.read_parquet(folder / "validation.parquet") for folder in folders)
    assert sorted([*train["text"], *held["text"]]) == ["Five .", "Four .", "One .", "Three .", "Two ."]
    both = dict(zip([*train["text"], *held["text"]], [*train["source"], *held["source"]], strict=True))
    assert both["Two ."] == "plain" and both["Four ."] == "pairs"
    assert list(held["text"]) == list(again["text"]) != list(other["text"])

    card = DatasetCard.load(folders[0] / "README.md")
    assert "| plain | `text` | 3 |\n| pairs | `translation.en` | 2 |" in card.text and str(tmp_path) not in card.text
    assert {split: len(rows) for split, rows in load_dataset(str(folders[0])).items()} == {"train": 3, "validation": 2}


@pytest.mark.parametrize("name", ["train.txt", "train.jsonl", "train.csv", "train.txt.gz", "train.csv.gz"])
def test_byte_order_mark_is_not_part_of_a_text(script, tmp_path, name):
    rows = {"txt": "One .", "jsonl": '{"text": "One ."}', "csv": "text\nOne ."}
    content = f"\ufeff{rows[name.split('.')[1]]}\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert script("prepare_text").read_texts(str(tmp_path), "text") == ["One ."]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=80),
    max_tokens=st.integers(12, 150),
    processes=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_batches_of_tokens(lengths, max_tokens, processes, seed):
    """They are those of fairseq's definition, in an order that depends on seed and epoch."""
    sides = np.asarray(lengths)
    batches = streams.TokenBatches(sides, max_tokens, processes, seed)
    order = [index for batch in batches.batches for index in batch][: len(lengths)]
    assert sorted(order) == list(range(len(lengths))) and sorted(lengths) == [lengths[index] for index in order]
    expected = []
    while order:  # the longest beginning that fits, rounded down to a multiple of 8
        fits = [n for n in range(1, len(order) + 1) if n * sides[order[:n]].max() <= max_tokens]
        count = max(fits) - max(fits) % 8 if max(fits) > 8 else max(fits)
        expected.append(order[:count])
        order = order[count:]
    for number in range(-len(expected) % processes):
        expected.append(expected[number])
    assert batches.batches == expected and len(batches) % processes == 0
    epochs = []
    for epoch in (0, 1, 0):
        batches.sampler.set_epoch(epoch)
        epochs.append(list(batches))
    assert epochs[0] == epochs[2] and sorted(epochs[0]) == sorted(expected)
    assert epochs[0] != epochs[1] or len(set(map(tuple, expected))) < 6
