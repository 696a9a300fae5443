"""Calibration in closed form: row r of a Luna's P packs the r-th stretch of the positions, before any training."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from luna_mega.distillation.alignment import AlignmentPlan, plan_alignment
from luna_mega.distillation.families import Parts
from luna_mega.distillation.students import check_pair
from luna_mega.distillation.teachers import Teacher, inputs_of, positions_of
from luna_mega.modeling_common.layout import TokenLayout
from luna_mega.modeling_common.masks import drop_if_full

_BOUND = 0.99  # of tanh in a Mega's head


@dataclass
class _Sample:
    """A batch: inputs of all layers `[B, T, d]`, positions and kept tokens `[B, T]`, and P `[B, L, d]` with its mask.

    P is one tensor, or one for every layer where it is not contextual.
    """

    states: list[torch.Tensor]
    positions: torch.Tensor
    kept: torch.Tensor
    packed: list[torch.Tensor]
    used: torch.Tensor


class _Ridge:
    """Ridge regression from rows `[M, d]` to rows `[M, k]`, summed up batch by batch in float64."""

    def __init__(self, ridge: float):
        self.ridge, self.gram, self.moment, self.square = ridge, 0.0, 0.0, 0.0
        self.rows, self.total = 0, 0.0

    def add(self, x: torch.Tensor, y: torch.Tensor):
        x, y = nn.functional.pad(x.double(), (0, 1), value=1.0), y.double()
        self.gram, self.moment = self.gram + x.T @ x, self.moment + x.T @ y
        self.square, self.total, self.rows = (
            self.square + y.square().sum(),
            self.total + y.sum(dim=0),
            self.rows + len(y),
        )

    def write(self, linear: nn.Linear) -> float:
        """Write the map into a linear layer, and return the share of the variance that it explains."""
        penalty = self.ridge * self.gram.diagonal().mean() * torch.eye(len(self.gram)).to(self.gram)
        weight = torch.linalg.solve(self.gram + penalty, self.moment)
        linear.weight.copy_(weight[:-1].T)
        linear.bias.copy_(weight[-1])
        error = self.square - 2 * (weight * self.moment).sum() + (weight * (self.gram @ weight)).sum()
        return 1.0 - (error / (self.square - self.total.square().sum() / self.rows)).item()


@torch.no_grad()
def calibrate(
    teacher: Teacher,
    student: PreTrainedModel,
    batches: Iterable[dict[str, Any]],
    layers: Sequence[int] | None = None,
    span: int | None = None,
    gain: float = 6.0,
    base: float = 100.0,
    ridge: float = 1e-2,
) -> list[float]:
    """Let row r of P pack the r-th stretch of the positions, in every layer of a Luna encoder; nothing is trained.

    Of a Mega that predicts masked tokens it is the dense layer of the head that is solved for: from the teacher's last
    states it reads what the teacher's head gives to the words, which are copied.

    The pack keys become the codes (sines and cosines) of positions that ridge regression reads from the teacher's
    hidden states, the pack queries the codes of the middles of the stretches, and the pack values the states
    themselves. P begins as those codes. With one row for each position and a large gain, P is the sequence itself.

    Args:
        batches: a few, with `input_ids` `[B, T]` and `attention_mask`; padding is left out. The states of all layers
            are kept for all of them.
        layers: as for `copy_weights`, which comes first.
        span: positions that the rows of P share; None = the length of the longest batch.
        gain: the score of a row at the middle of its stretch: the larger it is, the sharper a row reads.
        base: ratio of the shortest and the longest wave of the codes.
        ridge: strength of the regression, as a share of the mean square of the states. A Mega has no other option.

    Returns:
        For every layer the share of the variance of the codes that its states explain, 1 at best. A low one says that
        the rows cannot tell positions apart, and that alignment has to do the work. Of a Mega one share, of the head.

    Raises:
        ValueError: the student packs nothing, or has tied keys and values; an option is out of range, or the batches
            have no tokens; see also `check_pair` and `match_layers`.
    """
    own, batches = check_pair(teacher, student), list(batches)
    _check_student(teacher, own)
    _check_options(span, gain, base, ridge)
    if not any(inputs_of(batch, token_types=False)["attention_mask"].any() for batch in batches):
        raise ValueError("calibrate needs at least one batch with tokens that are no padding")
    if own.config.model_type == "mega":
        return [_calibrate_head(teacher, own, batches, ridge)]
    was_training = own.model.training
    own.model.eval()
    plan, embeddings = plan_alignment(teacher, own, layers), own.model.luna.embeddings
    heads, count = own.config.num_pack_attention_heads, own.config.projection_length
    span = span or max(batch["input_ids"].shape[1] for batch in batches)
    middles = (torch.arange(count, device=embeddings.packed_embeddings.device) + 0.5) * span / count - 0.5

    def codes(positions: torch.Tensor) -> torch.Tensor:
        return _codes(positions, own.config.hidden_size // heads, base).repeat(1, heads)

    rows = codes(middles)
    embeddings.packed_embeddings.copy_(rows)
    samples = [_sample(teacher, own, plan, batch) for batch in batches]
    scale = 2 * gain / math.sqrt(own.config.hidden_size // heads)
    explained = [_calibrate_layer(own, index, samples, codes, scale * rows, ridge) for index in range(len(own.layers))]
    own.model.train(was_training)
    return explained


def _calibrate_layer(
    own: Parts, index: int, samples: list[_Sample], codes: Callable, rows: torch.Tensor, ridge: float
) -> float:
    """Write the pack projections of a layer, and bring P of the samples to the next one."""
    layer, keys, queries = own.layers[index], _Ridge(ridge), _Ridge(1e-6)
    for sample in samples:
        states, packed = sample.states[index], sample.packed[index % len(sample.packed)]
        if own.pre_norm:
            states, packed = layer.attention_layer_norm(states), layer.packed_layer_norm(packed)
        keys.add(states[sample.kept], codes(sample.positions[sample.kept]))
        queries.add(packed[sample.used], rows[: packed.shape[1]].expand_as(packed)[sample.used])
    explained = keys.write(layer.attention.pack_key)
    queries.write(layer.attention.pack_query)
    nn.init.eye_(layer.attention.pack_value.weight)
    nn.init.zeros_(layer.attention.pack_value.bias)
    if own.config.contextual_projection:
        for sample in samples:
            layout = TokenLayout(drop_if_full(sample.kept))
            sample.packed = [layer(sample.states[index], sample.packed[0], layout, drop_if_full(sample.used))[1]]
    return explained


def solves_head(teacher: Teacher, own: Parts) -> bool:
    """Return whether a student is a Mega with a dense layer in its head, and the teacher has one too."""
    has_dense = own.config.model_type == "mega" and own.module("head_dense") is not None
    return has_dense and teacher.config.model_type != "mega" and teacher.module("head_dense") is not None


def _calibrate_head(teacher: Teacher, own: Parts, batches: list[dict[str, Any]], ridge: float) -> float:
    """Write the dense layer of a Mega's head, whose output goes through tanh."""
    solved, norm = _Ridge(ridge), teacher.module("last_norm")
    head, activation = (teacher.module("head_dense"), teacher.module("head_norm")), ACT2FN[teacher.head_activation]
    for batch in batches:
        kept = inputs_of(batch, token_types=False)["attention_mask"].bool()
        states = teacher.show(batch).states[-1][kept]
        states = states if norm is None else norm(states)
        wanted = head[1](activation(head[0](states)))
        solved.add(states, wanted.float().clamp(-_BOUND, _BOUND).atanh())
    return solved.write(own.module("head_dense"))


def _check_student(teacher: Teacher, own: Parts):
    if solves_head(teacher, own):
        return
    if own.config.model_type != "luna" or own.config.is_decoder:
        raise ValueError(
            f"{type(own.model).__name__} packs nothing, so that there is nothing to calibrate: align its layers at once"
        )
    if own.config.tie_key_value:
        raise ValueError("keys that are values too cannot be codes of positions: set tie_key_value=False")


def _check_options(span: int | None, gain: float, base: float, ridge: float):
    fits = {"span": span is None or span >= 1, "gain": gain > 0, "base": base >= 1, "ridge": ridge >= 0}
    if wrong := [name for name, fit in fits.items() if not fit]:
        values = ", ".join(map(str, (span, gain, base, ridge)))
        raise ValueError(
            f"{wrong[0]} is out of range in span, gain, base, ridge = {values}: span and base are at least 1, gain is "
            "above 0 and ridge at least 0"
        )


def _codes(positions: torch.Tensor, size: int, base: float) -> torch.Tensor:
    """Return sines and cosines `[..., size]` of positions `[...]`."""
    half = size // 2
    frequency = torch.exp(torch.arange(half, device=positions.device) * (-math.log(base) / max(1, half - 1)))
    angle = positions[..., None].float() * frequency
    return nn.functional.pad(torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2), (0, size % 2))


def _sample(teacher: Teacher, own: Parts, plan: AlignmentPlan, batch: dict[str, Any]) -> _Sample:
    inputs, embeddings = inputs_of(batch, token_types=False), own.model.luna.embeddings
    kept = inputs["attention_mask"].bool()
    positions = positions_of(kept)
    words = embeddings.word_embeddings(inputs["input_ids"])
    first, (packed, used) = embeddings(words, TokenLayout(drop_if_full(kept)), positions, with_packed=True)
    used = torch.ones_like(packed[0][..., 0], dtype=torch.bool) if used is None else used
    shown = teacher.show(batch).states
    shift = first - shown[0].to(first.dtype) if plan.shifts else 0.0
    return _Sample([shown[index].to(first.dtype) + shift for index, _ in plan.pairs], positions, kept, packed, used)
