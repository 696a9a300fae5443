"""Makes a Luna or a Mega out of a trained transformer in four stages: copy, calibrate, align, distill.

    python examples/run_distill.py --teacher FacebookAI/roberta-base --student luna --projection_length 64 \
        --dataset_path DIR --max_steps 600 --output_dir OUT

The teacher's head decides what is learned: masked or next tokens of plain text, or classes of texts. Every field of
TrainingArguments is an option; the values of a recipe are defaults that the command line overrides.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common.arguments import (
    RunArguments,
    check_choice,
    check_least,
    explain_out_of_memory,
    fail,
    find_checkpoint,
    parse_arguments,
)
from common.classification import class_numbers
from common.distillation import (
    DTYPES,
    DistillArguments,
    calibrate_alike,
    calibrates,
    make_student,
    make_teacher,
    move_teacher,
    one_line,
    reads_all,
)
from common.language_model import Windows, cut_stream, encode
from common.redrawn import Redrawn
from common.report import describe, finish
from common.stages import AlignTrainer, DistillTrainer, Judge, Record, StageTrainer, plan_alignment, some_batches
from common.streaming import Stream, check_streaming
from common.training import begin_run, check_run, make_callbacks, score, train
from datasets import Dataset
from run_mlm import DataArguments as TextArguments, Masking, cut_blocks, load_texts, mask_once
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
)

from luna_mega.distillation import Teacher, aligned_parameters, copy_weights, train_only

TITLE, METRIC = "distillation", "eval_loss"


@dataclass
class DataArguments(TextArguments):
    block_size: int = field(default=512, metadata={"help": "tokens of an input; a classifier's texts are cut to it"})
    line_end: str = field(
        default="eos", metadata={"help": "end of a row of text for a causal model: newline, or eos (</s>)"}
    )
    pair_column: str | None = field(default=None, metadata={"help": "column with the second texts of a classifier"})
    label_column: str = field(
        default="label", metadata={"help": "column with the classes of a classifier: the teacher's names, or numbers"}
    )


def parse(argv: list[str] | None) -> tuple[DataArguments, DistillArguments, TrainingArguments, RunArguments]:
    """Return the options; the script ends where they contradict each other."""
    kinds = (DataArguments, DistillArguments, TrainingArguments, RunArguments)
    defaults = {"learning_rate": 1e-3, "warmup_steps": 100, "weight_decay": 0.01, "adam_beta2": 0.98}
    data, model, training, run = parse_arguments(kinds, argv, do_train=True, do_eval=True, **defaults)
    check_run(TITLE, data, model, training, run, streams=True, predicts=False)
    if training.max_steps:
        check_streaming(training, run)
    if not model.teacher:
        fail("pass --teacher: a folder or a name on the Hub")
    if not (model.is_new or Path(model.student).is_dir()):
        fail(f"--student {model.student} is neither luna, mega, nor the folder of one")
    named = ("projection_length", "max_length", "num_hidden_layers", "config_overrides")
    if given := [name for name in named if getattr(model, name) and not model.is_new]:
        fail(f"--{given[0]} is for a new student, and {model.student} is made already: leave it out")
    if training.n_gpu > 1:
        fail(f"{training.n_gpu} GPUs need a process each: launch with torchrun or accelerate")
    check_choice(model, "teacher_dtype", DTYPES)
    check_choice(model, "positions", ("copy", "mirror", "interpolate"))
    check_choice(data, "line_end", ("newline", "eos"))
    check_least(model, 0, "align_steps", "calibration_batches")
    check_least(data, 2, "block_size")
    if not (0 <= model.distill_share <= 1 and model.distill_temperature > 0):
        fail("--distill_share must be from 0 to 1, and --distill_temperature above 0")
    if sum(map(bool, (data.dataset_name, data.dataset_path, data.train_files or data.validation_files))) != 1:
        fail("pass one of --dataset_name, --dataset_path, or --train_files and --validation_files")
    return data, model, training, run


def load_classes(
    splits: dict[str, Dataset], data: DataArguments, teacher: Teacher, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Dataset]:
    """Return texts, or pairs of texts, with the teacher's labels."""
    columns = [data.text_column, *filter(None, [data.pair_column])]
    names = [str(name) for name in teacher.config.id2label.values()]

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        return dict(tokenizer(*(batch[column] for column in columns), truncation=True, max_length=data.block_size))

    for name, split in splits.items():
        values = split[data.label_column]
        if teacher.config.num_labels == 1:
            labels = [float(value) for value in values]
        elif all(isinstance(value, int) and 0 <= value < len(names) for value in values):
            labels = list(values)
        else:
            labels = class_numbers(split, data.label_column, names, name)
        encoded = split.map(tokenize, batched=True, remove_columns=split.column_names, desc=name)
        splits[name] = encoded.add_column("labels", labels)
    return splits


def load_data(
    data: DataArguments,
    training: TrainingArguments,
    run: RunArguments,
    teacher: Teacher,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return the splits: of a masked model blocks, of a causal one a stream and blocks, of a classifier texts."""
    splits = load_texts(data, training, run)
    if teacher.is_classifier:
        return load_classes(splits, data, teacher, tokenizer)
    if teacher.family.is_decoder:
        if not run.streaming:
            splits["train"] = encode(splits["train"][data.text_column], tokenizer, data.line_end)
        if "validation" in splits:
            stream = encode(splits["validation"][data.text_column], tokenizer, data.line_end)
            splits["validation"] = [{"input_ids": block} for block in stream.split(data.block_size) if len(block) > 1]
        return splits
    short = {"train": data.short_seq_prob}
    blocks = {name: cut_blocks(split, name, tokenizer, data, short.get(name, 0.0)) for name, split in splits.items()}
    if "validation" in blocks:
        blocks["validation"] = mask_once(blocks["validation"], tokenizer, data, training.seed)
    return blocks


def draw_examples(
    split: Any,
    data: DataArguments,
    training: TrainingArguments,
    run: RunArguments,
    teacher: Teacher,
    tokenizer: PreTrainedTokenizerBase,
) -> Any:
    """Return the training examples of a stage, which depend on its seed."""
    if teacher.is_classifier:
        return split
    change: Callable = Masking(tokenizer, data.mlm_probability)
    if teacher.family.is_decoder:
        if not run.streaming:
            return Windows(split, data.block_size, training.seed)
        split = cut_stream(split, data.text_column, tokenizer, data.line_end, data.block_size)
        change = lambda block, _: block  # noqa: E731
    if run.streaming:
        return Stream(split.shuffle(training.seed, buffer_size=run.shuffle_buffer), change, training)
    return Redrawn(split, change, training.seed)


def next_tokens(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of a causal model, whose labels are its tokens; the last block of a text may be shorter."""
    ids = [row["input_ids"] for row in rows]
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": (labels != -100).long(),
        "labels": labels,
    }


def choose_collator(data: DataArguments, teacher: Teacher, tokenizer: PreTrainedTokenizerBase) -> Callable:
    """Return the function that makes a batch of rows."""
    if teacher.is_classifier:
        return DataCollatorWithPadding(tokenizer)
    if teacher.family.is_decoder:
        return next_tokens
    return DataCollatorForTokenClassification(tokenizer) if data.short_seq_prob else default_data_collator


@explain_out_of_memory
def main(argv: list[str] | None = None) -> dict[str, Any]:
    data, model, training, run = parse(argv)
    training.remove_unused_columns = False
    first = plan_alignment(model, training)
    begin_run(__file__, argv, data, model, training, run)
    run.model = f"{model.student} from {model.teacher}"
    first_run = copy.copy(run)
    first_run.ema_decay, first_run.checkpoint = 0.0, None if run.checkpoint else find_checkpoint(first)

    teacher, tokenizer = make_teacher(model, data.block_size)
    with training.main_process_first(desc="reading the data"):
        splits = load_data(data, training, run, teacher, tokenizer)
    collate = choose_collator(data, teacher, tokenizer)

    def make_trainer(kind: type[StageTrainer], student: PreTrainedModel, args: TrainingArguments) -> StageTrainer:
        return kind(
            student,
            args,
            train_dataset=draw_examples(splits["train"], data, args, run, teacher, tokenizer),
            eval_dataset=splits.get("validation"),
            processing_class=tokenizer,
            data_collator=collate,
            callbacks=make_callbacks(data),
            teacher=teacher,
            options=model,
            judge=judge,
        )

    checkpoint = run.checkpoint or first_run.checkpoint
    student, begins = make_student(teacher, model, data.block_size, checkpoint), model.is_new and not checkpoint
    record = Record(training, resumed=bool(checkpoint))
    start = time.perf_counter()
    if begins:
        with one_line():
            report = copy_weights(teacher, student, model.layers, model.positions)
        record.say(f"{report}")
    spent = time.perf_counter() - start
    move_teacher(teacher, model, training)
    student.to(training.device)
    judge = None
    if training.do_eval:
        judge = Judge(teacher, splits["validation"], collate, training, agrees=reads_all(teacher, data.block_size))
        record.teacher = judge.teacher_scores
    if begins:
        record.add_row("copy", 0, spent, judge, student)
    if begins and calibrates(teacher, student, model):
        start = time.perf_counter()
        examples = draw_examples(splits["train"], data, first, run, teacher, tokenizer)
        batches = some_batches(examples, collate, training, model.calibration_batches)
        shares, tokens = calibrate_alike(teacher, student, model, batches)
        record.say(f"positions explained by the states of each layer: {', '.join(f'{x:.2f}' for x in shares)}")
        record.add_row("calibrate", tokens, time.perf_counter() - start, judge, student)
    if model.align_steps and not run.checkpoint:
        record.say(f"stage align: {model.align_steps} steps")
        train_only(student, aligned_parameters(teacher, student, model.align_whole))
        trainer = make_trainer(AlignTrainer, student, first)
        train(trainer, first_run, 0.0)
        score(trainer)
        record.add_training("align", trainer)
        student = make_student(teacher, model, data.block_size, first.output_dir)

    record.say(f"stage distill: {training.max_steps} steps")
    train_only(student, None)
    trainer = make_trainer(DistillTrainer, student, training)
    summary = {"task": TITLE, "metric": METRIC, **describe(trainer, run)}
    if training.max_steps:
        summary |= train(trainer, run, 1.0 if teacher.family.is_decoder else data.mlm_probability)
    else:
        trainer.save_model(_internal_call=True)
    summary |= score(trainer)
    if training.max_steps:
        record.add_training("distill", trainer)
    summary |= {f"teacher_{name}": value for name, value in record.teacher.items()} | record.spent()
    return finish(trainer, run, summary)


if __name__ == "__main__":
    main()
