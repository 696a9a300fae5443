"""run_image_classification.py: formats of images, models of other images, and mixup."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, Image as ImageFeature
from PIL import Image
from transformers import AutoModelForImageClassification

from tests.examples.contract import HALVES as NAMES, SCRIPTS, draw_pixels, images as rows
from tests.examples.runs import assert_error, write_splits
from tests.marks import slow_but

RUN = ["run_image_classification", "--per_device_train_batch_size", 8]


@pytest.fixture
def folder(tmp_path):
    """Write raw gray pixels and labels as words to parquet files."""
    return write_splits(rows, tmp_path / "halves", train=48, validation=16)


def options(path: Path, output: Path, *more) -> list:
    row = SCRIPTS["run_image_classification"]
    return [*row.data, *row.model, "--dataset_path", path, "--output_dir", output, "--do_train", *more]


def test_models_of_other_images(run, folder, tmp_path):
    """The folder of a model has the image size, the channels and the evaluation transform."""
    output, other = tmp_path / "out", tmp_path / "other"
    summary = run(*options(folder, output, "--max_steps", 1, "--label_smoothing_factor", 0.1))
    assert "num_input_tokens_seen" not in summary
    config = AutoModelForImageClassification.from_pretrained(output).config
    assert (config.image_size, config.max_positions, config.num_channels) == (8, 4, 1)
    source = ["--dataset_path", folder, "--model_name_or_path", output, "--do_eval", "--output_dir", other]
    for option, value, found in (("--image_size", 12, "12 in 1"), ("--channels", 3, "8 in 3")):
        message = f"reads images of 8 x 8 in 1 channels, not of {found}"
        assert_error(run, message, *source, option, value, output=other)
    (output / "preprocessor_config.json").unlink()
    assert_error(run, "out.*preprocessor_config.json", *source, output=other)


@pytest.mark.parametrize("kind", slow_but(["files"], ["files", "class folders", "image feature", "encoded bytes"]))
def test_sources_in_color(run, tmp_path, kind):
    draw, path = np.random.default_rng(0), tmp_path / "data"
    path.mkdir()
    for split, size in (("train", 8), ("validation", 4)):
        images = [Image.fromarray(np.repeat(draw_pixels(index % 2, draw)[..., None], 3, 2)) for index in range(size)]
        labels = [NAMES[index % 2] for index in range(size)]
        if kind in ("files", "class folders"):
            for index, (image, label) in enumerate(zip(images, labels, strict=True)):
                (path / split / label).mkdir(parents=True, exist_ok=True)
                image.save(path / split / label / f"{index}.{'png' if kind == 'files' else 'jpg'}")
        elif kind == "image feature":
            data = Dataset.from_dict({"image": images, "label": labels}).cast_column("image", ImageFeature())
            data.to_parquet(path / f"{split}.parquet")
        else:
            files = [io.BytesIO() for _ in images]
            for image, file in zip(images, files, strict=True):
                image.save(file, "png")
            frame = pd.DataFrame({"image": [file.getvalue() for file in files], "label": labels})
            frame.to_parquet(path / f"{split}.parquet")
    output = tmp_path / "out"
    summary = run(*options(path, output, "--do_eval", "--max_steps", 2, "--horizontal_flip"))
    assert summary["train_samples"] == 8 and "eval_accuracy" in summary
    assert AutoModelForImageClassification.from_pretrained(output).config.num_channels == 3


class SwapHalves:
    """Mock of timm's Mixup: mix every image with the one at the mirrored position of the batch."""

    def __init__(self, mixup_alpha: float, cutmix_alpha: float, label_smoothing: float, num_classes: int):
        self.classes, self.batches = num_classes, []

    def __call__(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.batches.append(len(pixels))
        labels = torch.nn.functional.one_hot(labels, self.classes).float()
        return (pixels + pixels.flip(0)) / 2, (labels + labels.flip(0)) / 2


def test_mixup_is_training_only(run, folder, tmp_path, monkeypatch):
    """Evaluation uses unmodified images and labels, also during training; odd batch sizes raise an error."""
    made = []

    def mixup(*arguments, **options) -> SwapHalves:
        made.append(SwapHalves(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("luna_mega.training.images._timm", lambda: SimpleNamespace(Mixup=mixup))
    more = ["--mixup", 0.8, "--cutmix", 1.0, "--max_train_samples", 21, "--num_train_epochs", 2, "--do_eval"]
    summary = run(*options(folder, tmp_path / "out", *more, "--eval_strategy", "epoch"))
    assert made[0].batches == [8] * 4 and 0.0 <= summary["eval_accuracy"] <= 1.0
    output = tmp_path / "odd"
    message = "--mixup and --cutmix mix pairs; --per_device_train_batch_size must be even"
    odd = ["--mixup", 0.8, "--per_device_train_batch_size", 7]
    assert_error(run, message, *options(folder, output, *odd), output=output)
