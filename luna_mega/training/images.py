"""Decode, transform and augment images."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Image as DatasetImage
from PIL import Image
from torch.utils.data import Sampler
from transformers.hf_argparser import HfArg
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.levit.image_processing_pil_levit import LevitImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from luna_mega.errors import install
from luna_mega.training.arguments import check_least, fail, one_line
from luna_mega.training.streams import Redrawn, Reseeded

Transform = Callable[[Image.Image], torch.Tensor]


@dataclass
class AugmentArguments:
    """Options of augmentation; all except crop and flip require timm (extra `vision`)."""

    crop_padding: int = HfArg(default=0, help="shift images by up to N pixels, with reflected borders")
    horizontal_flip: bool = HfArg(default=False, help="mirror half of the images")
    auto_augment: str | None = HfArg(default=None, help="timm's transform with a policy: rand-m9-mstd0.5-inc1, or none")
    random_erasing: float = HfArg(default=0.0, help="probability of erasing a rectangle; requires --auto_augment")
    mixup: float = HfArg(default=0.0, help="alpha of mixup; with --cutmix, each batch uses one of the two at random")
    cutmix: float = HfArg(default=0.0, help="alpha of cutmix")
    repeated_augmentation: int = HfArg(default=1, help="draw each image N times; an epoch contains 1/N of the images")


def check_augmentation(data: AugmentArguments) -> None:
    """Exit if options contradict each other or require a package that is not installed."""
    check_least(data, 0, "crop_padding", "random_erasing", "mixup", "cutmix")
    check_least(data, 1, "repeated_augmentation")
    if data.random_erasing and data.auto_augment is None:
        fail(f"--random_erasing {data.random_erasing} is a part of timm's transform; pass --auto_augment (or none)")
    if data.auto_augment is not None and (data.crop_padding or data.horizontal_flip):
        fail("--auto_augment crops and flips; remove --crop_padding and --horizontal_flip")
    if data.auto_augment or data.mixup or data.cutmix or data.repeated_augmentation > 1:
        _timm()


def _timm():
    with one_line(f"this augmentation requires timm, run {install('vision')}"):
        import timm.data
    return timm.data


def undecoded(splits: dict[str, Dataset]) -> dict[str, Dataset]:
    """Disable decoding by datasets; `read_image` reports damaged images."""
    for name, split in splits.items():
        for column in [column for column, feature in split.features.items() if isinstance(feature, DatasetImage)]:
            splits[name] = splits[name].cast_column(column, DatasetImage(decode=False))
    return splits


def pixel_scale(split: Dataset, column: str) -> int | None:
    """Return the factor with which gray pixels of a column are from 0 to 255, or None if the column contains files.

    Pixels are lists, or bytes whose number is the same square in all rows. The first bytes are not sufficient, because
    pixels can look like the header of a file. If all pixels of the split are floating-point numbers from 0 to 1, the
    factor is 255. Exit if lists have numbers outside of 0 to 255.
    """
    kind = split.features.arrow_schema.field(column).type
    is_list, is_bytes = _is_list(kind), pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    if not (is_list or is_bytes):
        return None
    values = split.select_columns([column]).with_format("arrow")[:][column]
    if is_bytes:
        lengths = pc.unique(pc.binary_length(values)).to_pylist()
        return 1 if len(lengths) == 1 and lengths[0] is not None and math.isqrt(lengths[0]) ** 2 == lengths[0] else None
    while _is_list(values.type):
        values = pc.list_flatten(values)
    if pa.types.is_boolean(values.type):
        return 255
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        fail(f"column {column} contains lists of {values.type}; pixels are numbers from 0 to 255")
    numbers = values.cast(pa.float64(), safe=False)
    if numbers.null_count or pc.any(pc.is_nan(numbers)).as_py():
        fail(f"column {column} has pixels that are NaN or None; pixels are numbers from 0 to 255")
    least, most = pc.min_max(numbers).as_py().values()
    if most is not None and (least < 0 or most > 255):
        fail(
            f"column {column} has pixels from {least:g} to {most:g}; convert them to 0 to 255, or to floats from 0 to 1"
        )
    return 255 if pa.types.is_floating(values.type) and most is not None and most <= 1 else 1


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def read_image(value: Any, channels: int | None = None, scale: int | None = None) -> Image.Image:
    """Return an image in gray (1 channel) or color (3 channels); exit if `value` is not an image.

    Args:
        value: An image file, as bytes or as the dictionary of `datasets.Image(decode=False)`.
        channels: Number of channels; None = as in the file.
        scale: If given, `value` contains the pixels of a square gray image instead, as bytes or a list. They are
            multiplied by `scale`, after which they are from 0 to 255.
    """
    try:
        if scale is not None:
            numbers = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value, np.float64)
            side = math.isqrt(numbers.size)
            if numbers.shape not in ((numbers.size,), (side, side)):
                raise ValueError(
                    f"its pixels have the shape {list(numbers.shape)}; only square gray images are supported"
                )
            image = Image.fromarray(_to_bytes(numbers.reshape(side, side) * scale))
        else:
            file = value["bytes"] or Path(value["path"]).read_bytes() if isinstance(value, dict) else value
            image = Image.open(BytesIO(file))
            if image.mode == "F" or image.mode.startswith("I"):  # `convert` truncates these to 0 to 255
                numbers = np.array(image)
                if image.mode == "F" and 0 < numbers.max() <= 1:  # could be of either scale
                    raise ValueError("its pixels are floating-point numbers up to 1; convert them to 0 to 255")
                image = Image.fromarray(_to_bytes(numbers))
        if channels is None:
            channels = 1 if image.mode in ("1", "L") else 3
        return image.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, TypeError, ValueError) as error:  # raised by reshape, open or convert
        fail(f"an image cannot be read: {error}")


def _to_bytes(pixels: np.ndarray) -> np.ndarray:
    """Return pixels as bytes; raise `ValueError` unless they are from 0 to 255."""
    least, most = pixels.min(), pixels.max()
    if not (least >= 0 and most <= 255):  # also NaN
        raise ValueError(f"its pixels are from {least:g} to {most:g}; convert them to 0 to 255")
    return pixels.round().astype(np.uint8)


def make_processor(size: int, channels: int, mean: list[float], std: list[float], crop: bool) -> BaseImageProcessor:
    """Return the evaluation transform: resize the shorter side to `size` * 256 / 224 and crop, or only resize."""
    if len(mean) != channels or len(std) != channels:
        fail(f"--image_mean and --image_std must have {channels} numbers, got {len(mean)} and {len(std)}")
    options = {"image_mean": mean, "image_std": std, "do_convert_rgb": channels == 3}
    square = {"height": size, "width": size}
    if crop:
        return LevitImageProcessorPil(size={"shortest_edge": size}, crop_size=square, **options)
    return ViTImageProcessorPil(size=square, resample=Image.Resampling.BICUBIC, **options)


def make_transform(processor: BaseImageProcessor, size: int, data: AugmentArguments | None = None) -> Transform:
    """Return a function that converts an image to pixels `[C, H, W]`; timm's with `data` that have `auto_augment`."""
    if data is not None and data.auto_augment is not None:
        return _timm().create_transform(
            size,
            is_training=True,
            auto_augment=None if data.auto_augment == "none" else data.auto_augment,
            interpolation="bicubic",
            re_prob=data.random_erasing,
            re_mode="pixel",
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
        )

    def transform(image: Image.Image) -> torch.Tensor:
        options = {"input_data_format": "channels_last"} if image.mode == "RGB" else {}
        return processor(image, **options, return_tensors="pt")["pixel_values"][0]

    return transform


def augment_split(split: Dataset, data: AugmentArguments, seed: int) -> Dataset | Redrawn:
    """Augment the images of `split` differently in each epoch."""
    if data.auto_augment is not None:  # timm's transform has no generator
        return Reseeded(split, seed)
    most, flips = data.crop_padding, data.horizontal_flip
    if not (most or flips):
        return split

    def augment(row: dict[str, Any], numbers: torch.Generator) -> dict[str, Any]:
        pixels = row["pixel_values"]
        if most:
            height, width = pixels.shape[1:]
            top, left = torch.randint(2 * most + 1, (2,), generator=numbers).tolist()
            padded = torch.nn.functional.pad(pixels, (most,) * 4, mode="reflect")
            pixels = padded[:, top : top + height, left : left + width]
        if flips and torch.rand((), generator=numbers) < 0.5:
            pixels = pixels.flip(-1)
        return row | {"pixel_values": pixels}

    return Redrawn(split, augment, seed)


def make_mix(data: AugmentArguments, classes: int, smoothing: float) -> Callable | None:
    """Return a function that applies mixup or cutmix to pixels and labels `[B]`, or None."""
    if not (data.mixup or data.cutmix):
        return None
    return _timm().Mixup(data.mixup, data.cutmix, label_smoothing=smoothing, num_classes=classes)


def make_sampler(dataset: Dataset, repeats: int) -> Sampler:
    """Return a sampler that draws each image `repeats` times, and 1 / `repeats` of the images per epoch."""
    return _timm().distributed_sampler.RepeatAugSampler(dataset, num_replicas=1, rank=0, num_repeats=repeats)
