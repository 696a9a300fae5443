"""Fine-tune, or train from scratch, a sequence classifier on a GLUE task.

    python examples/run_glue.py --recipe examples/recipes/glue/sst2_small.yaml --output_dir outputs/sst2

All fields of TrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import evaluate
import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

from luna_mega import training as lib

METRIC = "metrics/glue_metrics"  # next to this file


@dataclass(frozen=True)
class GlueTask:
    """GLUE task: text columns, labels (empty for regression), main metric, and file name of the GLUE server."""

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metric: str
    file: str
    predicts_names: bool = False  # instead of ids

    def splits(self, name: str) -> dict[str, str]:
        """Return the splits of "validation" or "test" by the prefix of their metrics."""
        return {side: f"{name}_{side}" for side in ("matched", "mismatched")} if self.file == "MNLI" else {"": name}

    def decode(self, predictions: np.ndarray, outputs: list[int]) -> np.ndarray:
        """Return label ids or scores from logits `[N, outputs]`; `outputs` are those of the labels."""
        return predictions[:, outputs].argmax(-1) if self.labels else predictions.squeeze(-1)


PAIR = ("sentence1", "sentence2")
NLI = ("entailment", "not_entailment")
MNLI = ("entailment", "neutral", "contradiction")
TASKS = {
    "cola": GlueTask(("sentence",), ("unacceptable", "acceptable"), "matthews_correlation", "CoLA"),
    "mnli": GlueTask(("premise", "hypothesis"), MNLI, "matched_accuracy", "MNLI", predicts_names=True),
    "mrpc": GlueTask(PAIR, ("not_equivalent", "equivalent"), "combined_score", "MRPC"),
    "qnli": GlueTask(("question", "sentence"), NLI, "accuracy", "QNLI", predicts_names=True),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate"), "combined_score", "QQP"),
    "rte": GlueTask(PAIR, NLI, "accuracy", "RTE", predicts_names=True),
    "sst2": GlueTask(("sentence",), ("negative", "positive"), "accuracy", "SST-2"),
    "stsb": GlueTask(PAIR, (), "combined_score", "STS-B"),
    "wnli": GlueTask(PAIR, ("not_entailment", "entailment"), "accuracy", "WNLI"),
}


@dataclass
class DataArguments(lib.TextArguments):
    task_name: str | None = HfArg(default=None, help=f"task: {', '.join(TASKS)}")
    dataset_name: str = HfArg(default="nyu-mll/glue", help="dataset on the Hub, with the task as its configuration")
    dataset_path: str | None = HfArg(default=None, help="local folder with parquet, json(l) or csv files by split")
    metric_path: str = HfArg(default=METRIC, help="local module for evaluate.load, or glue, which needs the Hub")
    max_seq_length: int = HfArg(default=128, help="maximum length; longer inputs are truncated")

    @property
    def dataset_config(self) -> str:
        return self.task_name


def parse(argv: list[str] | None) -> tuple[DataArguments, lib.ModelArguments, TrainingArguments, lib.Run]:
    kinds = (DataArguments, lib.ModelArguments, TrainingArguments)
    # "task" is replaced by the main metric of the task, which is only known after parsing.
    data, model, training = lib.parse_arguments(kinds, argv, metric_for_best_model="task")
    lib.check_choice(data, "task_name", TASKS)
    task = TASKS[data.task_name]
    if training.metric_for_best_model == "task":
        training.metric_for_best_model = task.metric
    run = lib.Run(data, model, training)
    return data, model, training, run


def load_data(
    data: DataArguments, model: lib.ModelArguments, training: TrainingArguments
) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase, PreTrainedConfig, list[int]]:
    """Return the encoded splits, the tokenizer, the configuration, and the output of each label of the task."""
    task = TASKS[data.task_name]
    names = (tuple(task.splits(name).values()) for name in ("validation", "test"))  # MNLI has two of each
    splits = lib.load_splits(lib.choose_splits(training, data, *names), data, task.columns, label="label")
    # The outputs of a checkpoint may be in another order than the labels of the task; a regression has one output.
    labels = lib.match_labels(model, task.labels, training) if task.labels else lib.Labels(["score"], {})
    texts = (text for column in task.columns for text in splits["train"][column])
    tokenizer = lib.make_tokenizer(model, texts, data.max_seq_length)
    kind = "single_label_classification" if task.labels else "regression"
    fields = lib.label_fields(labels.names) | {"problem_type": kind}
    config = lib.make_config(model, tokenizer, data.max_seq_length, shorten=(data, "max_seq_length"), **fields)
    for name, split in splits.items():
        if name.startswith("test"):  # their labels are not published
            numbers = None
        elif task.labels:
            split, numbers = lib.class_numbers(split, "label", labels.outputs, name, task.labels)
        else:
            split, numbers = lib.read_scores(split, name)
        splits[name] = lib.encode_split(split, name, task.columns, numbers, tokenizer, data, training)
    return splits, tokenizer, config, [labels.outputs[name] for name in task.labels]


def make_metrics(data: DataArguments, outputs: list[int]) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a function that computes the metrics of a task and their mean `combined_score`.

    `outputs` are those of the labels of the task, because F1 and correlations depend on the ids of the labels.
    """
    task = TASKS[data.task_name]
    path = Path(__file__).with_name("metrics") / "glue_metrics" if data.metric_path == METRIC else data.metric_path
    with lib.one_line(f"--metric_path {path} (with network access, pass glue)"):
        metric = evaluate.load(str(path), data.task_name, keep_in_memory=True)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        known = prediction.label_ids
        references = [outputs.index(label) for label in known] if task.labels else known
        predictions = task.decode(prediction.predictions, outputs)
        scores = metric.compute(predictions=predictions, references=references)
        # The correlation of constant predictions is NaN, which cannot be compared.
        scores = {name: 0.0 if math.isnan(score) else float(score) for name, score in scores.items()}
        return scores | ({"combined_score": float(np.mean(list(scores.values())))} if len(scores) > 1 else {})

    return compute_metrics


def predict(trainer: Trainer, splits: dict[str, Dataset], task: GlueTask, outputs: list[int]) -> dict[str, float]:
    """Write one file per test split in the format of the GLUE server; their labels are not published."""
    for side, name in task.splits("test").items():
        predicted = task.decode(trainer.predict(splits[name]).predictions, outputs)
        values = predicted if task.labels else [f"{score:.3f}" for score in predicted]
        values = [task.labels[index] for index in predicted] if task.predicts_names else values
        lines = ["index\tprediction", *(f"{index}\t{value}" for index, value in enumerate(values))]
        suffix = {"": "", "matched": "-m", "mismatched": "-mm"}[side]
        lib.write_lines(trainer, f"{task.file}{suffix}.tsv", lines)
    return {}


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)
    task = TASKS[data.task_name]

    with run.reading():
        splits, tokenizer, config, outputs = load_data(data, model, training)

    validation = {side: splits[name] for side, name in task.splits("validation").items() if name in splits}
    trainer = lib.OrderedTrainer(
        lib.make_model(AutoModelForSequenceClassification, model, config),
        training,
        train_dataset=splits.get("train"),
        eval_dataset=validation.get("", validation) or None,
        processing_class=tokenizer,
        compute_metrics=make_metrics(data, outputs),
    )

    return run.fit(trainer, predict=lambda: predict(trainer, splits, task, outputs))


if __name__ == "__main__":
    main()
