"""Distill a trained transformer into a Luna or a Mega in four stages: copy, calibrate, align, distill.

    python examples/run_distill.py --teacher FacebookAI/roberta-base --student luna --projection_length 64 \
        --dataset_path DIR --max_steps 600 --output_dir OUT

The head of the teacher determines the task: masked or next tokens of plain text, or text classification. All fields of
TrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import ClassLabel, Dataset, IterableDataset
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
)
from transformers.hf_argparser import HfArg

from luna_mega.distillation import Teacher, aligned_parameters, recipe, stages, train_only
from luna_mega.distillation.record import Record, describe_distillation
from luna_mega.training.arguments import RunArguments, check_choice, fail, one_line, parse_arguments
from luna_mega.training.classification import class_numbers
from luna_mega.training.data import check_split
from luna_mega.training.language_modeling import cut_stream, draw_windows, encode
from luna_mega.training.masking import (
    MaskedTextArguments as TextArguments,
    Masking,
    check_data,
    load_texts,
    make_blocks,
)
from luna_mega.training.models import label_fields
from luna_mega.training.report import describe, finish
from luna_mega.training.resuming import find_checkpoint
from luna_mega.training.runs import begin_run, check_run, make_callbacks, score, train
from luna_mega.training.seeded import Redrawn
from luna_mega.training.streams import Stream, check_streaming

TITLE, METRIC = "distillation", "eval_loss"


@dataclass
class DataArguments(TextArguments):
    block_size: int = HfArg(default=512, help="tokens of an input; texts of a classifier are truncated to it")
    line_end: str = HfArg(default="eos", help="end of a row of text for a causal model: newline, or eos (</s>)")
    pair_column: str | None = HfArg(default=None, help="column with the second texts of a classifier")
    label_column: str = HfArg(default="label", help="labels of a classifier: names of the teacher, or ids")


def parse(argv: list[str] | None) -> tuple[DataArguments, recipe.DistillArguments, TrainingArguments, RunArguments]:
    """Parse the options; exit if they contradict each other."""
    kinds = (DataArguments, recipe.DistillArguments, TrainingArguments, RunArguments)
    defaults = {"learning_rate": 1e-3, "warmup_steps": 100, "weight_decay": 0.01, "adam_beta2": 0.98}
    data, model, training, run = parse_arguments(kinds, argv, do_train=True, do_eval=True, **defaults)
    check_run(TITLE, data, model, training, run, streams=True, predicts=False)
    if training.max_steps:
        check_streaming(training, run)
    recipe.check_options(model, training)
    check_choice(data, "line_end", ("newline", "eos"))
    check_data(data)
    training.remove_unused_columns = False
    return data, model, training, run


@dataclass
class Task:
    """Options and data of both training stages.

    Attributes:
        splits: Blocks of a masked model, a stream of tokens and blocks of a causal model, or texts of a classifier.
        collate: The collator.
    """

    data: DataArguments
    model: recipe.DistillArguments
    run: RunArguments
    teacher: Teacher
    tokenizer: PreTrainedTokenizerBase
    splits: dict[str, Any]
    collate: Callable
    evaluator: stages.Evaluator = field(init=False)


def load_classes(
    splits: dict[str, Dataset], data: DataArguments, teacher: Teacher, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Dataset]:
    """Return encoded texts or text pairs with the label ids of the teacher."""
    columns = [data.text_column, *([data.pair_column] if data.pair_column else [])]
    names = [str(name) for name in teacher.config.id2label.values()]

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        return dict(tokenizer(*(batch[column] for column in columns), truncation=True, max_length=data.block_size))

    for name, split in splits.items():
        check_split(split, name, columns, [data.label_column])
        values, feature = list(split[data.label_column]), split.features[data.label_column]
        known = set(feature.names if isinstance(feature, ClassLabel) else map(str, values)) <= set(names)
        if teacher.config.num_labels == 1:
            labels = [float(value) for value in values]
        elif not known and all(isinstance(value, int) and 0 <= value < len(names) for value in values):
            labels = values
        else:
            labels = class_numbers(split, data.label_column, label_fields(names)["label2id"], name)
        encoded = split.map(tokenize, batched=True, remove_columns=split.column_names, desc=name)
        splits[name] = encoded.add_column("labels", labels)
    return splits


def load_data(
    data: DataArguments,
    training: TrainingArguments,
    run: RunArguments,
    teacher: Teacher,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[dict[str, Any], Callable]:
    """Return the splits and the collator."""
    if teacher.is_classifier and run.streaming:
        fail("--streaming: the texts of a classifier are loaded; only texts of language models can be streamed")
    splits = load_texts(data, training, run)
    if teacher.is_classifier:
        return load_classes(splits, data, teacher, tokenizer), DataCollatorWithPadding(tokenizer)
    if teacher.family.is_decoder:
        streams = {
            name: split
            if isinstance(split, IterableDataset)
            else encode(split[data.text_column], tokenizer, data.line_end)
            for name, split in splits.items()
        }
        if "validation" in streams:
            blocks = streams["validation"].split(data.block_size)
            streams["validation"] = [{"input_ids": block} for block in blocks if len(block) > 1]
        return streams, next_tokens
    blocks = make_blocks(splits, tokenizer, data, training.seed)
    return blocks, DataCollatorForTokenClassification(tokenizer) if data.short_seq_prob else default_data_collator


def next_tokens(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of a causal model, whose labels are the tokens; the last block may be shorter."""
    ids = [row["input_ids"] for row in rows]
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": (labels != -100).long(),
        "labels": labels,
    }


def draw_examples(task: Task, training: TrainingArguments) -> Any:
    """Return the training examples of a stage."""
    data, split = task.data, task.splits["train"]
    if task.teacher.is_classifier:
        return split
    if task.teacher.family.is_decoder:
        if not task.run.streaming:
            return draw_windows(split, data.block_size, training.seed)
        split = cut_stream(split, data.text_column, task.tokenizer, data.line_end, data.block_size)
        change: Callable | None = None
    else:
        change = Masking(task.tokenizer, data.mlm_probability)
    if task.run.streaming:
        return Stream(split.shuffle(training.seed, buffer_size=task.run.shuffle_buffer), change, training)
    return Redrawn(split, change, training.seed)


def make_trainer(
    kind: type[stages.StageTrainer], student: PreTrainedModel, training: TrainingArguments, task: Task
) -> stages.StageTrainer:
    """Return the Trainer of a stage."""
    return kind(
        student,
        training,
        train_dataset=draw_examples(task, training),
        eval_dataset=task.splits.get("validation"),
        processing_class=task.tokenizer,
        data_collator=task.collate,
        callbacks=make_callbacks(task.data),
        teacher=task.teacher,
        options=task.model,
        evaluator=task.evaluator,
    )


def align_student(
    student: PreTrainedModel, training: TrainingArguments, task: Task, record: Record, checkpoint: str | None
) -> None:
    """Align a student and save it; it is reloaded without the wrappers of DDP or FSDP2."""
    model, run = task.model, copy.copy(task.run)
    run.checkpoint, run.ema_decay = checkpoint, 0.0
    record.say(f"stage align: {model.align_steps} steps")
    train_only(student, aligned_parameters(task.teacher, student, model.align_whole))
    trainer = make_trainer(stages.AlignTrainer, student, training, task)
    train(trainer, run, TITLE, METRIC, head_share=0.0)
    score(trainer)
    record.add_training(trainer)
    trainer.accelerator.wait_for_everyone()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    data, model, training, run = parse(argv)
    first = stages.plan_alignment(model, training)
    begin_run(__file__, argv, data, model, training, run)
    run.model = f"{model.student} from {model.teacher}"
    aligning = None if run.checkpoint else find_checkpoint(first)
    checkpoint = run.checkpoint or aligning

    teacher, tokenizer = recipe.make_teacher(model, data.block_size)
    with training.main_process_first(desc="reading the data"), one_line():
        splits, collate = load_data(data, training, run, teacher, tokenizer)
    task = Task(data, model, run, teacher, tokenizer, splits, collate)

    def sample(count: int) -> list[dict[str, torch.Tensor]]:
        return stages.some_batches(draw_examples(task, first), collate, training, count)

    record = Record(training, resumed=bool(checkpoint))
    student = recipe.make_student(teacher, model, data.block_size, checkpoint)
    is_initialized = model.is_new and not checkpoint
    copying = recipe.copy_student(teacher, student, model) if is_initialized else None
    recipe.move_teacher(teacher, model, training)
    task.evaluator = stages.Evaluator(
        teacher, splits.get("validation"), collate, training, recipe.reads_all(teacher, data.block_size)
    )
    record.teacher = task.evaluator.teacher_scores
    if copying:
        student = student.to(training.device)
        unscaled = recipe.scale_student(student, sample(1)) if teacher.family.is_decoder else {}
        record.say(copying.text)
        record.add_row("copy", copying, task.evaluator.score_student(student))
        if model.align_steps:  # aligned layers require the norm of the teacher
            student.load_state_dict(unscaled, strict=False)
    if is_initialized and recipe.calibrates(teacher, student, model):
        calibration = recipe.calibrate_student(teacher, student, model, sample(model.calibration_batches + 1))
        record.say(calibration.text)
        record.add_row("calibrate", calibration, task.evaluator.score_student(student))
    if model.align_steps and not run.checkpoint:
        align_student(student, first, task, record, aligning)
        student = recipe.make_student(teacher, model, data.block_size, first.output_dir).to(training.device)
        if teacher.family.is_decoder:
            recipe.scale_student(student, sample(1))

    train_only(student, None)
    trainer = make_trainer(stages.DistillTrainer, student, training, task)
    if training.max_steps:
        record.say(f"stage distill: {training.max_steps} steps" if training.max_steps > 0 else "stage distill")
        summary = train(trainer, run, TITLE, METRIC, 1.0 if teacher.family.is_decoder else data.mlm_probability)
    else:
        summary = {"task": TITLE, "metric": METRIC, **describe(trainer, run)}
        trainer.save_model(_internal_call=True)
    summary |= score(trainer)
    if training.max_steps:
        record.add_training(trainer)
    run.card |= describe_distillation(model, record)
    return finish(trainer, run, summary | record.summary)


if __name__ == "__main__":
    main()
