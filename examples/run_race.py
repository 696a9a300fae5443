"""Fine-tunes, or trains from scratch, a multiple-choice model on RACE or CommonsenseQA.

    python examples/run_race.py --recipe examples/recipes/race/race_small.yaml --dataset_path DIR --output_dir OUT
    python examples/run_race.py --recipe examples/recipes/csqa/csqa_small.yaml --dataset_path DIR --output_dir OUT

Every field of TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from common.arguments import RunArguments, check_choice, explain_out_of_memory, parse_arguments
from common.data import choose_splits
from common.model import ModelArguments, make_config, make_model, make_tokenizer
from common.multiple_choice import (
    TASKS,
    DataArguments,
    OptionCollator,
    Task,
    TowerCollator,
    all_texts,
    encode_split,
    load_split,
)
from common.pairs import pair_class
from common.report import describe, finish
from common.training import OrderedTrainer, begin_run, check_run, make_callbacks, score, train, write_lines
from datasets import Dataset
from transformers import AutoModelForMultipleChoice, EvalPrediction, PreTrainedTokenizerBase, Trainer, TrainingArguments


def make_metrics(split: Dataset, task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a function for the accuracy over `split`, whose order the predictions have, and over each level of it."""
    names = split[task.name]
    levels = {level: np.array([name.startswith(level) for name in names]) for level in task.levels}

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        parts = {"accuracy": right, **{f"{level}_accuracy": right[chosen] for level, chosen in levels.items()}}
        return {name: float(part.mean()) for name, part in parts.items() if len(part)}

    return compute_metrics


def parse(argv: list[str] | None) -> tuple[DataArguments, ModelArguments, TrainingArguments, RunArguments]:
    """Return the options; the script ends where they contradict each other."""
    kinds = (DataArguments, ModelArguments, TrainingArguments, RunArguments)
    data, model, training, run = parse_arguments(kinds, argv, metric_for_best_model="accuracy")
    check_choice(data, "task", TASKS)
    data.dataset_config = data.dataset_config or TASKS[data.task].hub_config
    check_run(data.task, data, model, training, run)
    return data, model, training, run


def load_data(
    data: DataArguments, model: ModelArguments, training: TrainingArguments
) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase]:
    """Return the encoded splits that the run needs, and the tokenizer."""
    task, alone = TASKS[data.task], training.world_size == 1
    splits = {name: load_split(name, task, data, limit) for name, limit in choose_splits(training, data).items()}
    tokenizer = make_tokenizer(model, all_texts(splits.get("train"), task), data.max_seq_length)
    return {name: encode_split(split, name, tokenizer, data, alone) for name, split in splits.items()}, tokenizer


def predict(trainer: Trainer, split: Dataset, task: Task) -> dict[str, Any]:
    """Write the predicted letters of the test split; return their path, and metrics if the answers are known."""
    known = -100 not in split["labels"]
    trainer.compute_metrics = make_metrics(split, task) if known else None
    output = trainer.predict(split)
    lines = [f"index\t{task.name}\tprediction"]
    for index, (name, best) in enumerate(zip(split[task.name], output.predictions.argmax(-1), strict=True)):
        lines.append(f"{index}\t{name}\t{task.letters[best]}")
    read = ("_loss", "accuracy") if known else ()
    scores = {name: value for name, value in output.metrics.items() if name.endswith(read)}
    return scores | {"predictions": write_lines(trainer, "predictions.tsv", lines)}


@explain_out_of_memory
def main(argv: list[str] | None = None) -> dict[str, Any]:
    data, model, training, run = parse(argv)
    task, towers = TASKS[data.task], data.two_towers
    begin_run(__file__, argv, data, model, training, run)

    with training.main_process_first(desc="reading the data"):
        splits, tokenizer = load_data(data, model, training)

    # The product of two vectors shows what a text and an option have in common; the vectors side by side do not.
    fields = {"num_labels": 1, "pair_features": "interaction"} if towers else {}
    config = make_config(model, tokenizer, data.max_seq_length, **fields)
    model_class = pair_class(config.model_type, "--two_towers") if towers else AutoModelForMultipleChoice
    # The collator chooses the columns; the lengths serve train_sampling_strategy group_by_length.
    training.remove_unused_columns = False
    trainer = OrderedTrainer(
        make_model(model_class, model, config),
        training,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=(TowerCollator if towers else OptionCollator)(tokenizer),
        compute_metrics=make_metrics(splits["validation"], task) if training.do_eval else None,
        callbacks=make_callbacks(data),
    )

    summary = {"task": data.task, "metric": "eval_accuracy", **describe(trainer, run)}
    summary |= train(trainer, run)
    summary |= score(trainer)
    if training.do_predict:
        summary |= predict(trainer, splits["test"], task)
    return finish(trainer, run, summary)


if __name__ == "__main__":
    main()
