"""Training stages of a distillation: their options and Trainers, and evaluation against the teacher."""

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from luna_mega.distillation import Teacher, align, distill
from luna_mega.distillation.recipe import DistillArguments
from luna_mega.training.runs import total
from luna_mega.training.streams import Stream, StreamingTrainer


def has_checkpoints(folder: str) -> bool:
    return any(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))


def plan_alignment(model: DistillArguments, training: TrainingArguments) -> TrainingArguments:
    """Return the options of alignment; `training` keeps the options of distillation.

    Each stage has its own schedule with a warm-up of at most a quarter of its steps. `--resume_from_checkpoint` applies
    to the interrupted stage.
    """
    first, wanted = copy.copy(training), training.resume_from_checkpoint
    first.output_dir = str(Path(training.output_dir, "_align"))  # Trainer pushes nothing with _ to the Hub
    first.max_steps, first.learning_rate = model.align_steps, model.align_learning_rate
    first.load_best_model_at_end = first.push_to_hub = first.gradient_checkpointing = False
    first.ddp_find_unused_parameters = False  # DDP searches the logits, but the losses come from the layers
    first.seed = training.seed + 1  # other blocks than at the start of distillation
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
    """Return the targets of all positions `[B, T]`, or of all sequences; -100 = ignored."""
    if teacher.is_classifier or not teacher.family.is_decoder:
        return labels
    return functional.pad(labels[:, 1:], (0, 1), value=-100)


class Evaluator:
    """Evaluation of student and teacher on the validation split.

    Args:
        split: Validation split, None to disable the evaluation.
        agrees: Whether to evaluate the teacher and the agreement; requires examples within its length limit.

    Attributes:
        teacher_scores: Loss and accuracy of the teacher.
    """

    def __init__(
        self, teacher: Teacher, split: Dataset | None, collate: Callable, training: TrainingArguments, agrees: bool
    ):
        self.teacher, self.split, self.collate, self.training = teacher, split or [], collate, training
        self.has_guesses = not teacher.is_classifier or teacher.config.num_labels > 1
        size, rank, count = training.eval_batch_size, training.process_index, training.world_size
        groups = [range(start, min(start + size, len(self.split))) for start in range(0, len(self.split), size)]
        self.groups = [(group, True) for group in groups[rank::count]]
        # All processes call the student equally often, which sharded models require.
        self.groups += [(group, False) for group in groups[:1]] * (math.ceil(len(groups) / count) - len(self.groups))
        self.guesses: list[torch.Tensor] = []
        self.teacher_scores = self.score(self.evaluate_teacher) if agrees else {}
        self.teacher_scores.pop("agreement", None)

    def evaluate_teacher(self, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
        """Return the sum of the teacher's losses, and its logits."""
        targets = targets_of(self.teacher, batch["labels"])
        kept = targets != -100
        logits = self.teacher.logits(batch, None if self.teacher.is_classifier else kept)
        if self.has_guesses:
            rows = zip(logits.split(1024), targets[kept].split(1024), strict=True)  # limits the float32 copies
            loss = sum(functional.cross_entropy(x.float(), y, reduction="sum") for x, y in rows)
        else:
            loss = functional.mse_loss(logits.float().view(-1), targets.float(), reduction="sum")
        self.guesses.append(logits.argmax(dim=-1).cpu())
        return float(loss), logits

    def score_student(self, student: PreTrainedModel) -> dict[str, float]:
        """Return loss, accuracy, and the fraction of predictions that equal the teacher's."""
        was_training = student.training
        student.eval()

        def evaluate(batch):
            seen = distill(self.teacher, student, batch, share=0.0)
            return float(seen.labels) * len(seen.logits), seen.logits

        scores = self.score(evaluate)
        student.train(was_training)
        return scores

    @torch.no_grad()
    def score(self, evaluate: Callable) -> dict[str, float]:
        device, sums = self.training.device, [0.0] * 4
        half = torch.bfloat16 if self.training.bf16 else torch.float16
        for index, (group, counts) in enumerate(self.groups):
            batch = {name: x.to(device) for name, x in self.collate([self.split[row] for row in group]).items()}
            with torch.autocast(device.type, half, enabled=self.training.bf16 or self.training.fp16):
                loss, logits = evaluate(batch)
            guesses, targets = logits.argmax(dim=-1).cpu(), targets_of(self.teacher, batch["labels"]).cpu()
            targets = targets[targets != -100]
            agree = (guesses == self.guesses[index]).sum() if self.guesses else 0
            part = [loss, (guesses == targets).sum(), agree, len(targets)]
            sums = [x + float(y) * counts for x, y in zip(sums, part, strict=True)]
        if not self.groups:
            return {}
        loss, right, agree, count = total(sums, self.training)
        scores = {"loss": loss / count}
        if self.has_guesses:
            scores |= {"accuracy": right / count} | ({"agreement": agree / count} if self.guesses else {})
        return scores if self.teacher.is_classifier else scores | {"perplexity": math.exp(min(scores["loss"], 700))}


class StageTrainer(StreamingTrainer):
    """Trainer of one stage.

    Args:
        evaluator: Evaluates the student instead of Trainer.

    Attributes:
        stage: Name of the stage.
        counts_items: Whether the loss is divided by the number of predictions of a step.
    """

    stage = ""
    counts_items = True

    def __init__(self, *args, teacher: Teacher, options: DistillArguments, evaluator: Evaluator, **others):
        super().__init__(*args, **others)
        self.teacher, self.options, self.evaluator = teacher, options, evaluator
        self.model_accepts_loss_kwargs = self.counts_items

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        with self.averaged():
            scores = self.evaluator.score_student(self.model)
        return self.report(scores, metric_key_prefix)


class AlignTrainer(StageTrainer):
    """Trainer of alignment: every layer is trained to reproduce the teacher's layer on the teacher's states."""

    stage = "align"
    counts_items = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return align(self.teacher, model, inputs, self.options.layers, self.options.align_whole).mean()


class DistillTrainer(StageTrainer):
    """Trainer of distillation: labels, and the teacher's distribution."""

    stage = "distill"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        share, temperature = self.options.distill_share, self.options.distill_temperature
        loss = distill(self.teacher, model, inputs, share, temperature, num_items_in_batch).loss
        # The loss is divided by the items of all processes, and DDP averages over processes.
        shared = num_items_in_batch is not None and self.args.average_tokens_across_devices
        return loss * self.accelerator.num_processes if shared else loss


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
