"""Fine-tunes, or trains from scratch, a multiple-choice model on RACE or CommonsenseQA.

    python examples/run_race.py --recipe examples/recipes/race/race_small.yaml --dataset_path DIR --output_dir OUT
    python examples/run_race.py --recipe examples/recipes/csqa/csqa_small.yaml --dataset_path DIR --output_dir OUT

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common.arguments import fail, find_checkpoint, parse_arguments
from common.data import check_split, load_splits, name_data
from common.hub import publish
from common.model import ModelArguments, boundary_ids, make_config, make_model, make_tokenizer
from common.training import OrderedTrainer, check_training, describe, evaluate, finish, train
from datasets import Dataset, concatenate_datasets
from transformers import (
    AutoModelForMultipleChoice,
    DataCollatorForMultipleChoice,
    EarlyStoppingCallback,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

Rows = dict[str, list]


@dataclass(frozen=True)
class Task:
    """A multiple-choice task.

    Args:
        hub_name, hub_config: of the data set; `--dataset_config` names another configuration.
        name, texts, options, answer: its columns.
        letters: of the options, which every question has all of.
        encode: makes one input of each option.
        levels: how the values of the column `name` begin; accuracy is also computed for each.
    """

    hub_name: str
    hub_config: str | None
    name: str
    texts: tuple[str, ...]
    options: str
    answer: str
    letters: str
    encode: Callable[[Rows, PreTrainedTokenizerBase, "DataArguments"], list[list[int]]]
    levels: tuple[str, ...] = ()


@dataclass
class DataArguments:
    task: str = field(default="race", metadata={"help": "race or csqa"})
    dataset_config: str | None = field(default=None, metadata={"help": "configuration on the Hub: RACE's middle, high"})
    dataset_path: list[str] | None = field(
        default=None,
        metadata={"help": "local folders instead of the Hub: parquet or json(l) files, named by split"},
    )
    max_option_length: int = field(default=128, metadata={"help": "RACE: <s> question and option </s> are cut to this"})
    max_seq_length: int = field(default=512, metadata={"help": "RACE cuts longer inputs, CommonsenseQA refuses them"})
    max_train_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    max_eval_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    max_predict_samples: int | None = field(default=None, metadata={"help": "use only the first N"})
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "stop after N evaluations without a better metric_for_best_model"}
    )


def option_texts(options: list[str] | dict[str, list[str]]) -> list[str]:
    """The options of one question: RACE has a list, CommonsenseQA {"label": [...], "text": [...]}."""
    return options["text"] if isinstance(options, dict) else options


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def encode_race(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> list[list[int]]:
    """`<s> question and option </s>`, cut to `max_option_length`, and `</s> passage </s>`, cut to `max_seq_length`.

    The option takes the place of every `_` of the question or, without one, follows it. White space is collapsed.
    Source: RACE's preprocessing and the sentence_ranking task of fairseq.
    """
    bos, eos = boundary_ids(tokenizer)
    merged = [
        question.replace("_", option) if "_" in question else f"{question} {option}"
        for question, options in zip(rows["question"], rows["options"], strict=True)
        for option in options
    ]
    passages = tokenize(tokenizer, [" ".join(article.split()) for article in rows["article"]])
    inputs = []
    for index, option in enumerate(tokenize(tokenizer, [" ".join(text.split()) for text in merged])):
        head = [bos, *option, eos][: data.max_option_length]
        passage = passages[index // len(TASKS["race"].letters)]
        inputs.append([*head, eos, *passage, eos][: data.max_seq_length])
    return inputs


def encode_csqa(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> list[list[int]]:
    """`<s> Q: question </s> A: choice </s>`, never cut. Source: the commonsense_qa task of fairseq."""
    bos, eos = boundary_ids(tokenizer)
    questions = tokenize(tokenizer, [f"Q: {question}" for question in rows["question"]])
    choices = tokenize(tokenizer, [f"A: {text}" for choices in rows["choices"] for text in option_texts(choices)])
    inputs = []
    for index, choice in enumerate(choices):
        question = questions[index // len(TASKS["csqa"].letters)]
        inputs.append([bos, *question, eos, *choice, eos])
        if len(inputs[-1]) > data.max_seq_length:
            fail(f"an input has {len(inputs[-1])} tokens, above --max_seq_length {data.max_seq_length}")
    return inputs


TASKS = {
    "race": Task(
        hub_name="ehovy/race",
        hub_config="all",
        name="example_id",
        texts=("article", "question"),
        options="options",
        answer="answer",
        letters="ABCD",
        encode=encode_race,
        levels=("middle", "high"),
    ),
    "csqa": Task(
        hub_name="tau/commonsense_qa",
        hub_config=None,
        name="id",
        texts=("question",),
        options="choices",
        answer="answerKey",
        letters="ABCDE",
        encode=encode_csqa,
    ),
}


class OptionCollator(DataCollatorForMultipleChoice):
    """Pads every option of a batch to the longest one and leaves out the lengths, which are for the sampler."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return super().torch_call([{name: example[name] for name in ("input_ids", "labels")} for example in examples])


def check_answers(split: Dataset, name: str, task: Task) -> None:
    """Ends the script unless every question has all options and, outside the test split, one right answer."""
    for row, (options, answer) in enumerate(zip(split[task.options], split[task.answer], strict=True)):
        texts = option_texts(options)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            fail(f"split {name}, row {row}: {task.options} is {options!r} instead of a list of texts")
        if len(texts) != len(task.letters):
            fail(f"split {name}, row {row}: {len(texts)} options instead of {len(task.letters)}")
        if isinstance(options, dict) and options["label"] != list(task.letters):
            fail(f"split {name}, row {row}: the options are called {options['label']} instead of {list(task.letters)}")
        if answer not in tuple(task.letters) and (name != "test" or answer):
            fail(f"split {name}, row {row}: {task.answer} is {answer!r}, not one of {', '.join(task.letters)}")


def load_split(name: str, task: Task, data: DataArguments, limit: int | None) -> Dataset:
    columns = [task.name, *task.texts, task.options, task.answer]
    config = data.dataset_config or task.hub_config
    parts = []
    for path in data.dataset_path or [None]:
        part = load_splits([name], path, task.hub_name, config)[name]
        if missing := [column for column in columns if column not in part.column_names]:
            fail(f"split {name} has no column {', '.join(missing)}, only {', '.join(part.column_names)}")
        parts.append(part.select_columns(columns))
    features = parts[0].features
    try:
        split = concatenate_datasets([part if part.features == features else part.cast(features) for part in parts])
    except (ValueError, TypeError) as error:
        fail(f"split {name} of the folders does not fit together: {error}")
    split = split if limit is None else split.take(limit)
    check_split(split, name, (task.name, *task.texts), labels=None)
    check_answers(split, name, task)
    return split


def all_texts(split: Dataset, task: Task) -> Iterator[str]:
    for column in task.texts:
        yield from split[column]
    for options in split[task.options]:
        yield from option_texts(options)


def encode_split(split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> Dataset:
    """Columns: `input_ids` (one list an option), their greatest `length`, `labels` (-100: unknown) and the names."""
    task = TASKS[data.task]

    def encode(rows: Rows) -> Rows:
        flat, options = task.encode(rows, tokenizer, data), len(task.letters)
        inputs = [flat[start : start + options] for start in range(0, len(flat), options)]
        return {
            "input_ids": inputs,
            "length": [max(map(len, example)) for example in inputs],
            "labels": [task.letters.index(answer) if answer else -100 for answer in rows[task.answer]],
        }

    unused = [*task.texts, task.options, task.answer]
    return split.map(encode, batched=True, remove_columns=unused, keep_in_memory=True, desc=name)


def make_metrics(split: Dataset, task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """Accuracy over `split`, whose order the predictions have, and over each level of it."""
    names = split[task.name]
    levels = {level: np.array([name.startswith(level) for name in names]) for level in task.levels}

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        scores = {"accuracy": right, **{f"{level}_accuracy": right[rows] for level, rows in levels.items()}}
        return {name: float(rows.mean()) for name, rows in scores.items() if len(rows)}

    return compute_metrics


def build_trainer(
    data: DataArguments, model: ModelArguments, training: TrainingArguments
) -> tuple[Trainer, dict[str, Dataset]]:
    task = TASKS[data.task]
    limits = {"train": data.max_train_samples} if training.do_train else {}
    limits |= {"validation": data.max_eval_samples} if training.do_eval else {}
    limits |= {"test": data.max_predict_samples} if training.do_predict else {}
    splits = {name: load_split(name, task, data, limit) for name, limit in limits.items()}
    tokenizer = make_tokenizer(model, all_texts(splits.get("train"), task), data.max_seq_length)
    config = make_config(model, tokenizer, data.max_seq_length)
    splits = {name: encode_split(split, name, tokenizer, data) for name, split in splits.items()}
    # The collator takes what it needs; the lengths are for train_sampling_strategy group_by_length.
    training.remove_unused_columns = False
    patience = data.early_stopping_patience
    trainer = OrderedTrainer(
        model=make_model(AutoModelForMultipleChoice, model, config),
        args=training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=OptionCollator(tokenizer),
        compute_metrics=make_metrics(splits["validation"], task) if "validation" in splits else None,
        callbacks=[EarlyStoppingCallback(patience)] if patience else None,
    )
    return trainer, splits


def predict(trainer: Trainer, split: Dataset, task: Task) -> dict[str, Any]:
    """Writes the predicted letters of the test split; returns their path, and the metrics if the answers are known."""
    known = -100 not in split["labels"]
    trainer.compute_metrics = make_metrics(split, task) if known else None
    output = trainer.predict(split)
    path = Path(trainer.args.output_dir, "predictions.tsv")
    if trainer.is_world_process_zero():
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"index\t{task.name}\tprediction"]
        for index, (name, best) in enumerate(zip(split[task.name], output.predictions.argmax(-1), strict=True)):
            lines.append(f"{index}\t{name}\t{task.letters[best]}")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    scores = {name: value for name, value in output.metrics.items() if known and name.endswith(("_loss", "accuracy"))}
    return scores | {"predictions": str(path)}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    arguments = (DataArguments, ModelArguments, TrainingArguments)
    data, model, training = parse_arguments(arguments, argv, metric_for_best_model="accuracy")
    if data.task not in TASKS:
        fail(f"--task {data.task}: choose one of {', '.join(TASKS)}")
    task = TASKS[data.task]
    check_training(training, model, data.early_stopping_patience)
    base_model, checkpoint = model.model_name_or_path, find_checkpoint(training)
    if checkpoint:  # for its configuration and tokenizer, also when the run began from scratch
        model.model_name_or_path = checkpoint
    set_seed(training.seed)
    trainer, splits = build_trainer(data, model, training)
    summary = {"task": data.task, **describe(trainer, model)}
    if training.do_train:
        summary |= train(trainer, checkpoint)
    if training.do_eval:
        summary |= evaluate(trainer)
    if training.do_predict:
        summary |= predict(trainer, splits["test"], task)
    summary = finish(trainer, data.task, summary, ["eval_accuracy"], start)
    if training.do_train:
        paths, config = data.dataset_path, data.dataset_config or task.hub_config
        source = {"dataset": name_data(paths)} if paths else {"dataset": task.hub_name, "dataset_config": config}
        publish(trainer, __file__, argv, summary, **source, base_model=base_model, license=model.license)
    return summary


if __name__ == "__main__":
    main()
