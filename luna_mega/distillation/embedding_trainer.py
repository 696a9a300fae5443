"""Trainer for the distillation of sentence vectors."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from luna_mega.distillation.embeddings import (
    SALIENCE_LEARNING_RATE,
    STATE_WEIGHT,
    SentenceTeacher,
    cosines,
    disable_dropout,
    embedding_loss,
    parameter_groups,
    set_projection_length,
    teacher_vectors,
)
from luna_mega.distillation.windows import cut_texts
from luna_mega.training.runs import OrderedTrainer, total


class EmbeddingTrainer(OrderedTrainer):
    """Trainer of `embedding_loss`, with a random number of rows and a random length in every step.

    The texts of a step are truncated to a length between the smallest number of rows and `max_length`, whose logarithm
    is uniformly distributed.

    The evaluation reports the mean cosine for every number of rows, and 1 - the mean of these as loss. Dropout is
    disabled, because the student equals its teacher for short texts. The modules of the teacher are saved next to the
    student.

    Args:
        teacher: the teacher.
        projection_length: number of rows of the saved student.
        projection_lengths: numbers of rows in training and evaluation.
        salience_learning_rate: learning rate of the salience.
        state_weight: weight of the states of all tokens and layers in the loss; see `embedding_loss`.
        max_length: greatest length of the texts of a step.
    """

    def __init__(
        self,
        *args: Any,
        teacher: SentenceTeacher,
        projection_length: int,
        projection_lengths: Sequence[int],
        salience_learning_rate: float = SALIENCE_LEARNING_RATE,
        state_weight: float = STATE_WEIGHT,
        max_length: int,
        **others: Any,
    ):
        super().__init__(*args, **others)
        disable_dropout(self.model)
        self.teacher, self.salience_learning_rate, self.state_weight = teacher, salience_learning_rate, state_weight
        self.projection_length, self.projection_lengths = projection_length, projection_lengths
        self.max_length = max_length
        self.teacher.model.to(self.args.device)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over texts

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        rates = (self.args.learning_rate, self.salience_learning_rate, self.args.weight_decay)
        optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = optimizer_class(parameter_groups(self.model, *rates), **options)
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # By the step, so that all processes and resumed runs have the same number.
        numbers = random.Random(f"{self.args.seed} {self.state.global_step}")
        set_projection_length(self.model, numbers.choice(self.projection_lengths))
        shortest = min(max(3, min(self.projection_lengths)), self.max_length)
        inputs = cut_texts(inputs, round(shortest * (self.max_length / shortest) ** numbers.random()))
        teacher = self.teacher
        return embedding_loss(teacher.model, model, teacher.modules, inputs, teacher.window, self.state_weight)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        self.cosines = [0.0] * len(self.projection_lengths)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        set_projection_length(self.model, self.projection_length)
        *sums, count = total([*self.cosines, self.losses[1]], self.args)
        for rows, value in zip(self.projection_lengths, sums, strict=True):
            output.metrics[f"{metric_key_prefix}_cosine_{rows}"] = value / count
        return output

    @torch.no_grad()
    def prediction_step(self, model: nn.Module, inputs: dict[str, torch.Tensor], *args, **kwargs):
        kept = self._kept(inputs["input_ids"])
        modules = self.teacher.modules
        reference = teacher_vectors(self.teacher.model, modules, inputs, self.teacher.window)
        for index, rows in enumerate(self.projection_lengths):
            set_projection_length(self.model, rows)
            value = float(cosines(model, modules, inputs, reference)[:kept].sum())
            self.cosines[index] += value
            self.losses[0] += (kept - value) / len(self.cosines)
        self.losses[1] += kept
        return reference.new_zeros(()), None, None  # `evaluation_loop` replaces the loss

    def _save(self, output_dir=None, state_dict=None):
        set_projection_length(self.model, self.projection_length)
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        self.teacher.modules.write(folder, self.processing_class.model_max_length)
