"""Labels, accuracy and test predictions of classifiers."""

from typing import Any

from datasets import ClassLabel, Dataset
from transformers import AutoConfig, EvalPrediction, Trainer

from luna_mega.training.arguments import fail
from luna_mega.training.report import SpeedCallback
from luna_mega.training.runs import OrderedTrainer, total, write_lines


def class_names(train: Dataset | None, column: str, model: str | None) -> list[str]:
    """Return the label names of the training split or, if it is None, of the configuration of `model`."""
    if train is None:
        return list(AutoConfig.from_pretrained(model).id2label.values())
    feature = train.features[column]
    if isinstance(feature, ClassLabel):
        return feature.names
    return [str(label) for label in sorted(set(train[column]) - {None})]


def class_numbers(split: Dataset, column: str, names: list[str], name: str) -> list[int]:
    """Return the label ids of a split; exit if a label is not in `names`.

    Missing labels are -100: all of them if there is no such column, and None and -1 in the split "test".
    """
    if column not in split.column_names:
        return [-100] * len(split)
    feature, numbers = split.features[column], []
    for row, label in enumerate(split[column]):
        if isinstance(feature, ClassLabel) and label in range(feature.num_classes):
            label = feature.int2str(label)
        unknown = name == "test" and label in (None, -1)
        if not unknown and str(label) not in names:
            fail(f"split {name}, row {row}: label {label!r} is not one of {', '.join(names)}")
        numbers.append(-100 if unknown else names.index(str(label)))
    return numbers


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the accuracy over the rows with a label."""
    known = prediction.label_ids != -100
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right[known].mean())} if known.any() else {}


def examples_per_second(trainer: OrderedTrainer, name: str) -> dict[str, float]:
    """Return the training speed without evaluation as the result `name`; empty if no step was taken."""
    callbacks = trainer.callback_handler.callbacks
    seconds = sum(callback.seconds for callback in callbacks if isinstance(callback, SpeedCallback))
    (examples,) = total([trainer.sequences], trainer.args)
    return {name: examples / seconds} if seconds else {}


def write_predictions(trainer: Trainer, splits: dict[str, Dataset]) -> dict[str, Any]:
    """With `--do_predict`, write the predicted test labels; return the path and, if known, the accuracy."""
    if not trainer.args.do_predict:
        return {}
    output = trainer.predict(splits["test"])
    names = trainer.model.config.id2label
    lines = [f"{index}\t{names[best]}" for index, best in enumerate(output.predictions.argmax(-1))]
    scores = {name: value for name, value in output.metrics.items() if name == "test_accuracy"}
    return scores | {"predictions": write_lines(trainer, "predictions.tsv", ["index\tprediction", *lines])}
