"""Fine-tunes, or trains from scratch, a sequence classifier on one of the nine GLUE tasks.

    python examples/run_glue.py --recipe examples/recipes/glue/sst2_small.yaml --dataset_path DIR --output_dir OUT

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import evaluate as evaluate_library
import numpy as np
from common.arguments import fail, find_checkpoint, parse_arguments
from common.data import check_split, hide_tokens, load_splits
from common.hub import publish
from common.model import ModelArguments, make_config, make_model, make_tokenizer
from common.training import OrderedTrainer, check_training, describe, evaluate, finish, train
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

METRICS = Path(__file__).resolve().parent / "metrics" / "glue_metrics"


@dataclass(frozen=True)
class Task:
    """One GLUE task: text columns, classes (none: regression), main metric, name of the file for the GLUE server."""

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metric: str
    file: str
    predicts_names: bool = False  # label names instead of ids in that file

    def splits(self, name: str) -> dict[str, str]:
        """The splits for "validation" or "test", by the prefix of their metrics."""
        return {side: f"{name}_{side}" for side in ("matched", "mismatched")} if self.file == "MNLI" else {"": name}


PAIR = ("sentence1", "sentence2")
NLI = ("entailment", "not_entailment")
MNLI = ("entailment", "neutral", "contradiction")
TASKS = {
    "cola": Task(("sentence",), ("unacceptable", "acceptable"), "matthews_correlation", "CoLA"),
    "mnli": Task(("premise", "hypothesis"), MNLI, "matched_accuracy", "MNLI", predicts_names=True),
    "mrpc": Task(PAIR, ("not_equivalent", "equivalent"), "combined_score", "MRPC"),
    "qnli": Task(("question", "sentence"), NLI, "accuracy", "QNLI", predicts_names=True),
    "qqp": Task(("question1", "question2"), ("not_duplicate", "duplicate"), "combined_score", "QQP"),
    "rte": Task(PAIR, NLI, "accuracy", "RTE", predicts_names=True),
    "sst2": Task(("sentence",), ("negative", "positive"), "accuracy", "SST-2"),
    "stsb": Task(PAIR, (), "combined_score", "STS-B"),
    "wnli": Task(PAIR, ("not_entailment", "entailment"), "accuracy", "WNLI"),
}


@dataclass
class DataArguments:
    task_name: str | None = field(default=None, metadata={"help": f"one of {', '.join(TASKS)}"})
    dataset_name: str = field(default="nyu-mll/glue", metadata={"help": "Hub name; the task is its configuration"})
    dataset_path: str | None = field(
        default=None,
        metadata={"help": "local folder instead of the Hub: parquet, json(l) or csv files, named by split"},
    )
    max_seq_length: int = field(default=128, metadata={"help": "longer inputs are truncated"})
    max_train_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    max_predict_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "stop after N evaluations without gain"}
    )
    token_dropout: float = field(
        default=0.0, metadata={"help": "hide this share of the training tokens, anew each time"}
    )


def parse(argv: list[str] | None) -> tuple[DataArguments, ModelArguments, TrainingArguments]:
    # "task" is replaced by the main metric of the task, which is known after parsing only.
    arguments = (DataArguments, ModelArguments, TrainingArguments)
    data, model, training = parse_arguments(arguments, argv, metric_for_best_model="task")
    if data.task_name not in TASKS:
        fail(f"--task_name {data.task_name}: choose one of {', '.join(TASKS)}")
    if training.metric_for_best_model == "task":
        training.metric_for_best_model = TASKS[data.task_name].metric
    check_training(training, model, data.early_stopping_patience)
    return data, model, training


def load_data(
    data: DataArguments, model: ModelArguments, training: TrainingArguments
) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase]:
    """The splits that the run needs as token ids, and their tokenizer."""
    task = TASKS[data.task_name]
    limits = {"train": data.max_train_samples} if training.do_train else {}
    limits |= dict.fromkeys(task.splits("validation").values(), data.max_eval_samples) if training.do_eval else {}
    limits |= dict.fromkeys(task.splits("test").values(), data.max_predict_samples) if training.do_predict else {}
    splits = load_splits(list(limits), data.dataset_path, data.dataset_name, data.task_name)
    for name, split in splits.items():
        splits[name] = split = split if limits[name] is None else split.take(limits[name])
        check_split(split, name, task.columns, labels=None if name.startswith("test") else task.labels)
    texts = (text for column in task.columns for text in splits["train"][column])
    tokenizer = make_tokenizer(model, texts, data.max_seq_length)

    def encode(batch: dict[str, list]) -> dict[str, list]:
        texts = (batch[column] for column in task.columns)
        return tokenizer(*texts, truncation=True, max_length=data.max_seq_length)

    for name, split in splits.items():
        unused = [column for column in split.column_names if column != "label" or name.startswith("test")]
        splits[name] = split.map(encode, batched=True, remove_columns=unused, keep_in_memory=True, desc=name)
    if training.do_train:
        splits["train"] = hide_tokens(splits["train"], tokenizer, data.token_dropout)
    return splits, tokenizer


def build_trainer(
    data: DataArguments, model: ModelArguments, training: TrainingArguments
) -> tuple[Trainer, dict[str, Dataset]]:
    task = TASKS[data.task_name]
    splits, tokenizer = load_data(data, model, training)
    names = task.labels or ("score",)
    config = make_config(
        model,
        tokenizer,
        data.max_seq_length,
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
        problem_type="single_label_classification" if task.labels else "regression",
    )
    metric = evaluate_library.load(str(METRICS), data.task_name, keep_in_memory=True)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        return metric.compute(predictions=decode(prediction.predictions, task), references=prediction.label_ids)

    validation = {side: splits[name] for side, name in task.splits("validation").items() if name in splits}
    patience = data.early_stopping_patience
    trainer = OrderedTrainer(
        model=make_model(AutoModelForSequenceClassification, model, config),
        args=training,
        train_dataset=splits.get("train"),
        eval_dataset=validation.get("", validation) or None,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(patience)] if patience else None,
    )
    return trainer, splits


def decode(predictions: np.ndarray, task: Task) -> np.ndarray:
    """Class ids, or scores, from logits `[N, classes]`."""
    return predictions.argmax(-1) if task.labels else predictions.squeeze(-1)


def write_predictions(trainer: Trainer, splits: dict[str, Dataset], task: Task) -> dict[str, str]:
    """Writes one file per test split in the form of the GLUE server and returns their paths."""
    paths = {}
    for side, name in task.splits("test").items():
        predicted = decode(trainer.predict(splits[name]).predictions, task)
        values = predicted if task.labels else [f"{score:.3f}" for score in predicted]
        values = [task.labels[index] for index in predicted] if task.predicts_names else values
        path = Path(trainer.args.output_dir, task.file + {"": "", "matched": "-m", "mismatched": "-mm"}[side] + ".tsv")
        if trainer.is_world_process_zero():
            lines = ["index\tprediction", *(f"{index}\t{value}" for index, value in enumerate(values))]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths[name] = str(path)
    return paths


def main(argv: list[str] | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    data, model, training = parse(argv)
    task = TASKS[data.task_name]
    base_model, checkpoint = model.model_name_or_path, find_checkpoint(training)
    if checkpoint:  # for its configuration and tokenizer, also when the run began from scratch
        model.model_name_or_path = checkpoint
    set_seed(training.seed)
    trainer, splits = build_trainer(data, model, training)
    summary = {"task": data.task_name, **describe(trainer, model)}
    if training.do_train:
        summary |= train(trainer, checkpoint)
    if training.do_eval:
        summary |= evaluate(trainer)
    if training.do_predict:
        Path(training.output_dir).mkdir(parents=True, exist_ok=True)
        summary |= write_predictions(trainer, splits, task)
    summary = finish(trainer, f"GLUE {data.task_name}", summary, [f"eval_{task.metric}"], start)
    if training.do_train:
        hub = {"dataset": data.dataset_name, "dataset_config": data.task_name}
        source = {"dataset": data.dataset_path} if data.dataset_path else hub
        publish(trainer, __file__, argv, summary, **source, base_model=base_model, license=model.license)
    return summary


if __name__ == "__main__":
    main()
