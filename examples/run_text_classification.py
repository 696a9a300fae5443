"""Fine-tunes, or trains from scratch, a classifier of texts or of pairs of texts on data of your own.

    python examples/run_text_classification.py --dataset_name stanfordnlp/imdb --validation_share 0.1 \
        --model_name_or_path DIR --max_seq_length 1024 --do_train --do_eval --do_predict --output_dir OUT

Every field of TrainingArguments is an option; `--recipe` names a YAML file with defaults. For GLUE see run_glue.py.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.arguments import fail
from common.classification import accuracy, class_names, class_numbers, write_predictions
from common.data import (
    SourceArguments,
    check_columns,
    check_source,
    check_texts,
    hide_tokens,
    load_splits,
)
from common.model import label_fields, make_config, make_model, make_tokenizer
from common.pairs import TextArguments, check_pairs, choose_model, encode_texts
from common.script import Script
from datasets import Dataset
from transformers import Trainer


@dataclass
class DataArguments(SourceArguments, TextArguments):
    text_columns: list[str] = field(default_factory=lambda: ["text"], metadata={"help": "one column, or two for pairs"})
    label_column: str = field(default="label", metadata={"help": "classes: their names, or numbers"})
    validation_share: float = field(
        default=0.0, metadata={"help": "share of the training rows to validate on, if there is no split for that"}
    )
    max_seq_length: int = field(default=512, metadata={"help": "longer inputs are truncated"})


class TextClassification(Script):
    data_arguments = DataArguments
    defaults = {"metric_for_best_model": "accuracy"}
    title, metric = "text classification", "eval_accuracy"

    def check(self) -> None:
        super().check()
        check_source(self.data)
        if not 0 <= self.data.validation_share < 1:
            fail(f"--validation_share {self.data.validation_share} must be in [0, 1)")
        if len(self.data.text_columns) > 2:
            fail(f"--text_columns {' '.join(self.data.text_columns)}: one column of texts, or two of pairs")
        check_pairs(self.data, self.data.text_columns)

    def load(self) -> dict[str, Dataset]:
        """Return the splits that the run needs, with texts and labels in place."""
        data, limits = self.data, self.limits()
        held = data.validation_share > 0 and "validation" in limits
        sources = ["train" if held and name == "validation" else name for name in limits]
        splits = load_splits(dict.fromkeys(sources), data.dataset_path, data.dataset_name, data.dataset_config)
        if held:
            parts = splits["train"].train_test_split(data.validation_share, seed=0)  # the same rows for every --seed
            splits |= {"train": parts["train"], "validation": parts["test"]}
        splits = {name: splits[name] if limit is None else splits[name].take(limit) for name, limit in limits.items()}
        for name, split in splits.items():
            check_texts(split, name, tuple(data.text_columns))
            check_columns(split, name, [data.label_column] * (name != "test"))
        return splits

    def prepare(self) -> None:
        data, splits = self.data, self.load()
        names = class_names(splits.get("train"), data.label_column, self.model.model_name_or_path)
        texts = [text for column in data.text_columns for text in splits["train"][column]] if "train" in splits else []
        self.tokenizer = tokenizer = make_tokenizer(self.model, texts, data.max_seq_length)
        fields = label_fields(names) | {"problem_type": "single_label_classification"}
        self.config = make_config(self.model, tokenizer, data.max_seq_length, **fields)

        def encode(batch: dict[str, list]) -> dict[str, list]:
            texts = [batch[column] for column in data.text_columns]
            return encode_texts(tokenizer, texts, data.max_seq_length, data.two_towers)

        for name, split in splits.items():
            labels = class_numbers(split, data.label_column, names, name)
            options = {"remove_columns": split.column_names, "keep_in_memory": self.training.world_size == 1}
            self.splits[name] = split.map(encode, batched=True, **options, desc=name).add_column("labels", labels)
        if self.training.do_train:
            options = (tokenizer, data.token_dropout, self.training.seed)
            self.splits["train"] = hide_tokens(self.splits["train"], *options)

    def build(self) -> Trainer:
        model_class, collator = choose_model(self.data, self.config.model_type, self.tokenizer)
        return self.make_trainer(
            make_model(model_class, self.model, self.config),
            processing_class=self.tokenizer,
            data_collator=collator,
            compute_metrics=accuracy,
        )

    def describe(self) -> dict[str, Any]:
        return {"task": Path(self.data.dataset_path or self.data.dataset_name).name, **super().describe()}

    def predict(self) -> dict[str, Any]:
        """Write the predicted classes of the test split; return their path, and the accuracy if labels are known."""
        return write_predictions(self.trainer, self.splits["test"])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    return TextClassification(argv).run()


if __name__ == "__main__":
    main()
