r"""Trains a classifier of pictures: Mega on patches, or any other vision model of transformers.

    python examples/run_image_classification.py --recipe examples/recipes/image_classification/cifar10_gray_mega.yaml \
        --dataset_path DIR --output_dir outputs/cifar10

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common.arguments import check_least, fail
from common.classification import accuracy, class_names, class_numbers, write_predictions
from common.data import ClassifierArguments, SourceArguments, check_columns, check_source, load_splits
from common.model import CheckpointArguments, label_fields, make_config, make_model
from common.pictures import (
    AugmentArguments,
    Transform,
    augment_split,
    check_augmentation,
    evaluation_transform,
    holds_pixels,
    load_processor,
    make_mix,
    make_processor,
    make_sampler,
    read_picture,
    training_transform,
    undecoded,
)
from common.report import SpeedCallback
from common.scale import total
from common.script import Script
from common.training import OrderedTrainer
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PreTrainedConfig,
    Trainer,
)
from transformers.image_processing_utils import BaseImageProcessor

_OF_COLOUR = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # ImageNet's mean and deviation
_OF_GREY = ([0.5], [0.25])


@dataclass
class DataArguments(SourceArguments, ClassifierArguments, AugmentArguments):
    image_column: str = field(
        default="image", metadata={"help": "pictures, files, or the pixels of square grey pictures"}
    )
    label_column: str = field(default="label", metadata={"help": "classes: their names, or numbers"})
    image_size: int | None = field(default=None, metadata={"help": "pixels of a side; default: those of the first"})
    channels: int | None = field(default=None, metadata={"help": "1 = grey, 3 = colour; default: as the first"})
    image_mean: list[float] | None = field(default=None, metadata={"help": "default: ImageNet's; 0.5 for grey"})
    image_std: list[float] | None = field(default=None, metadata={"help": "default: ImageNet's; 0.25 for grey"})
    center_crop: bool = field(
        default=True, metadata={"help": "evaluate on a crop, the shorter side at 256/224 of it; else resize alone"}
    )


@dataclass
class ModelArguments(CheckpointArguments):
    patch_size: int = field(default=16, metadata={"help": "pixels of a side of a patch, of a new model"})


class PictureTrainer(OrderedTrainer):
    """Trainer without weight decay for biases, norms and positions, with repeated augmentation."""

    repeats = 1
    mix: Callable | None = None

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> torch.Tensor:
        counted = self.sequences + len(inputs["pixel_values"])
        if self.mix is not None:
            inputs["pixel_values"], inputs["labels"] = self.mix(inputs["pixel_values"], inputs["labels"])
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.sequences = counted
        return loss

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        return [
            name
            for name, parameter in model.named_parameters()
            if not name.endswith((".bias", "position_embeddings")) and not (parameter.ndim == 1 and ".weight" in name)
        ]

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> torch.utils.data.Sampler | None:
        if self.repeats > 1:
            return make_sampler(self.train_dataset, self.repeats)
        return super()._get_train_sampler(train_dataset)


def load_pictures(data: DataArguments, limits: dict[str, int | None]) -> dict[str, Dataset]:
    """Load the splits from files, from the Hub, or from a folder of splits with a folder for every class."""
    path = data.dataset_path
    if path is None or not any(Path(path, name).is_dir() for name in limits):
        return undecoded(load_splits(limits, path, data.dataset_name, data.dataset_config))
    try:
        splits = load_dataset("imagefolder", data_dir=path)
    except (DatasetsError, OSError, ValueError) as error:
        fail(f"cannot load {path}: {error}")
    if missing := [name for name in limits if name not in splits]:
        fail(f"{path} has no folder {', '.join(missing)} with pictures")
    splits = {name: splits[name] if limit is None else splits[name].take(limit) for name, limit in limits.items()}
    return undecoded(splits)


def encode_split(
    split: Dataset, name: str, data: DataArguments, channels: int, transform: Transform, names: list[str]
) -> Dataset:
    """Return the split with `pixel_values`, made anew whenever a row is read, and `labels`; -100 = not known."""
    labels = class_numbers(split, data.label_column, names, name)
    pictures = split.select_columns([data.image_column]).add_column("labels", labels)
    pixels = holds_pixels(split, data.image_column)

    def encode(batch: dict[str, list]) -> dict[str, list]:
        read = [read_picture(value, channels, pixels) for value in batch[data.image_column]]
        return {"pixel_values": [transform(picture) for picture in read], "labels": batch["labels"]}

    return pictures.with_transform(encode)


def make_loss(smoothing: float) -> Callable:
    """Return the mean cross entropy of labels `[B]` or, after mixup, `[B, classes]`, which are smooth already."""

    def loss(outputs, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        smooth = smoothing if labels.dim() == 1 and torch.is_grad_enabled() else 0.0
        return torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=smooth)

    return loss


class ImageClassification(Script):
    data_arguments, model_arguments = DataArguments, ModelArguments
    defaults = {"metric_for_best_model": "accuracy", "remove_unused_columns": False}
    title, metric = "image classification", "eval_accuracy"

    def check(self) -> None:
        super().check()
        self.training.include_num_input_tokens_seen = "no"  # pictures are counted
        check_source(self.data)
        check_augmentation(self.data)
        if self.data.mixup or self.data.cutmix:
            if self.training.per_device_train_batch_size % 2:
                fail("--mixup and --cutmix mix pairs: --per_device_train_batch_size must be even")
            self.training.dataloader_drop_last = True  # the last batch may be odd
        if self.data.image_size is not None:
            check_least(self.data, 1, "image_size")
        check_least(self.model, 1, "patch_size")
        if self.data.channels not in (None, 1, 3):
            fail(f"--channels {self.data.channels} must be 1 or 3")

    def prepare(self) -> None:
        data, splits = self.data, load_pictures(self.data, self.limits())
        for name, split in splits.items():
            check_columns(split, name, [data.image_column] + [data.label_column] * (name != "test"))
        names = class_names(splits.get("train"), data.label_column, self.model.model_name_or_path)
        split = next(iter(splits.values()))
        first = read_picture(split[0][data.image_column], pixels=holds_pixels(split, data.image_column))
        channels = data.channels or (1 if first.mode == "L" else 3)
        self.config, size = self.make_config(min(first.size), channels, names)
        self.processor = self.make_processor(size, channels)
        for name, split in splits.items():
            if name == "train":
                transform = training_transform(data, self.processor, size)
                encoded = encode_split(split, name, data, channels, transform, names)
                self.splits[name] = augment_split(encoded, data, self.training.seed)
            else:
                self.splits[name] = encode_split(
                    split, name, data, channels, evaluation_transform(self.processor), names
                )

    def build(self) -> Trainer:
        smoothing, self.training.label_smoothing_factor = self.training.label_smoothing_factor, 0.0
        trainer = self.make_trainer(
            make_model(AutoModelForImageClassification, self.model, self.config),
            PictureTrainer,
            processing_class=self.processor,
            compute_loss_func=make_loss(smoothing),
            compute_metrics=accuracy,
        )
        trainer.repeats = self.data.repeated_augmentation
        trainer.mix = make_mix(self.data, self.config.num_labels, smoothing)
        return trainer

    def before_evaluation(self) -> dict[str, Any]:
        """Return the speed of training."""
        callbacks = self.trainer.callback_handler.callbacks
        seconds = sum(callback.seconds for callback in callbacks if isinstance(callback, SpeedCallback))
        (pictures,) = total([self.trainer.sequences], self.training)
        return {"images_per_second": pictures / seconds} if seconds else {}

    def make_config(self, side: int, channels: int, names: list[str]) -> tuple[PreTrainedConfig, int]:
        """Return the configuration and the size of its pictures, which is that of the data where nothing says more."""
        size, patch, fields = self.data.image_size or side, self.model.patch_size, {"num_channels": channels}
        if self.model.model_name_or_path:
            loaded = AutoConfig.from_pretrained(self.model.model_name_or_path)
            size, patch = loaded.image_size, loaded.patch_size
            if self.data.image_size not in (None, size) or loaded.num_channels != channels:
                fail(
                    f"{self.model.model_name_or_path} takes pictures of {size} x {size} in {loaded.num_channels} "
                    f"channels, not of {self.data.image_size or size} in {channels} (--image_size, --channels)"
                )
        if size % patch:
            fail(f"--patch_size {patch} does not divide the size of the pictures, {size} (--image_size)")
        fields |= {"image_size": size, "patch_size": patch, **label_fields(names)}
        fields["problem_type"] = "single_label_classification"
        return make_config(self.model, None, (size // patch) ** 2, "patches", **fields), size

    def make_processor(self, size: int, channels: int) -> BaseImageProcessor:
        """Load the evaluation transform from the model, or make it."""
        if self.model.model_name_or_path:
            return load_processor(self.model.model_name_or_path)
        mean, std = _OF_GREY if channels == 1 else _OF_COLOUR
        mean, std = self.data.image_mean or mean, self.data.image_std or std
        return make_processor(size, channels, mean, std, self.data.center_crop)

    def predict(self) -> dict[str, Any]:
        """Write the predicted classes of the test split; return their path, and the accuracy if labels are known."""
        return write_predictions(self.trainer, self.splits["test"])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    return ImageClassification(argv).run()


if __name__ == "__main__":
    main()
