"""Trains a classifier of audio clips, such as spoken words, on their raw samples.

    python examples/run_audio.py --recipe examples/recipes/audio/fsdd_mega_chunk.yaml --dataset_path DIR ...

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common.arguments import fail, find_checkpoint, parse_arguments
from common.data import load_splits
from common.hub import publish
from common.model import CheckpointArguments, make_config, make_model
from common.training import OrderedTrainer, check_training, describe, evaluate, finish, train
from datasets import Audio, ClassLabel, Dataset
from scipy.signal import resample_poly
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    Wav2Vec2FeatureExtractor,
    set_seed,
)


@dataclass
class DataArguments:
    dataset_name: str | None = field(default=None, metadata={"help": "Hub name of a data set with clips and labels"})
    dataset_config: str | None = field(default=None, metadata={"help": "its configuration"})
    dataset_path: str | None = field(
        default=None, metadata={"help": "local folder instead of the Hub: parquet or json(l) files, named by split"}
    )
    audio_column: str = field(
        default="audio", metadata={"help": "clips: audio files, lists of numbers, or bytes of 16-bit samples"}
    )
    rate_column: str = field(default="sampling_rate", metadata={"help": "samples a second of lists and bytes"})
    label_column: str = field(default="label", metadata={"help": "classes: their names, or numbers"})
    hold_out: str | None = field(
        default=None, metadata={"help": "training rows to validate on, if there is no split for that: take=5,6"}
    )
    sampling_rate: int | None = field(
        default=None, metadata={"help": "resample to this rate; default: that of the model, else of the first clip"}
    )
    max_seconds: float | None = field(default=None, metadata={"help": "longer clips are cut"})
    random_shift: float = field(default=0.0, metadata={"help": "move training clips by up to this many seconds"})
    random_speed: float = field(default=0.0, metadata={"help": "0.1: play training clips up to 10 % faster or slower"})
    random_gain: float = field(default=0.0, metadata={"help": "training clips are up to this many dB louder or softer"})
    random_noise: float = field(default=0.0, metadata={"help": "0.1: noise of up to 10 % of a clip's deviation"})
    max_train_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    max_predict_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "stop after N evaluations without a better metric_for_best_model"}
    )


def parse(argv: list[str] | None) -> tuple[DataArguments, CheckpointArguments, TrainingArguments]:
    arguments = (DataArguments, CheckpointArguments, TrainingArguments)
    data, model, training = parse_arguments(arguments, argv, metric_for_best_model="accuracy")
    check_training(training, model, data.early_stopping_patience)
    if (data.dataset_name is None) == (data.dataset_path is None):
        fail("pass one of --dataset_name and --dataset_path")
    for name in ("sampling_rate", "max_seconds"):
        if getattr(data, name) is not None and getattr(data, name) <= 0:
            fail(f"--{name} {getattr(data, name)}: must be above 0")
    for name in ("random_shift", "random_speed", "random_gain", "random_noise"):
        if getattr(data, name) < 0 or (name == "random_speed" and data.random_speed >= 1):
            fail(f"--{name} {getattr(data, name)}: must be at least 0{', below 1' * (name == 'random_speed')}")
    return data, model, training


def hold_out(split: Dataset, rows: str) -> tuple[Dataset, Dataset]:
    """The rows of `split` that `rows` ("take=5,6") does not mean, and those that it does."""
    column, _, values = rows.partition("=")
    if column not in split.column_names:
        fail(f"--hold_out {rows}: split train has no column {column}, only {', '.join(split.column_names)}")
    chosen = np.isin([str(value) for value in split[column]], values.split(","))
    if chosen.all() or not chosen.any():
        fail(f"--hold_out {rows}: means {chosen.sum()} of the {len(split)} training rows")
    return split.select(np.flatnonzero(~chosen)), split.select(np.flatnonzero(chosen))


def load_clips(data: DataArguments, training: TrainingArguments) -> dict[str, Dataset]:
    """The splits that the run needs, with clips and labels in place."""
    wanted = {"train": training.do_train, "validation": training.do_eval, "test": training.do_predict}
    source = {"validation": "train"} if data.hold_out else {}
    names = list(dict.fromkeys(source.get(name, name) for name, needed in wanted.items() if needed))
    splits = load_splits(names, data.dataset_path, data.dataset_name, data.dataset_config)
    if data.hold_out and "train" in splits:
        splits["train"], splits["validation"] = hold_out(splits["train"], data.hold_out)
    limits = (data.max_train_samples, data.max_eval_samples, data.max_predict_samples)
    clips = {}
    for (name, needed), limit in zip(wanted.items(), limits, strict=True):
        if not needed:
            continue
        clips[name] = split = splits[name] if limit is None else splits[name].take(limit)
        if len(split) == 0:
            fail(f"split {name} is empty")
        columns = [data.audio_column] + [data.label_column] * (name != "test")
        if not isinstance(split.features.get(data.audio_column), Audio):
            columns.append(data.rate_column)
        if missing := [column for column in columns if column not in split.column_names]:
            fail(f"split {name} has no column {', '.join(missing)}, only {', '.join(split.column_names)}")
        try:
            split[0]
        except ImportError as error:
            fail(f"{data.audio_column} cannot be decoded: {error}")
    return clips


def read_clip(row: dict[str, Any], data: DataArguments) -> tuple[np.ndarray, int]:
    """Samples `[T]` of a row, 16-bit ones from -1 to 1, and how many make a second."""
    clip = row[data.audio_column]
    try:
        if isinstance(clip, bytes):
            return np.frombuffer(clip, "<i2").astype(np.float32) / 32768, row[data.rate_column]
        if isinstance(clip, list):
            return np.asarray(clip, np.float32), row[data.rate_column]
        return np.asarray(clip["array"], np.float32), clip["sampling_rate"]
    except (TypeError, ValueError) as error:
        fail(f"column {data.audio_column} holds {str(clip)[:40]!r}, which is no clip: {error}")


def make_extractor(
    data: DataArguments, model: CheckpointArguments, clips: dict[str, Dataset]
) -> Wav2Vec2FeatureExtractor:
    """What brings clips to mean 0 and variance 1 and pads them: that of the model, or a new one."""
    if not model.model_name_or_path:
        _, rate = read_clip(next(iter(clips.values()))[0], data)
        return Wav2Vec2FeatureExtractor(sampling_rate=data.sampling_rate or rate, return_attention_mask=True)
    try:
        extractor = Wav2Vec2FeatureExtractor.from_pretrained(model.model_name_or_path)
    except OSError as error:
        fail(error)
    if data.sampling_rate not in (None, extractor.sampling_rate):
        fail(f"--sampling_rate {data.sampling_rate}: {model.model_name_or_path} has {extractor.sampling_rate}")
    return extractor


def label_names(data: DataArguments, model: CheckpointArguments, clips: dict[str, Dataset]) -> list[str]:
    """The classes: those of the training rows, without them those of the model."""
    if "train" not in clips:
        return list(AutoConfig.from_pretrained(model.model_name_or_path).id2label.values())
    feature = clips["train"].features[data.label_column]
    if isinstance(feature, ClassLabel):
        return feature.names
    return [str(label) for label in sorted(set(clips["train"][data.label_column]) - {None})]


def encode_split(
    split: Dataset, name: str, data: DataArguments, extractor: Wav2Vec2FeatureExtractor, labels: list[str]
) -> Dataset:
    """Columns `input_values` and `labels`, in the test split -100 where the label is not known."""
    rate = extractor.sampling_rate
    feature = split.features.get(data.label_column)

    def encode(row: dict[str, Any], index: int) -> dict[str, Any]:
        samples, own_rate = read_clip(row, data)
        if own_rate != rate:
            common = math.gcd(own_rate, rate)
            samples = resample_poly(samples, rate // common, own_rate // common)
        samples = samples if data.max_seconds is None else samples[: round(data.max_seconds * rate)]
        if samples.ndim != 1 or len(samples) == 0 or not np.isfinite(samples).all():
            fail(f"split {name}, row {index}: {data.audio_column} is empty, not finite or has several channels")
        encoded = {"input_values": extractor(samples, sampling_rate=rate)["input_values"][0]}
        label = row.get(data.label_column)
        if isinstance(feature, ClassLabel) and label in range(feature.num_classes):
            label = feature.int2str(label)
        if name != "test" and str(label) not in labels:
            fail(f"split {name}, row {index}: label {label!r} is not one of {', '.join(labels)}")
        encoded["labels"] = labels.index(str(label)) if str(label) in labels else -100
        return encoded

    options = {"with_indices": True, "remove_columns": split.column_names, "keep_in_memory": True}
    return split.map(encode, **options, load_from_cache_file=False, desc=name)


def augment(clip: np.ndarray, rate: int, data: DataArguments) -> np.ndarray:
    """Speed, then shift (into silence or out of the clip), gain and noise, each drawn anew."""
    if data.random_speed:
        length = round(len(clip) / random.uniform(1 - data.random_speed, 1 + data.random_speed))
        clip = np.interp(np.linspace(0, len(clip) - 1, length), np.arange(len(clip)), clip)
    most = min(round(data.random_shift * rate), len(clip) // 2)
    shift = random.randint(-most, most)
    clip = np.pad(clip[max(shift, 0) :], (max(-shift, 0), 0))
    clip = clip * 10 ** (random.uniform(-data.random_gain, data.random_gain) / 20)
    noise = random.uniform(0, data.random_noise) * clip.std()
    return (clip + noise * np.random.standard_normal(len(clip))).astype(np.float32)


def augment_split(split: Dataset, rate: int, data: DataArguments) -> Dataset:
    if not (data.random_speed or data.random_shift or data.random_gain or data.random_noise):
        return split

    def transform(batch: dict[str, list]) -> dict[str, list]:
        clips = [augment(np.asarray(clip, np.float32), rate, data) for clip in batch["input_values"]]
        return batch | {"input_values": clips}

    return split.with_transform(transform)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    known = prediction.label_ids != -100
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right[known].mean())} if known.any() else {}


def build_trainer(
    data: DataArguments, model: CheckpointArguments, training: TrainingArguments
) -> tuple[Trainer, dict[str, Dataset]]:
    clips = load_clips(data, training)
    extractor, labels = make_extractor(data, model, clips), label_names(data, model, clips)
    rate = extractor.sampling_rate
    splits = {name: encode_split(split, name, data, extractor, labels) for name, split in clips.items()}
    longest = max(len(clip) for split in splits.values() for clip in split["input_values"])
    if "train" in splits:
        longest = math.ceil(longest / (1 - data.random_speed)) + round(data.random_shift * rate)
        splits["train"] = augment_split(splits["train"], rate, data)
    config = make_config(
        model,
        None,
        longest,
        id2label=dict(enumerate(labels)),
        label2id={name: index for index, name in enumerate(labels)},
        problem_type="single_label_classification",
    )
    patience = data.early_stopping_patience
    trainer = OrderedTrainer(
        model=make_model(AutoModelForSequenceClassification, model, config),
        args=training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=extractor,
        data_collator=DataCollatorWithPadding(extractor),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(patience)] if patience else None,
    )
    return trainer, splits


def predict(trainer: Trainer, split: Dataset) -> dict[str, Any]:
    """Writes the predicted classes of the test split; returns their path, and the accuracy if labels are known."""
    output = trainer.predict(split)
    path = Path(trainer.args.output_dir, "predictions.tsv")
    if trainer.is_world_process_zero():
        path.parent.mkdir(parents=True, exist_ok=True)
        names = trainer.model.config.id2label
        lines = [f"{index}\t{names[best]}" for index, best in enumerate(output.predictions.argmax(-1))]
        path.write_text("\n".join(["index\tprediction", *lines]) + "\n", encoding="utf-8")
    scores = {name: value for name, value in output.metrics.items() if name == "test_accuracy"}
    return scores | {"predictions": str(path)}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    data, model, training = parse(argv)
    base_model, checkpoint = model.model_name_or_path, find_checkpoint(training)
    if checkpoint:  # for its configuration, also when the run began from scratch
        model.model_name_or_path = checkpoint
    set_seed(training.seed)
    trainer, splits = build_trainer(data, model, training)
    summary = describe(trainer, model)
    if training.do_train:
        summary |= train(trainer, checkpoint)
    if training.do_eval:
        summary |= evaluate(trainer)
    if training.do_predict:
        summary |= predict(trainer, splits["test"])
    summary = finish(trainer, "audio classification", summary, ["eval_accuracy"], start)
    if training.do_train:
        hub = {"dataset": data.dataset_name, "dataset_config": data.dataset_config}
        source = {"dataset": data.dataset_path} if data.dataset_path else hub
        publish(trainer, __file__, argv, summary, **source, base_model=base_model, license=model.license)
    return summary


if __name__ == "__main__":
    main()
