"""Copying of the weights that have the same role in teacher and student, bit for bit, with a report."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from luna_mega.distillation.families import ATTENTION, Parts, find_family, find_head
from luna_mega.distillation.students import check_pair, match_layers, same_layers
from luna_mega.distillation.teachers import Teacher

_MARK = 0.5  # standard deviations of a table of positions that windows of it are apart
_MODEL_PARTS = ("words", "token_types", "embedding_norm", "embedding_projection", "last_norm", "decoder")


@dataclass
class CopyReport:
    """Record of `copy_weights`, by names of parameters.

    Args:
        copied: student's name -> teacher's name.
        started: student's name -> teacher's name of similar parameters, such as the weight of an RMSNorm for a
            LayerNorm.
        new: parameters of the student without a counterpart.
        left: parameters of the teacher without a counterpart.
    """

    copied: dict[str, str] = field(default_factory=dict)
    started: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{ours} <- {theirs}" for ours, theirs in self.copied.items()]
        lines += [f"{ours} <~ {theirs}" for ours, theirs in self.started.items()]
        lines += [f"new: {name}" for name in self.new] + [f"left: {name}" for name in self.left]
        # Layers have equal lines.
        return "\n".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", line) for line in lines))


def extend_positions(table: torch.Tensor, length: int, how: str = "windows") -> torch.Tensor:
    """Return a table of positions `[length, d]` for a longer (or shorter) input from a learned one `[n, d]`.

    Args:
        table: learned position embeddings `[n, d]`.
        length: number of rows of the result.
        how: `"copy"`: repeat the n rows, as Longformer does with RoBERTa's table; `"windows"`: add a distinct vector
            to each repetition, so that a Luna can distinguish them; `"mirror"`: alternate the direction, so that
            neighbors stay neighbors; `"interpolate"`: stretch the n rows over the length, which also changes the
            positions of short inputs. Except for `"interpolate"`, a shorter table is truncated.

    Raises:
        ValueError: If `how` is unknown, or `length` is less than 1.
    """
    if length < 1:
        raise ValueError(f"`length` must be at least 1, got {length}")
    if how == "interpolate":
        rows = nn.functional.interpolate(table.T[None].float(), size=length, mode="linear", align_corners=True)
        return rows[0].T.to(table.dtype)
    index, size = torch.arange(length, device=table.device), len(table)
    if how == "copy":
        return table[index % size]
    if how == "windows":
        marks = torch.randn(math.ceil(length / size), table.shape[1], generator=torch.Generator().manual_seed(0))
        marks = (_MARK * table.float().std() * marks.to(table.device)).index_fill(0, index[:1], 0.0)
        return table[index % size] + marks.to(table.dtype)[index // size]
    if how == "mirror":
        index = index % (2 * size)
        return table[torch.where(index < size, index, 2 * size - 1 - index)]
    raise ValueError(f"`how` must be 'windows', 'copy', 'mirror' or 'interpolate', got {how!r}")


@torch.no_grad()
def copy_weights(
    teacher: Teacher, student: PreTrainedModel, layers: Sequence[int] | None = None, positions: str = "windows"
) -> CopyReport:
    """Copy the weights that have the same role in teacher and student, and return a report.

    All other weights of the student are unchanged. Copied weights equal the teacher's bit for bit. Biases that the
    teacher does not have become 0, and a single token type is added to the positions of a Luna. From a Luna to a Luna
    and from a Mega to a Mega, weights with equal names are copied: rows of P are averaged over neighbors, and a table
    of relative positions is truncated at both ends.

    Args:
        teacher: the teacher.
        student: Luna or Mega of a compatible size; see `student_config`.
        layers: for each layer of the student, the index of the teacher's layer; None = evenly spaced, including the
            first and the last one.
        positions: method that extends a table of learned positions, see `extend_positions`.

    Raises:
        ValueError: see `check_pair`, `match_layers` and `extend_positions`.
    """
    own = check_pair(teacher, student)
    copier = _Copier(teacher, own, positions)
    matched = match_layers(teacher, own, layers)
    if teacher.config.model_type == own.config.model_type:
        copier.copy_names(matched)
    else:
        copier.copy_parts(matched)
    return copier.finish()


@torch.no_grad()
def copy_encoder(teacher: Teacher, student: PreTrainedModel) -> CopyReport:
    """Copy the weights of an encoder, with any head, into a Luna of the same sizes with the same head."""
    own = Parts(student, find_family(student.config))
    copier = _Copier(teacher, own, "windows")
    copier.copy_parts(list(range(len(own.layers))))
    return copier.finish()


class _Copier:
    def __init__(self, teacher: Teacher, own: Parts, positions: str):
        self.teacher, self.own, self.how, self.report = teacher, own, positions, CopyReport()
        self.ours = {id(parameter): name for name, parameter in own.model.named_parameters()}
        self.used: set[int] = set()

    def copy_parts(self, matched: list[int]):
        """Copy between two families."""
        teacher, own = self.teacher, self.own
        parts = list(_MODEL_PARTS)
        if own.config.model_type == "luna" and teacher.head_activation == own.activation:
            parts += ["head_dense", "head_norm"]
        if find_head(own.model) == find_head(teacher.model) and self.same_classifier():
            parts += ["class_dense", "class_output"]
        for part in parts:
            self.copy_part(part)
        self.copy_positions()
        if not same_layers(teacher, own):
            return
        layer_parts = ["attention_norm", "fc1", "fc2", "final_norm"]
        for index, source in enumerate(matched):
            for part in [*(ATTENTION if own.config.model_type == "luna" else ()), *layer_parts]:
                self.copy_part(part, index, source)

    def same_classifier(self) -> bool:
        config = self.own.config
        return (
            config.classifier_activation == self.teacher.family.class_activation
            and config.classifier_num_layers == 1
            and config.pooling == "cls"
        )

    def copy_part(self, name: str, layer: int | None = None, source: int | None = None):
        """Copy weight and bias of a part that both have."""
        target, tensors = self.own.module(name, layer), self.teacher.tensors(name, source)
        if target is None or not tensors:
            return
        module, kept = self.teacher.module(name, source), self.report.copied
        if name.endswith("norm") and isinstance(module, nn.LayerNorm) != isinstance(target, nn.LayerNorm):
            if not isinstance(target, nn.LayerNorm):
                return
            kept = self.report.started
        given = dict(module.named_parameters(recurse=False))
        words = self.own.module("words").weight
        for key, parameter in target.named_parameters(recurse=False):
            if name == "decoder" and parameter is words:  # already copied, or another one in the teacher
                continue
            tensor = tensors.get(key)
            if tensor is None and key == "bias":
                parameter.zero_()
                kept[self.ours[id(parameter)]] = "0"
            elif tensor is not None and tensor.shape == parameter.shape:
                parameter.copy_(tensor)
                kept[self.ours[id(parameter)]] = f"{self.teacher.path(name, source)}.{key}"
                self.used.add(id(given[key]))

    def copy_positions(self):
        table, target = self.teacher.positions(), self.own.module("positions")
        if table is None or target is None:
            return
        source = self.teacher.module("positions").weight
        name, first = f"{self.teacher.path('positions')}.weight", len(source) - len(table)
        name += f"[{first}:]" if first else ""
        types = self.teacher.module("token_types")
        if types is not None and self.own.module("token_types") is None:
            table, name = table + types.weight[0], f"{name} + {self.teacher.path('token_types')}.weight[0]"
            self.used.add(id(types.weight))
        offset = self.own.config.position_offset
        rows = len(target.weight) - offset
        target.weight[offset:] = table if rows == len(table) else extend_positions(table, rows, self.how)
        self.report.copied[self.ours[id(target.weight)]] = name
        self.used.add(id(source))

    def copy_names(self, matched: list[int]):
        """Copy within a family, by equal names."""
        theirs = dict(self.teacher.model.named_parameters()) | dict(self.teacher.model.named_buffers())
        targets = dict(self.own.model.named_parameters()) | dict(self.own.model.named_buffers())
        layer = re.compile(rf"^{re.escape(self.own.family.layers)}\.(\d+)\.")
        for name, target in targets.items():
            source = layer.sub(lambda match: f"{self.teacher.family.layers}.{matched[int(match[1])]}.", name)
            if source in theirs and (tensor := self.fit(name, theirs[source].detach(), target.shape)) is not None:
                target.copy_(tensor)
                self.report.copied[name] = source
                self.used.add(id(theirs[source]))

    def fit(self, name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """Return the tensor converted to this shape; None if that is impossible."""
        if tensor.shape == shape:
            return tensor
        last = name.rpartition(".")[2]
        if name == f"{self.own.path('positions')}.weight":
            offset = self.own.config.position_offset
            return torch.cat([tensor[:offset], extend_positions(tensor[offset:], shape[0] - offset, self.how)])
        if last == "packed_embeddings" and tensor.dim() == len(shape):
            rows = nn.functional.adaptive_avg_pool1d(tensor.transpose(-1, -2), shape[-2]).transpose(-1, -2)
            return rows if rows.shape == shape else None
        if last == "rel_pos_bias" and shape[0] < len(tensor):
            start = (len(tensor) - shape[0]) // 2
            return tensor[start : start + shape[0]]
        return None

    def finish(self) -> CopyReport:
        report = self.report
        report.new = [name for name in self.ours.values() if name not in report.copied | report.started]
        report.left = [name for name, tensor in self.teacher.model.named_parameters() if id(tensor) not in self.used]
        return report
