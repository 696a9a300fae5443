"""Self-pretraining (Amos et al. 2023): predict masked inputs of a task before training on its labels."""

import copy
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from lra.tasks import GRAYS, LraTask, gray_levels
from luna_mega import training as lib


class Reconstruction(nn.Module):
    """Body of a classifier with a linear layer that predicts tokens or gray levels at masked positions."""

    accepts_loss_kwargs = False  # Trainer would not divide the loss by the steps of accumulation because of `**inputs`

    def __init__(self, model: PreTrainedModel, classes: int):
        super().__init__()
        self.body, self.config, self.main_input_name = model.base_model, model.config, model.main_input_name
        self.out_proj = nn.Linear(model.config.hidden_size, classes)

    def forward(self, labels: torch.LongTensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        masked = labels != -100
        logits = self.out_proj(self.body(**inputs).last_hidden_state[masked])
        return {"loss": nn.functional.cross_entropy(logits, labels[masked]), "logits": logits}


def mask_split(
    split: Dataset, task: LraTask, tokenizer: PreTrainedTokenizerFast | None, share: float, seed: int
) -> lib.Redrawn:
    """Return rows with `share` of the positions masked, and the inputs as labels; one text of a pair is drawn."""

    def mask(row: dict[str, Any], numbers: torch.Generator) -> dict[str, Any]:
        names = [name for name in row if name != "labels"]
        inputs = torch.as_tensor(row[names[int(torch.randint(len(names), (), generator=numbers))]])
        masked = torch.rand(len(inputs), generator=numbers) < share
        masked[int(torch.randint(len(inputs), (), generator=numbers))] = True
        if tokenizer is None:
            hidden, labels = {"input_values": inputs.masked_fill(masked, 0.0)}, gray_levels(inputs, task)
        else:
            hidden, labels = {"input_ids": inputs.masked_fill(masked, tokenizer.mask_token_id)}, inputs
        return hidden | {"labels": labels.masked_fill(~masked, -100)}

    return lib.Redrawn(split, mask, seed)


def pretrain(
    model: PreTrainedModel,
    split: Dataset,
    task: LraTask,
    tokenizer: PreTrainedTokenizerFast | None,
    training: TrainingArguments,
    steps: int,
    share: float,
) -> None:
    """Train the body of `model`, in place, for `steps` steps with the other options of `training`."""
    options = copy.copy(training)
    options.max_steps, options.load_best_model_at_end = steps, False
    options.eval_strategy = options.save_strategy = "no"
    options.eval_on_start, options.label_smoothing_factor = False, 0.0  # without validation rows; masked logits only
    trainer = lib.OrderedTrainer(
        Reconstruction(model, GRAYS if tokenizer is None else len(tokenizer)),
        options,
        train_dataset=mask_split(split, task, tokenizer, share, training.seed),
        data_collator=DataCollatorForTokenClassification(tokenizer) if tokenizer else None,
    )
    lib.save(trainer, "self_pretraining", {"self_pretraining_loss": trainer.train().training_loss})
