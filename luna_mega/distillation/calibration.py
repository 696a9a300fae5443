"""Calibration in closed form: row r of the packed sequence P of a Luna packs the r-th range of positions.

Each head of the row packs a part of that range: one position if the range has no more positions than heads.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from luna_mega.distillation.alignment import AlignmentPlan, align, plan_alignment
from luna_mega.distillation.families import Parts, find_family
from luna_mega.distillation.students import check_pair
from luna_mega.distillation.teachers import Teacher, inputs_of, positions_of
from luna_mega.errors import reason
from luna_mega.modeling_common.labels import next_tokens
from luna_mega.modeling_common.layout import DenseLayout
from luna_mega.modeling_common.masks import drop_if_full

_BOUND = 0.99  # largest target of tanh in a Mega's head
_LEAST_FACTOR, _MARGIN = 1e-4, 1e-2  # smallest factor of the last norm, for gradients; nats
_ROWS = 1024  # number of states that are compared with all parts at a time, and number of logits


@dataclass
class _Sample:
    """A batch: tokens, positions and mask `[B, T]`, and the inputs of all layers `[B, T, d]`."""

    ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    states: list[torch.Tensor]


class _Discriminant:
    """Linear discriminant analysis (Fisher 1936) of states by part, accumulated over batches in float64."""

    def __init__(self, count: int):
        self.count, self.numbers, self.sums, self.gram = count, 0.0, 0.0, 0.0

    def add(self, states: torch.Tensor, parts: torch.Tensor):
        """Add states `[M, d]` and their parts `[M]`."""
        states = states.double()
        self.numbers = self.numbers + parts.bincount(minlength=self.count).double()
        self.sums = self.sums + states.new_zeros(self.count, states.shape[1]).index_add_(0, parts, states)
        self.gram = self.gram + states.T @ states

    def solve(self, size: int, ridge: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weight `[size, d]` and bias `[size]` of the codes of states, and the codes of the means `[N, size]`.

        The codes of a part have unit variance, and the `size` directions maximize the distance of the means.
        """
        numbers, total = self.numbers[:, None], self.numbers.sum()
        mean, means = self.sums.sum(dim=0) / total, self.sums / numbers.clamp(min=1)
        scatter = (self.gram - (numbers * means).T @ means) / total
        scatter = scatter + ridge * self.gram.diagonal().mean() / total * torch.eye(len(mean)).to(scatter)
        factor = torch.linalg.cholesky(scatter)
        apart = torch.linalg.solve_triangular(factor, ((means - mean) * (numbers > 0)).T, upper=False)
        directions, lengths, _ = torch.linalg.svd(apart * self.numbers.sqrt(), full_matrices=False)
        directions = (directions * (lengths > 1e-6 * lengths[0]))[:, :size]  # the others are noise
        directions = nn.functional.pad(directions, (0, size - directions.shape[1]))
        weight = torch.linalg.solve_triangular(factor.T, directions, upper=True).T
        return weight, -weight @ mean, apart.T @ directions


class _Ridge:
    """Ridge regression from rows `[M, d]` to rows `[M, k]`, accumulated over batches in float64."""

    def __init__(self, ridge: float):
        self.ridge, self.gram, self.moment, self.square = ridge, 0.0, 0.0, 0.0
        self.rows, self.total = 0, 0.0

    def add(self, x: torch.Tensor, y: torch.Tensor):
        x, y = nn.functional.pad(x.double(), (0, 1), value=1.0), y.double()
        self.gram, self.moment = self.gram + x.T @ x, self.moment + x.T @ y
        self.square, self.total = self.square + y.square().sum(), self.total + y.sum(dim=0)
        self.rows += len(y)

    def write(self, linear: nn.Linear) -> float:
        """Write the solution to a linear layer, and return the share of the variance that it explains."""
        penalty = self.ridge * self.gram.diagonal().mean() * torch.eye(len(self.gram)).to(self.gram)
        weight = torch.linalg.solve(self.gram + penalty, self.moment)
        linear.weight.copy_(weight[:-1].T)
        linear.bias.copy_(weight[-1])
        error = self.square - 2 * (weight * self.moment).sum() + (weight * (self.gram @ weight)).sum()
        return 1.0 - (error / (self.square - self.total.square().sum() / self.rows)).item()


@contextmanager
def _solvable() -> Iterator[None]:
    """Raise a ValueError if a linear system has no solution, which happens if states overflow."""
    try:
        yield
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            f"calibration failed, because the teacher's states are too large or constant ({reason(error)}); check the "
            "teacher, raise `ridge`, or skip calibration"
        ) from error


@_solvable()
@torch.no_grad()
def calibrate(
    teacher: Teacher,
    student: PreTrainedModel,
    batches: Iterable[dict[str, Any]],
    layers: Sequence[int] | None = None,
    gain: float | None = None,
    ridge: float = 1e-2,
) -> list[float]:
    """Initialize the pack attention of a Luna encoder, or the dense layer of a Mega's masked-LM head, in closed form.

    The positions are divided into ranges with about equally many tokens, one for each row of P, and each range into
    parts, one for each pack head. The pack keys are the linear map of the teacher's states that separates the parts
    best (linear discriminant analysis), the pack queries select the parts, and the pack values are the states. If P has
    a row for each position and the states identify all positions, the student equals the teacher.

    Args:
        teacher: Teacher of the student.
        student: Luna or Mega to calibrate, after `copy_weights`.
        batches: Batches with `input_ids` `[B, T]` and `attention_mask`. The states of all layers are kept in memory.
        layers: As for `copy_weights`.
        gain: Difference of the scores of a head between its own part and others, whose tokens have about exp(-gain) of
            the weight. If parts are single positions, the next best one counts, and the default is 12; else the mean of
            the others, and the default is 6. Higher values weight the tokens of a part less evenly.
        ridge: Strength of the regularization relative to the mean square of the states; the only option for a Mega.

    Returns:
        For each layer, the share of the tokens whose part the states identify, which is not the accuracy of the
        attention, see `calibration_error`. For a Mega, the explained share of the variance of the head's output.

    Raises:
        ValueError: The student has no pack attention, or tied keys and values; an option is out of range, or the
            batches have no tokens; see also `check_pair` and `match_layers`.
    """
    own, batches = check_pair(teacher, student), list(batches)
    _check_student(teacher, own)
    _check_options(gain, ridge)
    if not any(inputs_of(batch, token_types=False)["attention_mask"].any() for batch in batches):
        raise ValueError("calibrate requires at least one batch with tokens that are not padding")
    if own.config.model_type == "mega":
        return [_calibrate_head(teacher, own, batches, ridge)]
    was_training = own.model.training
    own.model.eval()
    plan = plan_alignment(teacher, own, layers)
    samples = [_sample(teacher, own, plan, batch) for batch in batches]
    span = 1 + max(int(sample.positions[sample.kept].max()) for sample in samples if sample.kept.any())
    rows, heads = min(own.config.projection_length, span), own.config.num_pack_attention_heads
    tokens = sum(sample.positions[sample.kept].bincount(minlength=span) for sample in samples)
    cut, of_heads = (table.to(tokens.device) for table in _cut(tokens.tolist(), rows, heads))
    parts, sizes = [cut[sample.positions[sample.kept]] for sample in samples], cut.bincount()
    codes = [_solve_keys(own, index, samples, parts, len(sizes), ridge) for index in range(len(own.layers))]
    alone = bool(sizes.min() == 1)
    gain = gain or (12.0 if alone else 6.0)
    queries = [_queries(code, gain, alone)[of_heads].flatten(1) for code, _ in codes]
    _begin_packed(own, queries)
    _solve_queries(own, samples, queries)
    own.model.train(was_training)
    return [told for _, told in codes]


@torch.no_grad()
def calibration_error(
    teacher: Teacher, student: PreTrainedModel, batch: dict[str, Any], layers: Sequence[int] | None = None
) -> list[float]:
    """Return the relative error of the attention output of every layer of a Luna encoder, on the teacher's states.

    It is the root of the mean square of the difference, relative to the standard deviation of the teacher's output: 0
    if both are equal, 1 for a constant. Use a batch that `calibrate` has not read. If the other weights of the layers
    are not copied, it is the error of the output of the layer.
    """
    was_training = student.training
    student.eval()
    errors = align(teacher, student, batch, layers).sqrt().tolist()
    student.train(was_training)
    return errors


@torch.no_grad()
def scale_logits(student: PreTrainedModel, batch: dict[str, Any]) -> float:
    """Scale the last norm of a causal student whose loss exceeds the loss of uniform predictions; return the factor.

    The copied head reads random states if the layers are not copied. The factor minimizes the loss on the first 1,024
    predictions of the batch. The loss is a convex function of the factor, and the factor 0 gives uniform predictions.
    Call it after alignment and before distillation.
    """
    own = Parts(student, find_family(student.config))
    norm, was_training = own.module("last_norm"), student.training
    if norm is None:
        return 1.0
    inputs = inputs_of(batch, token_types=False)
    targets = next_tokens(inputs["input_ids"], None, inputs["attention_mask"].bool())
    places = targets != -100
    places &= places.flatten().cumsum(dim=0).view_as(places) <= _ROWS
    with own.logits_at(places):
        logits = student.eval()(**inputs).logits.float()
    student.train(was_training)
    targets, right = targets[places], logits.gather(1, targets[places][:, None])[:, 0].mean()
    if nn.functional.cross_entropy(logits, targets) <= math.log(logits.shape[1]) + _MARGIN:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(30):  # bisection of the derivative
        middle = (low + high) / 2
        slope = ((middle * logits).softmax(dim=1) * logits).sum(dim=1).mean() - right
        low, high = (low, middle) if slope > 0 else (middle, high)
    factor = max(low, _LEAST_FACTOR)
    for parameter in norm.parameters(recurse=False):
        parameter.mul_(factor)
    return factor


def _cut(tokens: list[int], rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide positions, with their numbers of `tokens`, into ranges of equal tokens, and ranges into parts.

    Returns:
        The part of each position `[T]`, and the part that each head of a row packs `[rows, heads]`.
    """
    parts, of_heads, start, left = [], [], 0, sum(tokens)
    for behind in reversed(range(rows)):
        end, held = start + 1, tokens[start]
        # A tolerance of a tenth of a position, so that blocks of similar lengths are divided evenly.
        while end + behind < len(tokens) and (not behind or held + 0.9 * tokens[end] <= left / (behind + 1)):
            end, held = end + 1, held + tokens[end]
        size, first = end - start, parts[-1] + 1 if parts else 0
        cuts = min(heads, size)
        parts += [first + place * cuts // size for place in range(size)]
        of_heads.append([first + head * cuts // heads for head in range(heads)])
        start, left = end, left - held
    return torch.tensor(parts), torch.tensor(of_heads)


def _solve_keys(
    own: Parts, index: int, samples: list[_Sample], parts: list[torch.Tensor], count: int, ridge: float
) -> tuple[torch.Tensor, float]:
    """Write pack key and value of a layer, equal for all heads; return the codes `[N, K]` and their accuracy."""
    attention, heads = own.layers[index].attention, own.config.num_pack_attention_heads
    analysis = _Discriminant(count)
    states = [_normed(own, index, sample.states[index])[sample.kept] for sample in samples]
    for rows, places in zip(states, parts, strict=True):
        analysis.add(rows, places)
    weight, bias, codes = analysis.solve(own.config.hidden_size // heads, ridge)
    offset = codes.square().sum(dim=1) / 2
    right = [
        ((some.double() @ weight.T + bias) @ codes.T - offset).argmax(dim=1) == places
        for rows, here in zip(states, parts, strict=True)
        for some, places in zip(rows.split(_ROWS), here.split(_ROWS), strict=True)
    ]
    size = codes.square().mean().sqrt().clamp(min=1e-9)  # the scale of other activations
    attention.pack_key.weight.copy_((weight / size).repeat(heads, 1))
    attention.pack_key.bias.copy_((bias / size).repeat(heads))
    nn.init.eye_(attention.pack_value.weight)
    nn.init.zeros_(attention.pack_value.bias)
    return codes / size, torch.cat(right).double().mean().item()


def _normed(own: Parts, index: int, states: torch.Tensor, packed: bool = False) -> torch.Tensor:
    """Return the inputs of the attention of a layer: tokens, or P."""
    layer = own.layers[index]
    norm = layer.packed_layer_norm if packed else layer.attention_layer_norm
    return norm(states) if own.pre_norm else states


def _queries(codes: torch.Tensor, gain: float, alone: bool) -> torch.Tensor:
    """Return a query with the gain for each part `[N, K]`; `alone`: parts are single positions.

    The candidates are between the codes of the parts, which are best against noise, and their least-squares inverse,
    which is best against similar parts.
    """
    gram = codes.T @ codes
    unit = gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    candidates = []
    for share in (1e-2, 1e-1, 1.0, 10.0, 1e3):
        queries = torch.linalg.solve(gram + share * unit + 1e-9 * torch.eye(len(gram)).to(gram), codes.T).T
        own = (queries * codes).sum(dim=1)
        if alone:
            blocks = torch.arange(len(codes), device=codes.device).split(_ROWS)
            others = ((queries[rows] @ codes.T).scatter(1, rows[:, None], -torch.inf) for rows in blocks)
            other = torch.cat([scores.amax(dim=1) for scores in others])
        else:
            other = (queries @ codes.sum(dim=0) - own) / max(1, len(codes) - 1)
        margin = own - other.clamp(max=0.9 * own)  # limits the norm of similar codes
        queries = queries / margin.clamp(min=1e-12)[:, None]
        candidates.append((queries.norm(dim=1).mean().item(), queries))
    return math.sqrt(codes.shape[1]) * gain * min(candidates, key=lambda pair: pair[0])[1]


def _begin_packed(own: Parts, queries: list[torch.Tensor]):
    """Initialize P with rows of equal norm, from which linear maps compute the queries of all layers."""
    table, together = own.model.luna.embeddings.packed_embeddings, torch.cat(queries, dim=1)
    basis, lengths, _ = torch.linalg.svd(together, full_matrices=False)
    basis = (basis * lengths)[:, : table.shape[-1]]
    rows = math.sqrt(table.shape[-1]) * nn.functional.normalize(basis, dim=1)
    table.zero_()
    table[..., : rows.shape[0], : rows.shape[1]] = rows.to(table)


def _solve_queries(own: Parts, samples: list[_Sample], queries: list[torch.Tensor]):
    """Write the pack queries `[L, d]` of all layers, whose input is the P of the previous layer."""
    embeddings, states = own.model.luna.embeddings, []
    for sample in samples:
        layout, words = DenseLayout(drop_if_full(sample.kept)), embeddings.word_embeddings(sample.ids)
        packed, used = embeddings(words, layout, sample.positions, with_packed=True)[1]
        used = torch.ones_like(packed[0][..., 0], dtype=torch.bool) if used is None else used
        states.append((layout, packed, used))
    for index, layer in enumerate(own.layers):
        solved, wanted = _Ridge(1e-6), queries[index]
        for _, packed, used in states:
            rows = _normed(own, index, packed[index % len(packed)], packed=True)
            target = nn.functional.pad(wanted, (0, 0, 0, max(0, rows.shape[1] - len(wanted))))[: rows.shape[1]]
            solved.add(rows[used], target.expand(len(rows), -1, -1)[used])
        solved.write(layer.attention.pack_query)
        if own.config.contextual_projection:
            for sample, (layout, packed, used) in zip(samples, states, strict=True):
                packed[0] = layer(sample.states[index], packed[0], layout, drop_if_full(used))[1]


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
        raise ValueError(f"{type(own.model).__name__} has no pack attention; skip calibration and align its layers")
    if own.config.tie_key_value:
        raise ValueError("calibration requires keys that differ from values; set tie_key_value=False")


def _check_options(gain: float | None, ridge: float):
    for name, value in (("gain", gain), ("ridge", ridge)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value} is out of range; it must be a number above 0")


def _sample(teacher: Teacher, own: Parts, plan: AlignmentPlan, batch: dict[str, Any]) -> _Sample:
    inputs, embeddings = inputs_of(batch, token_types=False), own.model.luna.embeddings
    ids, kept = inputs["input_ids"], inputs["attention_mask"].bool()
    positions, states = positions_of(kept), teacher.show(batch).states
    first, _ = embeddings(
        embeddings.word_embeddings(ids), DenseLayout(drop_if_full(kept)), positions, with_packed=False
    )
    shift = first - states[0].to(first.dtype) if plan.shifts else 0.0
    return _Sample(ids, positions, kept, [states[index].to(first.dtype) + shift for index, _ in plan.pairs])
