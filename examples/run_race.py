"""Fine-tunes, or trains from scratch, a multiple-choice model on RACE or CommonsenseQA.

    python examples/run_race.py --recipe examples/recipes/race/race_small.yaml --dataset_path DIR --output_dir OUT
    python examples/run_race.py --recipe examples/recipes/csqa/csqa_small.yaml --dataset_path DIR --output_dir OUT

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common.arguments import check_choice, fail
from common.data import ClassifierArguments, check_columns, check_texts, load_splits, name_source
from common.model import boundary_ids, make_config, make_model, make_tokenizer, pair_class
from common.script import Script
from common.training import write_lines
from datasets import Dataset, concatenate_datasets
from transformers import (
    AutoModelForMultipleChoice,
    DataCollatorForMultipleChoice,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
)

Batch = dict[str, list]


@dataclass(frozen=True)
class Task:
    """A multiple-choice task.

    Args:
        hub_name, hub_config: of the data set; `--dataset_config` names another configuration.
        name, texts, options, answer: its columns.
        letters: names of the options; every question has all of them.
        encode: function that makes one input of each option.
        levels: beginnings of the values in the column `name`; accuracy is also computed for each.
    """

    hub_name: str
    hub_config: str | None
    name: str
    texts: tuple[str, ...]
    options: str
    answer: str
    letters: str
    encode: Callable[[Batch, PreTrainedTokenizerBase, "DataArguments"], list[list[int]]]
    levels: tuple[str, ...] = ()


@dataclass
class DataArguments(ClassifierArguments):
    task: str = field(default="race", metadata={"help": "race or csqa"})
    dataset_config: str | None = field(default=None, metadata={"help": "configuration on the Hub: RACE's middle, high"})
    dataset_path: list[str] | None = field(
        default=None,
        metadata={"help": "local folders instead of the Hub: parquet or json(l) files, named by split"},
    )
    max_option_length: int = field(
        default=128,
        metadata={"help": "RACE: <s> question and option </s>, or <s> option </s> of two towers, are cut to this"},
    )
    max_seq_length: int = field(default=512, metadata={"help": "RACE cuts longer inputs, CommonsenseQA refuses them"})
    two_towers: bool = field(
        default=False,
        metadata={"help": "encode the text with its question once, and every option by itself; score pairs of vectors"},
    )


def option_texts(options: list[str] | dict[str, list[str]]) -> list[str]:
    """Return the options of one question: RACE has a list, CommonsenseQA {"label": [...], "text": [...]}."""
    return options["text"] if isinstance(options, dict) else options


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def encode_race(batch: Batch, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> list[list[int]]:
    """Encode `<s> question and option </s></s> passage </s>`, the first part cut to `max_option_length`.

    The whole is cut to `max_seq_length`. The option takes the place of every `_` of the question or, without one,
    follows it. White space is collapsed. Source: RACE's preprocessing and the sentence_ranking task of fairseq.
    """
    bos, eos = boundary_ids(tokenizer)
    merged = [
        question.replace("_", option) if "_" in question else f"{question} {option}"
        for question, options in zip(batch["question"], batch["options"], strict=True)
        for option in options
    ]
    passages = tokenize(tokenizer, [" ".join(article.split()) for article in batch["article"]])
    inputs = []
    for index, option in enumerate(tokenize(tokenizer, [" ".join(text.split()) for text in merged])):
        head = [bos, *option, eos][: data.max_option_length]
        passage = passages[index // len(TASKS["race"].letters)]
        inputs.append([*head, eos, *passage, eos][: data.max_seq_length])
    return inputs


def encode_csqa(batch: Batch, tokenizer: PreTrainedTokenizerBase, data: DataArguments) -> list[list[int]]:
    """Encode `<s> Q: question </s> A: choice </s>`, which is never cut. Source: the commonsense_qa task of fairseq."""
    bos, eos = boundary_ids(tokenizer)
    questions = tokenize(tokenizer, [f"Q: {question}" for question in batch["question"]])
    choices = tokenize(tokenizer, [f"A: {text}" for choices in batch["choices"] for text in option_texts(choices)])
    inputs = []
    for index, choice in enumerate(choices):
        question = questions[index // len(TASKS["csqa"].letters)]
        inputs.append([bos, *question, eos, *choice, eos])
        if len(inputs[-1]) > data.max_seq_length:
            fail(f"an input has {len(inputs[-1])} tokens, above --max_seq_length {data.max_seq_length}")
    return inputs


def encode_towers(
    batch: Batch, tokenizer: PreTrainedTokenizerBase, data: DataArguments
) -> tuple[list[list[int]], list[list[int]]]:
    """Encode every `<s> question </s></s> passage </s>`, or `<s> question </s>`, and all `<s> option </s>`.

    They are cut to `max_seq_length` and `max_option_length`. White space is collapsed.
    """
    task, (bos, eos) = TASKS[data.task], boundary_ids(tokenizer)

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenize(tokenizer, [" ".join(text.split()) for text in texts])

    texts = [
        [bos, *question, eos, *(token for passage in passages for token in (eos, *passage, eos))]
        for question, *passages in zip(*(encode(batch[name]) for name in reversed(task.texts)), strict=True)
    ]
    options = encode([text for options in batch[task.options] for text in option_texts(options)])
    return (
        [text[: data.max_seq_length] for text in texts],
        [[bos, *option, eos][: data.max_option_length] for option in options],
    )


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
    """Collator that pads every option to the longest of the batch and drops the lengths, which are for the sampler."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return super().torch_call([{name: example[name] for name in ("input_ids", "labels")} for example in examples])


class TowerCollator(OptionCollator):
    """Collator of texts, padded to the longest, and of their options `pair_*`, padded to the longest of these."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        options = super().torch_call([example | {"input_ids": example["pair_input_ids"]} for example in examples])
        texts = self.tokenizer.pad({"input_ids": [example["input_ids"] for example in examples]}, return_tensors="pt")
        return {"labels": options.pop("labels"), **texts, **{f"pair_{name}": x for name, x in options.items()}}


def check_answers(split: Dataset, name: str, task: Task) -> None:
    """End the script unless every question has all options and, outside the test split, one right answer."""
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
    """Load a split, which several folders may hold a part of."""
    columns = [task.name, *task.texts, task.options, task.answer]
    parts = []
    for path in data.dataset_path or [None]:
        part = load_splits({name: None}, path, task.hub_name, data.dataset_config or task.hub_config)[name]
        check_columns(part, name, columns)
        parts.append(part.select_columns(columns))
    features = parts[0].features
    try:
        split = concatenate_datasets([part if part.features == features else part.cast(features) for part in parts])
    except (ValueError, TypeError) as error:
        fail(f"split {name} of the folders does not fit together: {error}")
    split = split if limit is None else split.take(limit)
    check_texts(split, name, (task.name, *task.texts))
    check_answers(split, name, task)
    return split


def all_texts(split: Dataset, task: Task) -> Iterator[str]:
    for column in task.texts:
        yield from split[column]
    for options in split[task.options]:
        yield from option_texts(options)


def encode_split(
    split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, data: DataArguments, in_memory: bool = True
) -> Dataset:
    """Add the columns `input_ids` (one list an option), `length` (of the longest) and `labels` (-100: unknown).

    With two towers `input_ids` and `length` are those of the text, and `pair_input_ids` those of its options.
    """
    task = TASKS[data.task]
    size = len(task.letters)

    def group(options: list[list[int]]) -> list[list[list[int]]]:
        return [options[start : start + size] for start in range(0, len(options), size)]

    def encode(batch: Batch) -> Batch:
        labels = {"labels": [task.letters.index(answer) if answer else -100 for answer in batch[task.answer]]}
        if data.two_towers:
            texts, options = encode_towers(batch, tokenizer, data)
            return labels | {"input_ids": texts, "pair_input_ids": group(options), "length": list(map(len, texts))}
        inputs = group(task.encode(batch, tokenizer, data))
        return labels | {"input_ids": inputs, "length": [max(map(len, options)) for options in inputs]}

    unused = [*task.texts, task.options, task.answer]
    return split.map(encode, batched=True, remove_columns=unused, keep_in_memory=in_memory, desc=name)


def make_metrics(split: Dataset, task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a function for the accuracy over `split`, whose order the predictions have, and over each level of it."""
    names = split[task.name]
    levels = {level: np.array([name.startswith(level) for name in names]) for level in task.levels}

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        parts = {"accuracy": right, **{f"{level}_accuracy": right[chosen] for level, chosen in levels.items()}}
        return {name: float(part.mean()) for name, part in parts.items() if len(part)}

    return compute_metrics


class MultipleChoice(Script):
    data_arguments = DataArguments
    defaults = {"metric_for_best_model": "accuracy"}
    metric = "eval_accuracy"

    def check(self) -> None:
        check_choice(self.data, "task", TASKS)
        self.task, self.title = TASKS[self.data.task], self.data.task
        super().check()

    def prepare(self) -> None:
        data, task, alone = self.data, self.task, self.training.world_size == 1
        splits = {name: load_split(name, task, data, limit) for name, limit in self.limits().items()}
        self.tokenizer = make_tokenizer(self.model, all_texts(splits.get("train"), task), data.max_seq_length)
        # What a text and an option have in common is seen in the product of their vectors, and not side by side.
        fields = {"num_labels": 1, "pair_features": "interaction"} if data.two_towers else {}
        self.config = make_config(self.model, self.tokenizer, data.max_seq_length, **fields)
        self.splits = {name: encode_split(split, name, self.tokenizer, data, alone) for name, split in splits.items()}

    def build(self) -> Trainer:
        # The collator takes what it needs; the lengths are for train_sampling_strategy group_by_length.
        self.training.remove_unused_columns = False
        towers = self.data.two_towers
        model_class = pair_class(self.config.model_type, "--two_towers") if towers else AutoModelForMultipleChoice
        return self.make_trainer(
            make_model(model_class, self.model, self.config),
            processing_class=self.tokenizer,
            data_collator=(TowerCollator if towers else OptionCollator)(self.tokenizer),
            compute_metrics=make_metrics(self.splits["validation"], self.task) if self.training.do_eval else None,
        )

    def describe(self) -> dict[str, Any]:
        return {"task": self.data.task, **super().describe()}

    def predict(self) -> dict[str, Any]:
        """Write the predicted letters of the test split; return their path, and metrics if the answers are known."""
        task, split = self.task, self.splits["test"]
        known = -100 not in split["labels"]
        self.trainer.compute_metrics = make_metrics(split, task) if known else None
        output = self.trainer.predict(split)
        lines = [f"index\t{task.name}\tprediction"]
        for index, (name, best) in enumerate(zip(split[task.name], output.predictions.argmax(-1), strict=True)):
            lines.append(f"{index}\t{name}\t{task.letters[best]}")
        read = ("_loss", "accuracy") if known else ()
        scores = {name: value for name, value in output.metrics.items() if name.endswith(read)}
        return scores | {"predictions": write_lines(self.trainer, "predictions.tsv", lines)}

    def source(self) -> dict[str, str | None]:
        data, task = self.data, self.task
        return name_source(data.dataset_path, task.hub_name, data.dataset_config or task.hub_config)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    return MultipleChoice(argv).run()


if __name__ == "__main__":
    main()
