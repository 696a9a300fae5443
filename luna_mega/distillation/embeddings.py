"""Distillation of sentence vectors: a Luna that packs long texts reproduces the vectors of its teacher."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from luna_mega.distillation.families import Parts
from luna_mega.distillation.loading import load_teacher
from luna_mega.distillation.sentences import SentenceModules, read_modules
from luna_mega.distillation.teachers import check_teacher
from luna_mega.distillation.windows import Windows, split_windows
from luna_mega.kernels.upcast import upcast

SALIENCE_LEARNING_RATE = 3e-3
STATE_WEIGHT = 10.0


@dataclass
class SentenceTeacher:
    """A sentence encoder.

    Args:
        model: the encoder without a head.
        modules: pooling and normalization.
        window: longest text that the encoder reads at once; see `teacher_vectors`.
    """

    model: PreTrainedModel
    modules: SentenceModules
    window: int


def load_sentence_teacher(name: str, window: int | None = None) -> SentenceTeacher:
    """Load a sentence-transformers model, or an encoder, whose token states are then averaged.

    Args:
        name: folder or name on the Hub.
        window: longest text that the teacher reads at once; None = its own limit.

    Raises:
        ValueError: The teacher is not supported or damaged, or the window is out of range.
        OSError: There is no such folder or model.
    """
    modules = read_modules(name) or SentenceModules(("mean",))
    modules.check_supported()
    teacher = load_teacher(name, dtype=torch.float32)
    limit = teacher.max_length
    if window is None:
        window = min(modules.max_seq_length or limit, limit)
    if not 3 <= window <= limit:
        raise ValueError(f"window={window} must be from 3 to the {limit} positions of the teacher")
    return SentenceTeacher(teacher.model.base_model.requires_grad_(False), modules, window)


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


def disable_dropout(student: PreTrainedModel) -> None:
    """Set the dropout probabilities of the modules to 0. The configuration keeps its values for later fine-tuning."""
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for layer in student.base_model.encoder.layers:
        layer.attention.dropout = 0.0


def parameter_groups(
    student: nn.Module,
    learning_rate: float,
    salience_learning_rate: float = SALIENCE_LEARNING_RATE,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer: the salience has its own learning rate; the embeddings are not trained."""
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in student.named_parameters():
        parameter.requires_grad_("embeddings." not in name)
        if parameter.requires_grad:
            groups[name.endswith("salience")].append(parameter)
    return [
        {"params": groups[False], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": groups[True], "lr": salience_learning_rate, "weight_decay": 0.0},
    ]


def _read(
    teacher: PreTrainedModel, modules: SentenceModules, batch: dict[str, torch.Tensor], windows: Windows, states: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the teacher's vectors `[B, d]` and, if `states` is set, its states after every layer `[W, T, d]`."""
    outputs = teacher(**windows.inputs(batch), output_hidden_states=states)
    mean = windows.mean(modules.embed(outputs.last_hidden_state, windows.mask))
    mean = functional.normalize(mean, dim=-1) if modules.normalizes else mean
    return mean, outputs.hidden_states[1:] if states else ()


@torch.no_grad()
def teacher_vectors(
    teacher: PreTrainedModel, modules: SentenceModules, batch: dict[str, torch.Tensor], window: int
) -> torch.Tensor:
    """Return the teacher's vectors `[B, d]`; the vector of a longer text is the mean over windows of `window` tokens.

    Every window has the first and the last token of the text, as the tokenizer adds them to a text.
    """
    windows = split_windows(batch["attention_mask"].bool(), window)
    return _read(teacher, modules, batch, windows, states=False)[0]


def cosines(
    student: nn.Module, modules: SentenceModules, batch: dict[str, torch.Tensor], reference: torch.Tensor
) -> torch.Tensor:
    """Return the cosine similarity `[B]` of the student's vectors and `teacher_vectors`."""
    vectors = modules.embed(student(**batch).last_hidden_state, batch["attention_mask"].bool())
    return functional.cosine_similarity(upcast(vectors), reference, dim=-1)


def embedding_loss(
    teacher: PreTrainedModel,
    student: nn.Module,
    modules: SentenceModules,
    batch: dict[str, torch.Tensor],
    window: int,
    state_weight: float = 0.0,
) -> torch.Tensor:
    """Return 1 - cosine of the vectors of student and teacher, averaged over the texts of a batch.

    Args:
        teacher: the encoder that the student was converted from.
        student: a model from `from_teacher` without a head.
        modules: pooling and normalization of the teacher.
        batch: `input_ids`, `attention_mask` and if the tokenizer returns them `token_type_ids`, `[B, T]`.
        window: longest text that the teacher reads at once; see `teacher_vectors`.
        state_weight: weight of a second term: 1 - cosine of the states of every token after every layer, averaged over
            the tokens of the texts that the teacher reads at once, and over the layers.
    """
    limit = len(Parts(teacher, check_teacher(teacher.config)).positions())
    if not 3 <= window <= limit:
        raise ValueError(f"window={window} must be from 3 to the {limit} positions of the teacher")
    mask = batch["attention_mask"].bool()
    windows = split_windows(mask, window)
    with torch.no_grad():
        reference, teacher_states = _read(teacher, modules, batch, windows, states=state_weight > 0)
    outputs = student(**batch, output_hidden_states=state_weight > 0)
    vectors = modules.embed(outputs.last_hidden_state, mask)
    loss = 1 - functional.cosine_similarity(upcast(vectors), reference, dim=-1).mean()
    single = windows.mask & (windows.counts[windows.owner] == 1)[:, None]
    if state_weight > 0 and single.any():
        rows, columns = windows.owner[:, None].expand_as(single)[single], windows.columns[single]
        layers = zip(outputs.hidden_states[1:], teacher_states, strict=True)
        layers = ((upcast(x[rows, columns]), upcast(y[single])) for x, y in layers)
        similarities = [functional.cosine_similarity(*pair, dim=-1) for pair in layers]
        loss = loss + state_weight * (1 - torch.stack(similarities).mean())
    return loss
