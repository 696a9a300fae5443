"""Classes of examples that are not text: their names, the metric, and predictions for test data."""

from typing import Any

from datasets import ClassLabel, Dataset
from transformers import AutoConfig, EvalPrediction, Trainer

from common.training import write_lines


def class_names(train: Dataset | None, column: str, model: str | None) -> list[str]:
    """Return the classes of the training rows or, without these, of the `model`."""
    if train is None:
        return list(AutoConfig.from_pretrained(model).id2label.values())
    feature = train.features[column]
    if isinstance(feature, ClassLabel):
        return feature.names
    return [str(label) for label in sorted(set(train[column]) - {None})]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of right classes among the rows whose class is known (not -100)."""
    known = prediction.label_ids != -100
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right[known].mean())} if known.any() else {}


def write_predictions(trainer: Trainer, split: Dataset) -> dict[str, Any]:
    """Write the predicted classes of a split; return their path, and the accuracy if labels are known."""
    output = trainer.predict(split)
    names = trainer.model.config.id2label
    lines = [f"{index}\t{names[best]}" for index, best in enumerate(output.predictions.argmax(-1))]
    scores = {name: value for name, value in output.metrics.items() if name == "test_accuracy"}
    return scores | {"predictions": write_lines(trainer, "predictions.tsv", ["index\tprediction", *lines])}
