import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, Image as ImageFeature
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from luna_mega import MegaForImageClassification
from tests.examples.runs import assert_error, steps, write_splits
from tests.marks import slow_but

RUN = ["run_image_classification", "--per_device_train_batch_size", 8]
MEGA = (
    "hidden_size=16,num_hidden_layers=1,intermediate_size=16,nffn_hidden_size=16,shared_representation_size=8,"
    "ema_projection_size=4,relative_positional_bias=simple,pooling=mean,dropout_prob=0.0,drop_path_rate=0.0"
)
VIT = "hidden_size=16,num_hidden_layers=1,intermediate_size=16,num_attention_heads=2"
SIDE, NAMES = 8, ["left", "right"]


def draw_pixels(label: int, draw: np.random.Generator) -> np.ndarray:
    """Return an image that is bright in its left (label 0) or right half (label 1)."""
    pixels = draw.integers(0, 90, (SIDE, SIDE))
    pixels[:, SIDE // 2 * label :][:, : SIDE // 2] += 120
    return pixels.astype(np.uint8)


def rows(size: int, seed: int) -> list[dict]:
    draw = np.random.default_rng(seed)
    return [{"image": draw_pixels(index % 2, draw).tobytes(), "label": NAMES[index % 2]} for index in range(size)]


@pytest.fixture
def folder(tmp_path):
    """Write raw gray pixels and labels as words to parquet files."""
    return write_splits(rows, tmp_path / "halves", train=48, validation=16, test=8)


def options(path: Path, output: Path, *more, model_type: str = "mega") -> list:
    model = ["--model_type", model_type, "--config_overrides", {"mega": MEGA, "vit": VIT}[model_type]]
    source = ["--dataset_path", path, "--output_dir", output, "--patch_size", 4, "--center_crop", "false"]
    return [*source, *model, "--do_train", "--learning_rate", 0.02, *more]


def test_mega_from_scratch(run, folder, tmp_path):
    output = tmp_path / "out"
    summary = run(
        *options(folder, output, "--do_eval", "--do_predict", "--num_train_epochs", 6, "--crop_padding", 1),
        *("--eval_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end"),
        *("--label_smoothing_factor", 0.1),
    )
    assert summary["train_samples"] == 48 and summary["eval_accuracy"] == summary["test_accuracy"] == 1.0
    assert summary["train_samples_per_second"] > 0 and "num_input_tokens_seen" not in summary
    assert (output / "README.md").read_text(encoding="utf-8").startswith("---\n")
    assert (output / "predictions.tsv").is_file()
    model = AutoModelForImageClassification.from_pretrained(output)
    assert type(model) is MegaForImageClassification and model.config.id2label == dict(enumerate(NAMES))
    assert (model.config.image_size, model.config.max_positions, model.config.num_channels) == (SIDE, 4, 1)
    processor = AutoImageProcessor.from_pretrained(output, backend="pil")
    classify = pipeline("image-classification", model=model, image_processor=processor)
    bright = Image.fromarray(draw_pixels(1, np.random.default_rng(3)))
    pixels = processor(np.asarray(bright)[None], input_data_format="channels_first", return_tensors="pt")
    assert classify.model(**pixels).logits.argmax().item() == 1
    first = (output / "predictions.tsv").read_text(encoding="utf-8").splitlines()
    assert first[:3] == ["index\tprediction", "0\tleft", "1\tright"]

    # The script evaluates the folder, which requires the evaluation transform and the image size of the model.
    source = ["--dataset_path", folder, "--model_name_or_path", output, "--do_eval"]
    assert run(*source, "--output_dir", tmp_path / "again", "--do_predict")["eval_accuracy"] == 1.0
    third = ["--output_dir", tmp_path / "third"]
    message = r"reads images of 8 x 8 in 1 channels, not of 12"
    assert_error(run, message, *source, *third, "--image_size", 12, output=third[1])
    (output / "preprocessor_config.json").unlink()
    assert_error(run, "out.*preprocessor_config.json", *source, *third, output=third[1])


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


@pytest.mark.slow
def test_another_model_of_transformers(run, folder, tmp_path):
    summary = run(*options(folder, tmp_path / "out", "--do_eval", "--num_train_epochs", 5, model_type="vit"))
    assert summary["eval_accuracy"] > 0.7


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--patch_size", 3], "--patch_size 3 does not divide the size of the images, 8"),
        (["--channels", 2], "--channels 2 must be 1 or 3"),
        (["--random_erasing", 0.2], "--random_erasing 0.2 is a part of timm's transform"),
        (["--image_mean", 0.5, 0.5], "must have 1 numbers, got 2 and 1"),
        (["--image_column", "photo"], "no column photo, only image, label"),
        (["--auto_augment", "none", "--horizontal_flip"], "--auto_augment crops and flips"),
    ],
)  # fmt: skip
def test_incompatible_options(run, folder, tmp_path, arguments, message):
    output = tmp_path / "out"
    assert_error(run, message, *options(folder, output, *arguments), output=output)


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


def test_missing_package(run, folder, tmp_path):
    try:
        import timm  # noqa: F401
    except ImportError:
        message = r"this augmentation requires timm, run `pip install '\.\[vision\]'`"
        assert_error(run, message, *options(folder, tmp_path / "out", "--mixup", 0.8), output=tmp_path / "out")
    else:
        run(*options(folder, tmp_path / "out", "--mixup", 0.8, "--cutmix", 1.0, "--max_steps", 2))
        assert steps(tmp_path / "out") == 2
