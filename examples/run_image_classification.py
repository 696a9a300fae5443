r"""Train an image classifier: Mega on patches, or another vision model of transformers that reads patches, such as ViT.

    python examples/run_image_classification.py --recipe examples/recipes/image_classification/cifar10_gray_mega.yaml \
        --dataset_path data/image --output_dir outputs/cifar10

All fields of TrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg
from transformers.image_processing_utils import BaseImageProcessor

from luna_mega import training as lib

_COLOR = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # mean and standard deviation of ImageNet
_GRAY = ([0.5], [0.25])


@dataclass
class DataArguments(lib.SourceArguments, lib.ClassifierArguments, lib.images.AugmentArguments):
    image_column: str = HfArg(default="image", help="column with the images: files, or pixels of square gray images")
    label_column: str = HfArg(default="label", help="column with the labels: names or ids")
    image_size: int | None = HfArg(default=None, help="side of an image in pixels; default: as the first image")
    channels: int | None = HfArg(default=None, help="1 = gray, 3 = color; default: as the first image")
    image_mean: list[float] | None = HfArg(default=None, help="channel means; default: ImageNet's, 0.5 for gray")
    image_std: list[float] | None = HfArg(default=None, help="channel deviations; default: ImageNet's, 0.25 for gray")
    center_crop: bool = HfArg(default=True, help="evaluate on the center crop of a resized image; false = only resize")


@dataclass
class ModelArguments(lib.CheckpointArguments):
    patch_size: int = HfArg(default=16, help="side of a patch in pixels, for a new model")


class ImageTrainer(lib.OrderedTrainer):
    """Trainer with repeated augmentation and mixup."""

    loss_is_scaled_for_ga = False  # `make_loss` returns the mean of a part of a batch
    repeats = 1
    mix: Callable | None = None

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> torch.Tensor:
        if self.mix is not None:
            self.mix.device = inputs["pixel_values"].device
            inputs["pixel_values"], inputs["labels"] = self.mix(inputs["pixel_values"], inputs["labels"])
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # Trainer multiplies losses by the number of processes if it has counted the labels of all of them
        return super().compute_loss(model, inputs, return_outputs)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> torch.utils.data.Sampler | None:
        if self.repeats > 1:
            return lib.images.make_sampler(self.train_dataset, self.repeats)
        return super()._get_train_sampler(train_dataset)


def encode_split(
    split: Dataset,
    name: str,
    data: DataArguments,
    channels: int,
    transform: lib.images.Transform,
    outputs: dict[str, int],
) -> Dataset:
    """Return the split with `labels` (-100 = unknown), and `pixel_values` that are transformed on access."""
    split, labels = lib.class_numbers(split, data.label_column, outputs, name)
    rows = split.select_columns([data.image_column]).add_column("labels", labels)
    scale = lib.images.pixel_scale(split, data.image_column)

    def encode(batch: dict[str, list]) -> dict[str, list]:
        read = [lib.images.read_image(value, channels, scale) for value in batch[data.image_column]]
        return {"pixel_values": [transform(image) for image in read], "labels": batch["labels"]}

    return rows.with_transform(encode)


def decays(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter has weight decay: all except biases, norms and position embeddings."""
    return not name.endswith((".bias", "position_embeddings")) and not (parameter.ndim == 1 and ".weight" in name)


def make_loss(smoothing: float) -> Callable:
    """Return the cross entropy of labels `[B]` or, after mixup, of smoothed labels `[B, classes]`."""

    def loss(outputs, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        smooth = smoothing if labels.dim() == 1 and torch.is_grad_enabled() else 0.0
        return torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=smooth)

    return loss


def parse(argv: list[str] | None) -> tuple[DataArguments, ModelArguments, TrainingArguments, lib.Run]:
    kinds = (DataArguments, ModelArguments, TrainingArguments)
    defaults = {"metric_for_best_model": "accuracy", "remove_unused_columns": False}
    data, model, training = lib.parse_arguments(kinds, argv, **defaults)
    run = lib.Run(data, model, training)
    training.include_num_input_tokens_seen = "no"  # images have no tokens
    lib.images.check_augmentation(data)
    if data.mixup or data.cutmix:
        if training.per_device_train_batch_size % 2:
            lib.fail("--mixup and --cutmix mix pairs; --per_device_train_batch_size must be even")
        training.dataloader_drop_last = True  # the last batch may be odd
    lib.check_least(data, 1, "image_size")
    lib.check_least(model, 1, "patch_size")
    if data.channels not in (None, 1, 3):
        lib.fail(f"--channels {data.channels} must be 1 or 3")
    return data, model, training, run


def choose_config(
    data: DataArguments, model: ModelArguments, side: int, channels: int, names: list[str]
) -> tuple[PreTrainedConfig, int]:
    """Return the configuration and the image size, from the options, the model or the data."""
    size, patch, fields = data.image_size or side, model.patch_size, {"num_channels": channels}
    if model.model_name_or_path:
        loaded = AutoConfig.from_pretrained(model.model_name_or_path)
        if not (hasattr(loaded, "image_size") and hasattr(loaded, "patch_size")):
            lib.fail(
                f"{model.model_name_or_path}: {loaded.model_type} has no image_size and patch_size; pass a model of "
                "patches, such as mega or vit"
            )
        size, patch = loaded.image_size, loaded.patch_size
        if data.image_size not in (None, size) or loaded.num_channels != channels:
            lib.fail(
                f"{model.model_name_or_path} reads images of {size} x {size} in {loaded.num_channels} "
                f"channels, not of {data.image_size or size} in {channels} (--image_size, --channels)"
            )
    if size % patch:
        lib.fail(f"--patch_size {patch} does not divide the size of the images, {size} (--image_size)")
    fields |= {"image_size": size, "patch_size": patch, **lib.label_fields(names)}
    fields["problem_type"] = "single_label_classification"
    return lib.make_config(model, None, (size // patch) ** 2, "patches", **fields), size


def load_data(
    data: DataArguments, model: ModelArguments, training: TrainingArguments
) -> tuple[dict[str, Dataset | lib.Redrawn], BaseImageProcessor, PreTrainedConfig]:
    """Return the encoded splits, the evaluation transform, and the configuration of the model."""
    columns = {"columns": [data.image_column], "label": data.label_column}
    splits = lib.images.undecoded(lib.load_splits(lib.choose_splits(training, data), data, **columns))
    names, outputs = lib.match_labels(model, lib.class_names(splits, data.label_column), training)
    split = next(iter(splits.values()))
    first = lib.images.read_image(split[0][data.image_column], scale=lib.images.pixel_scale(split, data.image_column))
    channels = data.channels or (1 if first.mode == "L" else 3)
    config, size = choose_config(data, model, min(first.size), channels, names)
    if model.model_name_or_path:
        processor = AutoImageProcessor.from_pretrained(model.model_name_or_path, backend="pil")  # without torchvision
        for option in ("image_mean", "image_std"):
            if (given := getattr(data, option)) not in (None, own := list(getattr(processor, option))):
                lib.fail(f"--{option} {given}: {model.model_name_or_path} has its own, {own}; remove the option")
    else:
        mean, std = _GRAY if channels == 1 else _COLOR
        scale = data.image_mean or mean, data.image_std or std
        processor = lib.images.make_processor(size, channels, *scale, data.center_crop)
    for name, split in splits.items():
        transform = lib.images.make_transform(processor, size, data if name == "train" else None)
        splits[name] = encode_split(split, name, data, channels, transform, outputs)
    if "train" in splits:
        splits["train"] = lib.images.augment_split(splits["train"], data, training.seed)
    return splits, processor, config


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)

    with run.reading():
        splits, processor, config = load_data(data, model, training)

    smoothing, training.label_smoothing_factor = training.label_smoothing_factor, 0.0  # applied by `make_loss`
    trainer = ImageTrainer(
        lib.make_model(AutoModelForImageClassification, model, config),
        training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=processor,
        compute_loss_func=make_loss(smoothing),
        compute_metrics=lib.accuracy,
    )
    trainer.decays = decays
    trainer.repeats, trainer.mix = data.repeated_augmentation, lib.images.make_mix(data, config.num_labels, smoothing)

    return run.fit(trainer, predict=lambda: lib.write_predictions(trainer, splits["test"]))


if __name__ == "__main__":
    main()
