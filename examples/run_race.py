"""Fine-tune, or train from scratch, a multiple-choice model on RACE or CommonsenseQA.

    python examples/run_race.py --recipe examples/recipes/race/race_small.yaml --output_dir outputs/race
    python examples/run_race.py --recipe examples/recipes/csqa/csqa_small.yaml --output_dir outputs/csqa

All fields of TrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import (
    AutoModelForMultipleChoice,
    DataCollatorForMultipleChoice,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

from luna_mega import training as lib

Batch = dict[str, list]


@dataclass(frozen=True)
class ChoiceTask:
    """Multiple-choice task: dataset on the Hub, its columns, letters of the options, and function that encodes them.

    `levels` are prefixes of `name` for which the accuracy is also computed.
    """

    hub_name: str
    hub_config: str | None
    name: str
    texts: tuple[str, ...]
    options: str
    answer: str
    letters: str
    encode: Callable[[Batch, PreTrainedTokenizerBase, int, int], list[list[int]]]
    levels: tuple[str, ...] = ()


@dataclass
class DataArguments(lib.ClassifierArguments):
    task_name: str = HfArg(default="race", help="task: race or csqa")
    dataset_config: str | None = HfArg(default=None, help="configuration of the dataset: middle or high for RACE")
    dataset_path: list[str] | None = HfArg(default=None, help="local folders with parquet or json(l) files by split")
    max_option_length: int = HfArg(default=128, help="maximum length of question and option")
    max_seq_length: int = HfArg(default=512, help="maximum length; RACE is truncated, longer CommonsenseQA fails")

    @property
    def dataset_name(self) -> str:
        return TASKS[self.task_name].hub_name


def option_texts(options: list[str] | dict[str, list[str]]) -> list[str]:
    """Return the options of a question: a list in RACE, {"label": [...], "text": [...]} in CommonsenseQA."""
    return options["text"] if isinstance(options, dict) else options


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def encode_race(batch: Batch, tokenizer: PreTrainedTokenizerBase, option_length: int, length: int) -> list[list[int]]:
    """Encode `<s> question and option </s></s> passage </s>`, as fairseq's preprocessing of RACE does.

    The option replaces each `_` of the question or, without one, follows the question. White space is collapsed. The
    first part is truncated to `option_length`, and the input to `length`.
    """
    bos, eos = lib.boundary_ids(tokenizer)
    merged = [
        question.replace("_", option) if "_" in question else f"{question} {option}"
        for question, options in zip(batch["question"], batch["options"], strict=True)
        for option in options
    ]
    passages = tokenize(tokenizer, [" ".join(article.split()) for article in batch["article"]])
    inputs = []
    for index, option in enumerate(tokenize(tokenizer, [" ".join(text.split()) for text in merged])):
        head = [bos, *option, eos][:option_length]
        passage = passages[index // len(TASKS["race"].letters)]
        inputs.append([*head, eos, *passage, eos][:length])
    return inputs


def encode_csqa(batch: Batch, tokenizer: PreTrainedTokenizerBase, option_length: int, length: int) -> list[list[int]]:
    """Encode `<s> Q: question </s> A: choice </s>` without truncation, as fairseq's task commonsense_qa does."""
    bos, eos = lib.boundary_ids(tokenizer)
    questions = tokenize(tokenizer, [f"Q: {question}" for question in batch["question"]])
    choices = tokenize(tokenizer, [f"A: {text}" for choices in batch["choices"] for text in option_texts(choices)])
    inputs = []
    for index, choice in enumerate(choices):
        question = questions[index // len(TASKS["csqa"].letters)]
        inputs.append([bos, *question, eos, *choice, eos])
        if len(inputs[-1]) > length:
            lib.fail(f"an input has {len(inputs[-1])} tokens, above --max_seq_length {length}")
    return inputs


TASKS = {
    "race": ChoiceTask(
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
    "csqa": ChoiceTask(
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
    """Collator that pads the options, and removes the lengths for the sampler."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return super().torch_call([{name: example[name] for name in ("input_ids", "labels")} for example in examples])


def check_options(split: Dataset, name: str, task: ChoiceTask) -> None:
    """Exit unless each question has all options."""
    for row, options in enumerate(split[task.options]):
        texts = option_texts(options)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            lib.fail(f"split {name}, row {row}: {task.options} is {options!r} instead of a list of texts")
        if len(texts) != len(task.letters):
            lib.fail(f"split {name}, row {row}: {len(texts)} options instead of {len(task.letters)}")
        if isinstance(options, dict) and options["label"] != list(task.letters):
            lib.fail(
                f"split {name}, row {row}: the options are called {options['label']} instead of {list(task.letters)}"
            )


def choose_rows(groups: list[tuple], limit: int) -> list[int]:
    """Return the first rows of each group in turn, `limit` in all, in the order of the split."""
    rows = {group: [] for group in groups}
    for row, group in enumerate(groups):
        rows[group].append(row)
    turns = [row for turn in zip_longest(*rows.values()) for row in turn if row is not None]
    return sorted(turns[:limit])


def load_split(name: str, task: ChoiceTask, data: DataArguments, limit: int | None) -> Dataset:
    """Load a split, and concatenate it if there are several folders; `limit` keeps rows of each folder and level."""
    columns = [task.name, *task.texts, task.options, task.answer]
    parts = []
    for path in data.dataset_path or [None]:
        part = lib.load_splits({name: None}, replace(data, dataset_path=path), columns=columns)[name]
        parts.append(part.select_columns(columns))
    features = parts[0].features
    with lib.one_line(f"split {name} of the folders has different columns"):
        split = concatenate_datasets([part if part.features == features else part.cast(features) for part in parts])
    if limit is not None:
        folders = [index for index, part in enumerate(parts) for _ in range(len(part))]
        levels = [next(filter(str(row).startswith, task.levels), None) for row in split[task.name]]
        split = split.select(choose_rows(list(zip(folders, levels, strict=True)), limit))
    lib.check_split(split, name, (task.name, *task.texts))
    check_options(split, name, task)
    return split


def all_texts(split: Dataset, task: ChoiceTask) -> Iterator[str]:
    for column in task.texts:
        yield from split[column]
    for options in split[task.options]:
        yield from option_texts(options)


def encode_split(
    split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, data: DataArguments, in_memory: bool = True
) -> Dataset:
    """Return a split with `input_ids` (one list per option), their maximum `length`, and `labels` (-100 = unknown)."""
    task = TASKS[data.task_name]
    # dill pickles `encode` with all that it refers to, so that datasets can hash it. `data` would lead to its class,
    # and through `TASKS` back to it, for which dill prints warnings.
    size, lengths = len(task.letters), (data.max_option_length, data.max_seq_length)
    outputs = {letter: index for index, letter in enumerate(task.letters)}
    split, labels = lib.class_numbers(split, task.answer, outputs, name)

    def encode(batch: Batch) -> Batch:
        options = task.encode(batch, tokenizer, *lengths)
        inputs = [options[start : start + size] for start in range(0, len(options), size)]
        lost = [len(set(map(tuple, options))) < size for options in inputs]
        for row in [row for row, equal in enumerate(lost) if equal]:
            entire = task.encode(
                {column: [batch[column][row]] for column in batch}, tokenizer, sys.maxsize, sys.maxsize
            )
            lost[row] = len(set(map(tuple, inputs[row]))) < len(set(map(tuple, entire)))
        return {"input_ids": inputs, "length": [max(map(len, options)) for options in inputs], "lost": lost}

    unused = [*task.texts, task.options, task.answer]
    encoded = split.map(encode, batched=True, remove_columns=unused, keep_in_memory=in_memory, desc=name)
    if lost := sum(encoded["lost"]):
        lib.say(
            f"split {name}: truncation makes options equal in {lost} of {len(split)} questions; "
            f"raise --max_option_length {data.max_option_length} or --max_seq_length {data.max_seq_length}"
        )
    return encoded.remove_columns("lost").add_column("labels", labels)


def make_metrics(split: Dataset, task: ChoiceTask) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a function that computes the accuracy over `split` and over each of its levels."""
    names = split[task.name]
    levels = {level: np.array([name.startswith(level) for name in names]) for level in task.levels}

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        right, known = prediction.predictions.argmax(-1) == prediction.label_ids, prediction.label_ids != -100
        parts = {"accuracy": right[known]}
        parts |= {f"{level}_accuracy": right[chosen & known] for level, chosen in levels.items()}
        return {name: float(part.mean()) for name, part in parts.items() if len(part)}

    return compute_metrics


def parse(argv: list[str] | None) -> tuple[DataArguments, lib.ModelArguments, TrainingArguments, lib.Run]:
    kinds = (DataArguments, lib.ModelArguments, TrainingArguments)
    data, model, training = lib.parse_arguments(kinds, argv, metric_for_best_model="accuracy")
    lib.check_choice(data, "task_name", TASKS)
    data.dataset_config = data.dataset_config or TASKS[data.task_name].hub_config
    run = lib.Run(data, model, training)
    return data, model, training, run


def load_data(
    data: DataArguments, model: lib.ModelArguments, training: TrainingArguments
) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase, PreTrainedConfig]:
    """Return the encoded splits, the tokenizer, and the configuration of the model."""
    task, in_memory = TASKS[data.task_name], training.world_size == 1
    splits = {name: load_split(name, task, data, limit) for name, limit in lib.choose_splits(training, data).items()}
    tokenizer = lib.make_tokenizer(model, all_texts(splits.get("train"), task), data.max_seq_length)
    config = lib.make_config(model, tokenizer, data.max_seq_length, shorten=(data, "max_seq_length"))
    splits = {name: encode_split(split, name, tokenizer, data, in_memory) for name, split in splits.items()}
    return splits, tokenizer, config


def predict(trainer: Trainer, split: Dataset, task: ChoiceTask) -> dict[str, float]:
    """Write the predicted letters of the test split; return the metrics over the known answers."""
    trainer.compute_metrics = make_metrics(split, task)
    output = trainer.predict(split)
    lines = [f"index\t{task.name}\tprediction"]
    for index, (name, best) in enumerate(zip(split[task.name], output.predictions.argmax(-1), strict=True)):
        lines.append(f"{index}\t{lib.tsv_field(name)}\t{task.letters[best]}")
    lib.write_lines(trainer, "predictions.tsv", lines)
    return lib.save(trainer, "test", output.metrics)


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)
    task = TASKS[data.task_name]

    with run.reading():
        splits, tokenizer, config = load_data(data, model, training)

    # The collator selects the columns; train_sampling_strategy group_by_length requires the lengths.
    training.remove_unused_columns = False
    trainer = lib.OrderedTrainer(
        lib.make_model(AutoModelForMultipleChoice, model, config),
        training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=OptionCollator(tokenizer),
        compute_metrics=make_metrics(splits["validation"], task) if training.do_eval else None,
    )

    return run.fit(trainer, predict=lambda: predict(trainer, splits["test"], task))


if __name__ == "__main__":
    main()
