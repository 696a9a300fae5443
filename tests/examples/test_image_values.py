"""Pixels of any type are from 0 to 255, or floating-point numbers from 0 to 1; other values are refused in one line."""

import io

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from PIL import Image

from luna_mega.training import images
from tests.examples.runs import assert_error

GRAYS = np.arange(64).reshape(8, 8) * 4 + 3  # 3 to 255


def as_column(pixels: np.ndarray, kind: str) -> Dataset:
    """Return two images as lists, nested lists, lists of a fixed size, or bytes."""
    if kind == "bytes":
        return Dataset.from_dict({"image": [pixels.astype(np.uint8).tobytes()] * 2})
    flat = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate([pixels.reshape(-1)] * 2)), pixels.size)
    if kind == "fixed":
        return Dataset(pa.table({"image": flat}))
    rows = flat.flatten() if kind == "flat" else pa.ListArray.from_arrays(range(0, 129, 8), flat.flatten())
    size = 64 if kind == "flat" else 8
    return Dataset(pa.table({"image": pa.ListArray.from_arrays(range(0, 2 * size + 1, size), rows)}))


def as_file(pixels: np.ndarray, suffix: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, suffix)
    return file.getvalue()


def read(split: Dataset) -> np.ndarray:
    return np.array(images.read_image(split[1]["image"], 1, images.pixel_scale(split, "image")))


VALUES = {
    "uint8": (GRAYS.astype(np.uint8), GRAYS),
    "int64": (GRAYS.astype(np.int64), GRAYS),
    "int64 up to 1": (GRAYS % 2, GRAYS % 2),
    "uint16": (GRAYS.astype(np.uint16), GRAYS),
    "float32 up to 1": ((GRAYS / 255).astype(np.float32), GRAYS),
    "float64 up to 1": (GRAYS / 255, GRAYS),
    "dark float64": (GRAYS / 255**2, np.round(GRAYS / 255)),
    "float16 up to 1": ((GRAYS / 255).astype(np.float16), GRAYS),
    "float64 up to 255": (GRAYS.astype(np.float64), GRAYS),
    "float64 with fractions": (GRAYS - 0.3, GRAYS),
    "bool": (GRAYS > 100, (GRAYS > 100) * 255),
}
INVALID = {
    "negative": (GRAYS - 10, "column image has pixels from -7 to 245; convert them"),
    "negative float": (GRAYS / 127.5 - 1, "column image has pixels from -0.97.* to 1; convert them"),
    "above 255": (GRAYS + 1, "column image has pixels from 4 to 256; convert them"),
    "uint16": (GRAYS.astype(np.uint16) * 257, "column image has pixels from 771 to 65535; convert them"),
    "NaN": (np.where(GRAYS == 3, np.nan, GRAYS / 255), "column image has pixels that are NaN or None"),
    "infinite": (np.where(GRAYS == 3, np.inf, GRAYS / 255), "column image has pixels from .* to inf; convert them"),
}


@pytest.mark.parametrize("kind", ["flat", "nested", "fixed"])
@pytest.mark.parametrize("case", VALUES)
def test_lists(case, kind):
    pixels, expected = VALUES[case]
    assert (read(as_column(pixels, kind)) == expected).all()


@pytest.mark.parametrize("kind", ["flat", "nested", "fixed"])
@pytest.mark.parametrize("case", INVALID)
def test_invalid_lists(case, kind):
    pixels, message = INVALID[case]
    assert_error(read, message, as_column(pixels, kind))


@pytest.mark.parametrize("head", [b"", b"\x0a\x05\x01\x08", b"BM", b"\x89PNG\r\n\x1a\n"])
def test_bytes(head):
    """Raw pixels may start with the first bytes of PCX, BMP and PNG files."""
    pixels = np.frombuffer(head + GRAYS.astype(np.uint8).tobytes()[len(head) :], np.uint8).reshape(8, 8)
    assert (read(as_column(pixels, "bytes")) == pixels).all()


@pytest.mark.parametrize("content", [b"12345", as_file(GRAYS.astype(np.uint8), "png")[:50]])
def test_damaged_files(content):
    assert_error(images.read_image, "an image cannot be read", content)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1] * 16] * 4, r"its pixels have the shape \[4, 16\]; only square gray images"),
        ([[[1] * 4] * 8] * 8, r"its pixels have the shape \[8, 8, 4\]; only square gray images"),
        ([None, 1, 1, 1], "has pixels that are NaN or None"),
        (["1"] * 4, "contains lists of string; pixels are numbers"),
        ([1] * 5, "an image cannot be read: cannot reshape array of size 5"),
    ],
)
def test_other_lists(value, message):
    assert_error(read, message, Dataset.from_dict({"image": [value] * 2}))


@pytest.mark.parametrize("channels", [1, 3, None])
def test_files(channels):
    """16 and 32 bits are read like 8 bits if the values are from 0 to 255."""
    for pixels, suffix in (
        (GRAYS.astype(np.uint8), "png"),
        (GRAYS.astype(np.uint16), "png"),
        (GRAYS.astype(np.int32), "tiff"),
        (GRAYS.astype(np.float32), "tiff"),
    ):
        image = images.read_image(as_file(pixels, suffix), channels)
        assert image.mode == ("RGB" if channels == 3 else "L") and (np.array(image.convert("L")) == GRAYS).all()


@pytest.mark.parametrize(
    ("pixels", "suffix", "message"),
    [
        (GRAYS.astype(np.uint16) * 257, "png", "its pixels are from 771 to 65535; convert them to 0 to 255"),
        (GRAYS.astype(np.int32) - 10, "tiff", "its pixels are from -7 to 245; convert them to 0 to 255"),
        ((GRAYS / 255).astype(np.float32), "tiff", "its pixels are floating-point numbers up to 1; convert them"),
        (np.full((8, 8), np.nan, np.float32), "tiff", "its pixels are from nan to nan; convert them to 0 to 255"),
    ],
)
def test_invalid_files(pixels, suffix, message):
    assert_error(images.read_image, f"an image cannot be read: {message}", as_file(pixels, suffix))
