"""Fine-tunes, or trains from scratch, a sequence classifier on one of the nine GLUE tasks.

    python examples/run_glue.py --recipe examples/recipes/glue/sst2_small.yaml --dataset_path DIR --output_dir OUT

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
from common.arguments import check_choice
from common.data import check_labels, check_texts, hide_tokens, load_splits, name_source
from common.model import label_fields, make_config, make_model, make_tokenizer
from common.pairs import TextArguments, check_pairs, choose_model, encode_texts
from common.script import Script
from common.training import write_lines
from transformers import EvalPrediction, Trainer

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
        """Return the splits that make up "validation" or "test", by the prefix of their metrics."""
        return {side: f"{name}_{side}" for side in ("matched", "mismatched")} if self.file == "MNLI" else {"": name}

    def decode(self, predictions: np.ndarray) -> np.ndarray:
        """Return class ids, or scores, from logits `[N, classes]`."""
        return predictions.argmax(-1) if self.labels else predictions.squeeze(-1)


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
class DataArguments(TextArguments):
    task_name: str | None = field(default=None, metadata={"help": f"one of {', '.join(TASKS)}"})
    dataset_name: str = field(default="nyu-mll/glue", metadata={"help": "Hub name; the task is its configuration"})
    dataset_path: str | None = field(
        default=None,
        metadata={"help": "local folder instead of the Hub: parquet, json(l) or csv files, named by split"},
    )
    max_seq_length: int = field(default=128, metadata={"help": "longer inputs are truncated"})


class Glue(Script):
    data_arguments = DataArguments
    # "task" stands for the main metric of the task, which is known after parsing only.
    defaults = {"metric_for_best_model": "task"}

    def check(self) -> None:
        name = self.data.task_name
        check_choice(self.data, "task_name", TASKS)
        self.task = TASKS[name]
        self.title, self.metric = f"GLUE {name}", f"eval_{self.task.metric}"
        if self.training.metric_for_best_model == "task":
            self.training.metric_for_best_model = self.task.metric
        check_pairs(self.data, self.task.columns)
        super().check()

    def prepare(self) -> None:
        data, task = self.data, self.task
        limits = self.limits(*(tuple(task.splits(name).values()) for name in ("validation", "test")))
        splits = load_splits(limits, data.dataset_path, data.dataset_name, data.task_name)
        for name, split in splits.items():
            check_texts(split, name, task.columns)
            if not name.startswith("test"):
                check_labels(split, name, task.labels)
        texts = (text for column in task.columns for text in splits["train"][column])
        self.tokenizer = tokenizer = make_tokenizer(self.model, texts, data.max_seq_length)

        def encode(batch: dict[str, list]) -> dict[str, list]:
            texts = [batch[column] for column in task.columns]
            return encode_texts(tokenizer, texts, data.max_seq_length, data.two_towers)

        for name, split in splits.items():
            unused = [column for column in split.column_names if column != "label" or name.startswith("test")]
            options = {"remove_columns": unused, "keep_in_memory": self.training.world_size == 1}
            self.splits[name] = split.map(encode, batched=True, **options, desc=name)
        if self.training.do_train:
            seed = self.training.seed
            self.splits["train"] = hide_tokens(self.splits["train"], tokenizer, data.token_dropout, seed)

    def build(self) -> Trainer:
        data, task, tokenizer = self.data, self.task, self.tokenizer
        config = make_config(
            self.model,
            tokenizer,
            data.max_seq_length,
            **label_fields(task.labels or ("score",)),
            problem_type="single_label_classification" if task.labels else "regression",
        )
        model_class, collator = choose_model(data, config.model_type, tokenizer)
        metric = evaluate.load(str(METRICS), data.task_name, keep_in_memory=True)

        def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
            return metric.compute(predictions=task.decode(prediction.predictions), references=prediction.label_ids)

        validation = {
            side: self.splits[name] for side, name in task.splits("validation").items() if name in self.splits
        }
        return self.make_trainer(
            make_model(model_class, self.model, config),
            eval_dataset=validation.get("", validation) or None,
            processing_class=tokenizer,
            data_collator=collator,
            compute_metrics=compute_metrics,
        )

    def describe(self) -> dict[str, Any]:
        return {"task": self.data.task_name, **super().describe()}

    def predict(self) -> dict[str, str]:
        """Write one file per test split in the form of the GLUE server and return their paths."""
        task, paths = self.task, {}
        for side, name in task.splits("test").items():
            predicted = task.decode(self.trainer.predict(self.splits[name]).predictions)
            values = predicted if task.labels else [f"{score:.3f}" for score in predicted]
            values = [task.labels[index] for index in predicted] if task.predicts_names else values
            lines = ["index\tprediction", *(f"{index}\t{value}" for index, value in enumerate(values))]
            suffix = {"": "", "matched": "-m", "mismatched": "-mm"}[side]
            paths[name] = write_lines(self.trainer, f"{task.file}{suffix}.tsv", lines)
        return paths

    def source(self) -> dict[str, str | None]:
        return name_source(self.data.dataset_path, self.data.dataset_name, self.data.task_name)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    return Glue(argv).run()


if __name__ == "__main__":
    main()
