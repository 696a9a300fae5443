r"""Fine-tune, or train from scratch, a classifier of texts or text pairs on your own data.

    python examples/run_text_classification.py --dataset_name stanfordnlp/imdb --validation_share 0.1 \
        --model_name_or_path DIR --max_seq_length 1024 --do_train --do_eval --do_predict --output_dir OUT

All fields of TrainingArguments are options. A recipe contains defaults, which the command line overrides. For GLUE, see
run_glue.py.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

from dataclasses import dataclass

from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

from luna_mega import training as lib


@dataclass
class DataArguments(lib.SourceArguments, lib.TextArguments):
    text_columns: list[str] = HfArg(default_factory=lambda: ["text"], help="text column, or two columns for pairs")
    label_column: str = HfArg(default="label", help="column with the labels: names or ids")
    validation_share: float = HfArg(default=0.0, help="share of the training rows that forms the validation split")


def parse(argv: list[str] | None) -> tuple[DataArguments, lib.ModelArguments, TrainingArguments, lib.Run]:
    kinds = (DataArguments, lib.ModelArguments, TrainingArguments)
    data, model, training = lib.parse_arguments(kinds, argv, metric_for_best_model="accuracy")
    run = lib.Run(data, model, training)
    if not 0 <= data.validation_share < 1:
        lib.fail(f"--validation_share {data.validation_share} must be in [0, 1)")
    if len(data.text_columns) > 2:
        lib.fail(f"--text_columns {' '.join(data.text_columns)} must be one column, or two columns for pairs")
    return data, model, training, run


def load_data(
    data: DataArguments, model: lib.ModelArguments, training: TrainingArguments
) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase, PreTrainedConfig]:
    """Return the encoded splits, the tokenizer, and the configuration of the model."""

    def divide(train: Dataset) -> tuple[Dataset, Dataset]:
        parts = train.train_test_split(data.validation_share, seed=0)  # independent of --seed
        return parts["train"], parts["test"]

    limits, held = lib.choose_splits(training, data), data.validation_share > 0  # also without --do_eval
    columns = {"texts": data.text_columns, "label": data.label_column}
    splits = lib.load_splits(limits, data, **columns, divide=divide if held else None)
    labels = lib.match_labels(model, lib.class_names(splits, data.label_column), training)
    texts = [text for column in data.text_columns for text in splits["train"][column]] if "train" in splits else []
    tokenizer = lib.make_tokenizer(model, texts, data.max_seq_length)
    fields = lib.label_fields(labels.names) | {"problem_type": "single_label_classification"}
    config = lib.make_config(model, tokenizer, data.max_seq_length, shorten=(data, "max_seq_length"), **fields)

    for name, split in splits.items():
        split, numbers = lib.class_numbers(split, data.label_column, labels.outputs, name)
        splits[name] = lib.encode_split(split, name, data.text_columns, numbers, tokenizer, data, training)
    return splits, tokenizer, config


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)

    with run.reading():
        splits, tokenizer, config = load_data(data, model, training)

    trainer = lib.OrderedTrainer(
        lib.make_model(AutoModelForSequenceClassification, model, config),
        training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        compute_metrics=lib.accuracy,
    )

    return run.fit(trainer, predict=lambda: lib.write_predictions(trainer, splits["test"]))


if __name__ == "__main__":
    main()
