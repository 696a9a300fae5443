"""Distillation of sentence vectors: a Luna that packs long texts reproduces the vectors of its teacher."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from luna_mega.distillation.sentences import SentenceModules

SALIENCE_LEARNING_RATE = 3e-3


def set_projection_length(student: PreTrainedModel, rows: int) -> None:
    """Set the number of rows that a model with `pack_method="importance"` packs a text into."""
    if student.config.pack_method != "importance" or rows < 1:
        raise ValueError(
            f"rows={rows} requires at least 1 row and a model with pack_method='importance', got "
            f"{student.config.pack_method!r}; see from_teacher"
        )
    student.config.projection_length = rows
    for layer in student.base_model.encoder.layers:
        layer.attention.projection_length = rows


def parameter_groups(student: nn.Module, learning_rate: float) -> list[dict[str, Any]]:
    """Return the groups of an optimizer: the salience has a higher learning rate; the embeddings are not trained."""
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in student.named_parameters():
        parameter.requires_grad_("embeddings." not in name)
        if parameter.requires_grad:
            groups[name.endswith("salience")].append(parameter)
    return [
        {"params": groups[False], "lr": learning_rate},
        {"params": groups[True], "lr": max(learning_rate, SALIENCE_LEARNING_RATE), "weight_decay": 0.0},
    ]


@torch.no_grad()
def teacher_vectors(
    teacher: PreTrainedModel, modules: SentenceModules, batch: dict[str, torch.Tensor], window: int
) -> torch.Tensor:
    """Return the teacher's vectors `[B, d]`: of longer texts the mean over windows of `window` tokens.

    Every window has the first and the last token of the text, as the tokenizer adds them to a text.
    """
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(dim=1).tolist()
    if max(lengths) <= window:
        return modules.embed(teacher(**batch).last_hidden_state, mask)
    pieces: list[torch.Tensor] = []
    owners: list[int] = []
    for index, (ids, kept) in enumerate(zip(batch["input_ids"], mask, strict=True)):
        ids = ids[kept]
        parts = ids[1:-1].split(window - 2) if len(ids) > window else (ids[1:-1],)
        pieces += [torch.cat([ids[:1], part, ids[-1:]]) for part in parts]
        owners += [index] * len(parts)
    ids = nn.utils.rnn.pad_sequence(pieces, batch_first=True)
    kept = nn.utils.rnn.pad_sequence([torch.ones_like(piece) for piece in pieces], batch_first=True)
    vectors = modules.embed(teacher(input_ids=ids, attention_mask=kept).last_hidden_state, kept.bool())
    owner = torch.tensor(owners, device=vectors.device)
    total = vectors.new_zeros(len(lengths), vectors.shape[1]).index_add_(0, owner, vectors)
    mean = total / owner.bincount(minlength=len(lengths))[:, None]
    return functional.normalize(mean, dim=-1) if modules.normalizes else mean


def embedding_loss(
    teacher: PreTrainedModel,
    student: nn.Module,
    modules: SentenceModules,
    batch: dict[str, torch.Tensor],
    window: int,
) -> torch.Tensor:
    """Return 1 - cosine of the vectors of student and teacher, averaged over the texts of a batch.

    Args:
        teacher: the encoder that the student was converted from.
        student: a model from `from_teacher` without a head.
        modules: pooling and normalization of the teacher.
        batch: `input_ids`, `attention_mask` and if the tokenizer returns them `token_type_ids`, `[B, T]`.
        window: longest text that the teacher reads at once; see `teacher_vectors`.
    """
    if not 3 <= window <= teacher.config.max_position_embeddings:
        raise ValueError(
            f"window={window} must be from 3 to the {teacher.config.max_position_embeddings} positions of the teacher"
        )
    reference = teacher_vectors(teacher, modules, batch, window)
    got = modules.embed(student(**batch).last_hidden_state, batch["attention_mask"].bool())
    return 1 - functional.cosine_similarity(got, reference, dim=-1).mean()
