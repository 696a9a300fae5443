r"""Train Luna, Mega, or a Transformer with rotary positions on a task of Long Range Arena.

    python examples/lra/run_lra.py --recipe examples/recipes/lra/text_mega_chunk.yaml \
        --dataset_path data/text --output_dir outputs/text

`--dataset_path` is a folder of `prepare.py`, or another folder with the same columns; `--dataset_name` is such a
dataset on the Hub. All fields of TrainingArguments are options. A recipe contains defaults, which the command line
overrides.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the package `lra`

import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

import luna_mega
from lra import pretraining, tasks, transformer
from lra.tasks import CONVENTIONS, TASKS
from luna_mega import training as lib

_NO_TOKENS = 8  # vocabulary of a model that reads values


@dataclass
class DataArguments(lib.SourceArguments, lib.ClassifierArguments):
    task_name: str = HfArg(default="text", help=f"task: {' | '.join(TASKS)}")
    convention: str = HfArg(default="ours", help=f"conventions of data and evaluation: {' | '.join(CONVENTIONS)}")
    max_seq_length: int | None = HfArg(default=None, help="maximum input length; default: the benchmark's")
    pixels: str | None = HfArg(default=None, help="values | tokens; default: the convention's")
    self_pretraining_steps: int = HfArg(default=0, help="steps of self-pretraining on masked inputs of the task")
    mlm_probability: float = HfArg(default=0.15, help="share of the inputs that are masked in self-pretraining")
    warmup_power: float = HfArg(default=1.0, help="power of the step in the warmup; 1 unless the schedule is linear")


@dataclass
class ModelArguments(lib.CheckpointArguments):
    model_type: str = HfArg(default="luna", help="type of a new model: luna | mega | transformer, or another encoder")
    paper_model: bool = HfArg(default=False, help="use the model of the paper; --config_overrides still apply")


def parse(argv: list[str] | None) -> tuple[DataArguments, ModelArguments, TrainingArguments, lib.Run]:
    kinds = (DataArguments, ModelArguments, TrainingArguments)
    defaults = {"metric_for_best_model": "accuracy", "remove_unused_columns": False}
    data, model, training = lib.parse_arguments(kinds, argv, **defaults)
    lib.check_choice(data, "task_name", TASKS)
    lib.check_choice(data, "convention", CONVENTIONS)
    if data.pixels is not None:
        lib.check_choice(data, "pixels", ("values", "tokens"))
    run = lib.Run(data, model, training)
    task = TASKS[data.task_name]
    data.pixels = data.pixels or CONVENTIONS[data.convention].pixels
    data.max_seq_length = task.max_length if data.max_seq_length is None else data.max_seq_length
    lib.check_least(data, 4, "max_seq_length")
    lib.check_least(data, 0, "self_pretraining_steps")
    if not 0.0 < data.mlm_probability < 1.0:
        lib.fail(f"--mlm_probability {data.mlm_probability} must be between 0 and 1")
    if data.warmup_power != 1.0 and training.lr_scheduler_type != "linear":
        lib.fail(f"--warmup_power {data.warmup_power} requires --lr_scheduler_type linear")
    # Trainer counts only the first sequence of a pair; values have no padding.
    training.include_num_input_tokens_seen = "no" if task.pairs else "all" if reads_values(data) else "non_padding"
    return data, model, training, run


def reads_values(data: DataArguments) -> bool:
    """Return whether the inputs are pixels as real numbers."""
    return TASKS[data.task_name].kind == "pixels" and data.pixels == "values"


def load_rows(
    data: DataArguments, model: ModelArguments, training: TrainingArguments
) -> tuple[dict[str, Dataset], list[str]]:
    """Return the required splits of the convention, with outputs as labels, and the label names of the head."""
    task, convention, limits = TASKS[data.task_name], CONVENTIONS[data.convention], lib.choose_splits(training, data)
    needed = {"train", "validation", "test"} if data.task_name in convention.tests_on else limits
    texts, columns = ((), task.columns) if task.kind == "pixels" else (task.columns, ())
    splits = lib.load_splits(dict.fromkeys(needed), data, texts, [*columns, "label"])
    splits = tasks.choose_splits(splits, data.task_name, convention)
    classes = tasks.label_names(next(iter(splits.values())), task.classes)
    names, outputs = lib.match_labels(model, classes, training)
    rows = {}
    for name, limit in limits.items():  # the rows may be sorted by label
        split = splits[name] if limit is None else splits[name].shuffle(seed=0).take(limit)
        split, numbers = lib.class_numbers(split, "label", outputs, name, classes)
        rows[name] = split.remove_columns("label").add_column("label", numbers)
    return lib.images.undecoded(rows), names


def choose_config(
    data: DataArguments, model: ModelArguments, tokenizer: PreTrainedTokenizerFast | None, labels: Sequence[str]
) -> PreTrainedConfig:
    """Return the configuration; new models have the fields of the paper and of the convention."""
    task = TASKS[data.task_name]
    fields = lib.label_fields(labels) | {"problem_type": "single_label_classification", "pairs": task.pairs}
    if not model.model_name_or_path:
        fields = CONVENTIONS[data.convention].fields | fields
        if model.paper_model:
            classes = {"luna": luna_mega.LunaConfig, "mega": luna_mega.MegaConfig}
            if model.model_type not in classes:
                lib.fail(f"--paper_model is not available for {model.model_type}; pass --config_overrides")
            size = _NO_TOKENS if tokenizer is None else len(tokenizer)
            fields = getattr(classes[model.model_type], task.preset)(vocab_size=size).to_diff_dict() | fields
    kind = "values" if tokenizer is None else "tokens"
    shorten = None if task.kind == "pixels" else (data, "max_seq_length")  # an image has a fixed number of pixels
    return lib.make_config(model, tokenizer, data.max_seq_length, kind, shorten=shorten, **fields)


def load_data(
    data: DataArguments, model: ModelArguments, training: TrainingArguments
) -> tuple[dict[str, Dataset], PreTrainedTokenizerFast | None, PreTrainedConfig]:
    """Return the encoded splits, the tokenizer (None for real numbers), and the configuration of the model."""
    task, convention = TASKS[data.task_name], CONVENTIONS[data.convention]
    splits, labels = load_rows(data, model, training)
    if reads_values(data):
        tokenizer = None
    elif model.model_name_or_path:
        tokenizer = lib.load_tokenizer(model.model_name_or_path)
    else:
        tokenizer = tasks.make_tokenizer(task.kind, convention, data.max_seq_length)
    config = choose_config(data, model, tokenizer, labels)
    for name, split in splits.items():
        if task.kind == "pixels":
            splits[name] = tasks.encode_images(split, name, task, tokenizer, convention, data.max_seq_length)
        else:
            options = {"keep_in_memory": training.world_size == 1, "desc": name}
            splits[name] = tasks.encode_texts(split, task, tokenizer, convention, data.max_seq_length, **options)
    return splits, tokenizer, config


def pair_class(model_type: str, task: str) -> type[PreTrainedModel]:
    """Return the class that encodes the inputs of a pair separately; exit if there is none."""
    name = f"{model_type.capitalize()}ForSequencePairClassification"
    if not hasattr(luna_mega, name):
        lib.fail(f"--task_name {task}: there is no {name}; use luna, mega or transformer")
    return getattr(luna_mega, name)


def make_pair_collator(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """Return a collator that pads the first and the second inputs separately."""
    pad = DataCollatorWithPadding(tokenizer)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        first = [{name: x for name, x in row.items() if not name.startswith("pair_")} for row in rows]
        second = [{name.removeprefix("pair_"): x for name, x in row.items() if name not in first[0]} for row in rows]
        return dict(pad(first)) | {f"pair_{name}": x for name, x in pad(second).items()}

    return collate


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)
    task = TASKS[data.task_name]

    with run.reading():
        splits, tokenizer, config = load_data(data, model, training)

    model_class = AutoModelForSequenceClassification
    if task.pairs and config.model_type != transformer.TransformerConfig.model_type:
        model_class = pair_class(config.model_type, data.task_name)
    network = lib.make_model(model_class, model, config)
    if data.self_pretraining_steps and training.do_train and not model.model_name_or_path:
        options = (task, tokenizer, training, data.self_pretraining_steps, data.mlm_probability)
        pretraining.pretrain(network, splits["train"], *options)
    trainer = lib.OrderedTrainer(
        network,
        training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=make_pair_collator(tokenizer) if task.pairs else None,
        compute_metrics=lib.accuracy,
    )
    if CONVENTIONS[data.convention].decays_all:
        trainer.decays = lambda name, parameter: True
    if data.warmup_power != 1.0:
        trainer.schedule = partial(lib.optimization.power_warmup_schedule, power=data.warmup_power)

    return run.fit(trainer, predict=lambda: lib.write_predictions(trainer, splits["test"]))


if __name__ == "__main__":
    main()
