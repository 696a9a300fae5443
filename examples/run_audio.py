r"""Train a classifier of audio clips, such as spoken words, on raw samples.

    python examples/run_audio.py --recipe examples/recipes/audio/fsdd_mega_chunk.yaml --dataset_path data/fsdd \
        --output_dir outputs/fsdd

All fields of TrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Audio, Dataset
from scipy.signal import resample_poly
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    TrainingArguments,
    Wav2Vec2FeatureExtractor,
)
from transformers.hf_argparser import HfArg

from luna_mega import training as lib


@dataclass
class DataArguments(lib.SourceArguments, lib.ClassifierArguments):
    audio_column: str = HfArg(default="audio", help="clips: audio files, lists of numbers, or bytes of 16-bit samples")
    rate_column: str = HfArg(default="sampling_rate", help="column with the sampling rate, for lists and bytes")
    label_column: str = HfArg(default="label", help="column with the labels: names or ids")
    hold_out: str | None = HfArg(default=None, help="condition of training rows for the validation split: take=5,6")
    sampling_rate: int | None = HfArg(default=None, help="rate in Hz; default: the loaded model's, or the first clip's")
    max_seconds: float | None = HfArg(default=None, help="maximum length; longer clips are truncated")
    random_shift: float = HfArg(default=0.0, help="maximum shift of training clips in seconds")
    random_speed: float = HfArg(default=0.0, help="maximum relative change of the speed of training clips: 0.1")
    random_gain: float = HfArg(default=0.0, help="maximum change of the volume of training clips in dB")
    random_noise: float = HfArg(default=0.0, help="maximum noise, relative to the standard deviation of a clip: 0.1")


def hold_out(split: Dataset, condition: str) -> tuple[Dataset, Dataset]:
    """Return the rows that do not meet the `condition` ("take=5,6"), and those that do."""
    column, _, values = condition.partition("=")
    if column not in split.column_names:
        lib.fail(f"--hold_out {condition}: split train has no column {column}, only {', '.join(split.column_names)}")
    chosen = np.isin([str(value) for value in split[column]], values.split(","))
    if chosen.all() or not chosen.any():
        lib.fail(f"--hold_out {condition} must select some of the {len(split)} training rows, got {chosen.sum()}")
    return split.select(np.flatnonzero(~chosen)), split.select(np.flatnonzero(chosen))


def read_clip(row: dict[str, Any], data: DataArguments) -> tuple[np.ndarray, int]:
    """Return the samples `[T]` of a row and their rate; 16-bit samples are scaled to -1 to 1."""
    clip = row[data.audio_column]
    try:
        if isinstance(clip, bytes):
            samples, rate = np.frombuffer(clip, "<i2").astype(np.float32) / 32768, row[data.rate_column]
        elif isinstance(clip, list):
            samples, rate = np.asarray(clip, np.float32), row[data.rate_column]
        else:
            samples, rate = np.asarray(clip["array"], np.float32), clip["sampling_rate"]
    except (TypeError, ValueError) as error:
        lib.fail(f"column {data.audio_column} contains {str(clip)[:40]!r} instead of a clip: {error}")
    if not isinstance(rate, int) or rate < 1:
        lib.fail(f"the sampling rate of a clip must be a positive integer, got {rate!r}")
    return samples, rate


def make_extractor(
    data: DataArguments, model: lib.CheckpointArguments, clips: dict[str, Dataset]
) -> Wav2Vec2FeatureExtractor:
    """Create or load the feature extractor, which normalizes and pads clips."""
    if not model.model_name_or_path:
        _, rate = read_clip(next(iter(clips.values()))[0], data)
        return Wav2Vec2FeatureExtractor(sampling_rate=data.sampling_rate or rate, return_attention_mask=True)
    extractor = Wav2Vec2FeatureExtractor.from_pretrained(model.model_name_or_path)
    if data.sampling_rate not in (None, extractor.sampling_rate):
        lib.fail(f"--sampling_rate {data.sampling_rate}: {model.model_name_or_path} has {extractor.sampling_rate}")
    return extractor


def encode_split(
    split: Dataset,
    name: str,
    data: DataArguments,
    extractor: Wav2Vec2FeatureExtractor,
    outputs: dict[str, int],
    in_memory: bool = True,
) -> Dataset:
    """Return a split with the columns `input_values` and `labels` (-100 = unknown)."""
    rate = extractor.sampling_rate
    split, numbers = lib.class_numbers(split, data.label_column, outputs, name)

    def encode(row: dict[str, Any], index: int) -> dict[str, Any]:
        samples, own_rate = read_clip(row, data)
        if own_rate != rate:
            common = math.gcd(own_rate, rate)
            samples = resample_poly(samples, rate // common, own_rate // common)
        samples = samples if data.max_seconds is None else samples[: round(data.max_seconds * rate)]
        if samples.ndim != 1 or len(samples) == 0 or not np.isfinite(samples).all():
            lib.fail(f"split {name}, row {index}: {data.audio_column} is empty, not finite or has several channels")
        return {"input_values": extractor(samples, sampling_rate=rate)["input_values"][0], "labels": numbers[index]}

    options = {"with_indices": True, "remove_columns": split.column_names, "keep_in_memory": in_memory}
    return split.map(encode, **options, load_from_cache_file=not in_memory, desc=name)


def augment(clip: np.ndarray, rate: int, data: DataArguments, numbers: np.random.Generator) -> np.ndarray:
    """Change speed, position, volume and noise of a clip at random."""
    if data.random_speed:
        length = round(len(clip) / numbers.uniform(1 - data.random_speed, 1 + data.random_speed))
        clip = np.interp(np.linspace(0, len(clip) - 1, length), np.arange(len(clip)), clip)
    most = min(round(data.random_shift * rate), len(clip) // 2)
    shift = int(numbers.integers(-most, most, endpoint=True))
    clip = np.pad(clip[max(shift, 0) :], (max(-shift, 0), 0))
    clip = clip * 10 ** (numbers.uniform(-data.random_gain, data.random_gain) / 20)
    noise = numbers.uniform(0, data.random_noise) * clip.std()
    return (clip + noise * numbers.standard_normal(len(clip))).astype(np.float32)


def augment_split(split: Dataset, rate: int, data: DataArguments, seed: int) -> Dataset | lib.Redrawn:
    """Augment the clips of `split` differently in each epoch."""
    if not (data.random_speed or data.random_shift or data.random_gain or data.random_noise):
        return split

    def augment_row(row: dict[str, Any], numbers: torch.Generator) -> dict[str, Any]:
        clip = np.asarray(row["input_values"], np.float32)
        return row | {"input_values": augment(clip, rate, data, np.random.default_rng(numbers.initial_seed()))}

    return lib.Redrawn(split, augment_row, seed)


def parse(argv: list[str] | None) -> tuple[DataArguments, lib.CheckpointArguments, TrainingArguments, lib.Run]:
    kinds = (DataArguments, lib.CheckpointArguments, TrainingArguments)
    data, model, training = lib.parse_arguments(kinds, argv, metric_for_best_model="accuracy")
    run = lib.Run(data, model, training)
    for name in ("sampling_rate", "max_seconds"):
        if getattr(data, name) is not None and getattr(data, name) <= 0:
            lib.fail(f"--{name} {getattr(data, name)} must be above 0")
    lib.check_least(data, 0, "random_shift", "random_speed", "random_gain", "random_noise")
    if data.random_speed >= 1:
        lib.fail(f"--random_speed {data.random_speed} must be below 1")
    return data, model, training, run


def load_data(
    data: DataArguments, model: lib.CheckpointArguments, training: TrainingArguments
) -> tuple[dict[str, Dataset | lib.Redrawn], Wav2Vec2FeatureExtractor, PreTrainedConfig]:
    """Return the encoded splits, the extractor, and the configuration of the model."""
    divide = partial(hold_out, condition=data.hold_out) if data.hold_out else None
    columns = {"columns": [data.audio_column], "label": data.label_column}
    clips = lib.load_splits(lib.choose_splits(training, data), data, **columns, divide=divide)
    for name, split in clips.items():
        if not isinstance(split.features[data.audio_column], Audio):
            lib.check_split(split, name, (), [data.rate_column])
    extractor = make_extractor(data, model, clips)
    labels, outputs = lib.match_labels(model, lib.class_names(clips, data.label_column), training)
    options = (data, extractor, outputs, training.world_size == 1)
    splits = {name: encode_split(split, name, *options) for name, split in clips.items()}
    longest = max(len(clip) for split in splits.values() for clip in split["input_values"])
    if "train" in splits:
        rate = extractor.sampling_rate
        longest = math.ceil(longest / (1 - data.random_speed)) + round(data.random_shift * rate)
        splits["train"] = augment_split(splits["train"], rate, data, training.seed)
    fields = {**lib.label_fields(labels), "problem_type": "single_label_classification"}
    return splits, extractor, lib.make_config(model, None, longest, **fields)


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)

    with run.reading():
        splits, extractor, config = load_data(data, model, training)

    trainer = lib.OrderedTrainer(
        lib.make_model(AutoModelForSequenceClassification, model, config),
        training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=extractor,
        compute_metrics=lib.accuracy,
    )

    return run.fit(trainer, predict=lambda: lib.write_predictions(trainer, splits["test"]))


if __name__ == "__main__":
    main()
