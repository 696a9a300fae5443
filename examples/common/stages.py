"""Stages of a distillation: the Trainers of two, scores beside the teacher's, and their record."""

import copy
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from common.distillation import DistillArguments
from common.report import show
from common.streaming import Stream, StreamingTrainer
from common.training import total
from luna_mega.distillation import Teacher, align, distill


def has_checkpoints(folder: str) -> bool:
    return any(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))


def plan_alignment(model: DistillArguments, training: TrainingArguments) -> TrainingArguments:
    """Return the options of alignment, and leave those of distillation in `training`.

    Each stage has a schedule of its own, with a warm-up of at most a quarter of its steps. `--resume_from_checkpoint`
    goes to the stage that was running.
    """
    first, wanted = copy.copy(training), training.resume_from_checkpoint
    first.output_dir = str(Path(training.output_dir, "align"))
    first.max_steps, first.learning_rate = model.align_steps, model.align_learning_rate
    first.load_best_model_at_end = first.push_to_hub = first.gradient_checkpointing = False
    first.seed = training.seed + 1  # other blocks than distillation begins with
    if wanted:
        early = Path(wanted).resolve().parent == Path(first.output_dir).resolve()
        if wanted == "last":
            early = has_checkpoints(first.output_dir) and not has_checkpoints(training.output_dir)
        (training if early else first).resume_from_checkpoint = None
    for options in (first, training):
        if options.max_steps > 0:
            options.warmup_steps = min(options.warmup_steps, options.max_steps // 4 + 1)
    return first


def targets_of(teacher: Teacher, labels: torch.Tensor) -> torch.Tensor:
    """Return what is predicted at every position `[B, T]`, or of every sequence; -100 = nothing."""
    if teacher.is_classifier or not teacher.family.is_decoder:
        return labels
    return functional.pad(labels[:, 1:], (0, 1), value=-100)


class Judge:
    """Scores of a student on the validation split, beside the teacher's on the same blocks.

    Args:
        agrees: whether the teacher's guesses are asked for; it has to read the blocks.

    Attributes:
        teacher_scores: loss and accuracy of the teacher.
    """

    def __init__(
        self, teacher: Teacher, split: Dataset, collate: Callable, training: TrainingArguments, agrees: bool = True
    ):
        self.teacher, self.split, self.collate, self.training = teacher, split, collate, training
        size, rank, count = training.eval_batch_size, training.process_index, training.world_size
        groups = [range(start, min(start + size, len(split))) for start in range(0, len(split), size)]
        self.groups = [(group, True) for group in groups[rank::count]]
        # All processes call the student equally often, as shards ask for.
        self.groups += [(groups[0], False)] * (math.ceil(len(groups) / count) - len(self.groups))
        self.guesses, self.teacher_scores = None, {}
        if agrees:
            self.guesses = []
            self.teacher_scores = self.score(self.ask_teacher)
            self.teacher_scores.pop("agreement", None)

    @property
    def has_classes(self) -> bool:
        return not self.teacher.is_classifier or self.teacher.config.problem_type != "regression"

    def ask_teacher(self, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
        """Return the sum of the teacher's losses, and its logits."""
        targets = targets_of(self.teacher, batch["labels"])
        kept = targets != -100
        logits = self.teacher.logits(batch, None if self.teacher.is_classifier else kept)
        if not self.has_classes:
            loss = functional.mse_loss(logits.float().view(-1), targets.float(), reduction="sum")
        else:
            rows = zip(logits.split(1024), targets[kept].split(1024), strict=True)
            loss = sum(functional.cross_entropy(x.float(), y, reduction="sum") for x, y in rows)
        self.guesses.append(logits.argmax(dim=-1).cpu())
        return float(loss), logits

    def score_student(self, student: PreTrainedModel) -> dict[str, float]:
        """Return loss, accuracy, and the share of the predictions whose first guess is the teacher's."""
        was_training = student.training
        student.eval()

        def ask(batch):
            seen = distill(self.teacher, student, batch, share=0.0)
            return float(seen.labels) * len(seen.logits), seen.logits

        scores = self.score(ask)
        student.train(was_training)
        return scores

    @torch.no_grad()
    def score(self, ask: Callable) -> dict[str, float]:
        device, sums = self.training.device, [0.0] * 4
        half = torch.bfloat16 if self.training.bf16 else torch.float16
        for index, (group, counts) in enumerate(self.groups):
            batch = {name: x.to(device) for name, x in self.collate([self.split[row] for row in group]).items()}
            with torch.autocast(device.type, half, enabled=self.training.bf16 or self.training.fp16):
                loss, logits = ask(batch)
            guesses, targets = logits.argmax(dim=-1).cpu(), targets_of(self.teacher, batch["labels"]).cpu()
            targets = targets[targets != -100]
            agree = (guesses == self.guesses[index]).sum() if self.guesses else 0
            part = [loss, (guesses == targets).sum(), agree, len(targets)]
            sums = [x + float(y) * counts for x, y in zip(sums, part, strict=True)]
        loss, right, agree, count = total(sums, self.training)
        if not self.has_classes:
            return {"loss": loss / count}
        scores = {"loss": loss / count, "perplexity": math.exp(min(loss / count, 700)), "accuracy": right / count}
        if self.teacher.is_classifier:
            del scores["perplexity"]
        return scores | ({"agreement": agree / count} if self.guesses else {})


class StageTrainer(StreamingTrainer):
    """Trainer of one stage.

    Args:
        judge: what scores the student in place of Trainer; None = nothing does.
    """

    counts_items = True  # whether the loss is divided by the number of predictions of a step

    def __init__(self, *args, teacher: Teacher, options: DistillArguments, judge: Judge | None, **others):
        super().__init__(*args, **others)
        self.teacher, self.options, self.judge = teacher, options, judge
        self.model_accepts_loss_kwargs = self.counts_items

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        with self.averaged():
            scores = self.judge.score_student(self.model)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class AlignTrainer(StageTrainer):
    """Trainer of alignment: every layer learns what the teacher's does on the teacher's states."""

    counts_items = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return align(self.teacher, model, inputs, self.options.layers, self.options.align_whole).mean()


class DistillTrainer(StageTrainer):
    """Trainer of distillation: labels, and the teacher's distribution."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        share, temperature = self.options.distill_share, self.options.distill_temperature
        loss = distill(self.teacher, model, inputs, share, temperature, num_items_in_batch).loss
        # DDP takes the mean over processes of what is divided by the number of all.
        shared = num_items_in_batch is not None and self.args.average_tokens_across_devices
        return loss * self.accelerator.num_processes if shared else loss


class Record:
    """Rows of `stages.json`: what the student scores after so many tokens and seconds of all stages.

    The teacher's time is in the seconds, and the tokens are those of calibration, alignment and distillation.
    """

    def __init__(self, training: TrainingArguments, resumed: bool):
        self.path, self.is_first = Path(training.output_dir, "stages.json"), training.process_index == 0
        self.rows: list[dict[str, Any]] = []
        self.teacher: dict[str, float] = {}
        if resumed and self.path.is_file():
            self.rows = json.loads(self.path.read_text(encoding="utf-8"))["rows"]

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def spent(self) -> dict[str, float]:
        """Return the tokens and seconds of all stages so far."""
        last = self.rows[-1] if self.rows else {"tokens": 0, "seconds": 0.0}
        return {name: last[name] for name in ("tokens", "seconds")}

    def add(self, stage: str, entries: list[dict[str, float]]) -> None:
        """Add entries of a stage: step, tokens and seconds of that stage, and scores; and save all rows."""
        self.rows = [row for row in self.rows if row["stage"] != stage]
        before, names = self.spent(), ("loss", "accuracy", "agreement")
        for entry in entries:
            spent = {name: before[name] + entry[name] for name in before}
            scores = {name: entry[name] for name in names if name in entry}
            self.rows.append({"stage": stage, "step": entry["step"], **spent, **scores})
        if self.is_first:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"teacher": self.teacher, "rows": self.rows}, indent=2)
            self.path.write_text(text + "\n", encoding="utf-8")
        self.say(
            f"stage {stage}: " + ", ".join(f"{name} {show(x)}" for name, x in self.rows[-1].items() if name != "stage")
        )

    def add_row(self, stage: str, tokens: int, seconds: float, judge: Judge | None, student: PreTrainedModel) -> None:
        """Add a stage without steps, and the scores of the student after it."""
        scores = judge.score_student(student) if judge else {}
        self.add(stage, [{"step": 0, "tokens": tokens, "seconds": seconds, **scores}])

    def add_training(self, stage: str, trainer: StageTrainer) -> None:
        """Add what a stage has logged: its evaluations, and its end."""
        entries: dict[int, dict[str, float]] = {}
        for logged in trainer.state.log_history:
            if "eval_loss" in logged or "train_loss" in logged:
                entry = entries.setdefault(logged["step"], {"step": logged["step"]})
                entry |= {"tokens": logged["num_input_tokens_seen"], "seconds": logged["train_seconds"]}
                entry |= {name.removeprefix("eval_"): x for name, x in logged.items() if name.startswith("eval_")}
        self.add(stage, list(entries.values()))


def some_batches(
    examples: Dataset | Stream, collate: Callable, training: TrainingArguments, count: int
) -> list[dict[str, torch.Tensor]]:
    """Return batches for calibration: the first ones of a stream, else examples drawn by the seed."""
    size = training.per_device_train_batch_size
    if isinstance(examples, Stream):
        rows = list(itertools.islice(examples, count * size))
    else:
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(training.seed))
        rows = [examples[index] for index in order[: count * size].tolist()]
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [{name: x.to(training.device) for name, x in collate(group).items()} for group in groups]
