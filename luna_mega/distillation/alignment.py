"""Alignment: train every layer of the student to reproduce the teacher's layer on the teacher's states."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from luna_mega.distillation.families import Parts
from luna_mega.distillation.students import check_pair, match_layers, same_layers
from luna_mega.distillation.teachers import Observed, Teacher, inputs_of
from luna_mega.hub.folder import position_limit
from luna_mega.modeling_common.layout import DenseLayout
from luna_mega.modeling_common.padding_free import PaddingFreeLayout

LAYOUTS = (DenseLayout, PaddingFreeLayout)


@dataclass(frozen=True)
class AlignmentPlan:
    """The pairs of states that alignment compares.

    Args:
        pairs: for each layer, the indices of the teacher's input states and of the target states.
        attention: compare the attention outputs, because the rest of the layer is copied; otherwise compare the layer
            outputs.
        shifts: the teacher has no or fewer positions than the student; add the resulting difference of the embeddings
            to all states of the teacher.
    """

    pairs: list[tuple[int, int]]
    attention: bool
    shifts: bool


def plan_alignment(
    teacher: Teacher, own: Parts, layers: Sequence[int] | None = None, whole: bool = False
) -> AlignmentPlan:
    """Return the alignment plan of a student; `layers` and `whole` as for `align`."""
    matched = match_layers(teacher, own, layers)
    shifts = _adds_positions(teacher, own)
    is_encoder = own.config.model_type == "luna" and not own.config.is_decoder
    adds = "output" in teacher.family.layer  # a Mega combines attention and input with a gate
    if is_encoder and adds and not whole and same_layers(teacher, own):
        return AlignmentPlan([(index, index) for index in matched], attention=True, shifts=shifts)
    ends = [index + 1 for index in matched]
    return AlignmentPlan(list(zip([0, *ends], ends, strict=False)), attention=False, shifts=shifts)


def _adds_positions(teacher: Teacher, own: Parts) -> bool:
    """Return whether a student has positions that its teacher does not have."""
    if own.config.model_type != "luna" or own.config.position_embedding_type == "none":
        return False
    if teacher.config.model_type != "luna" and teacher.module("positions") is None:
        return True
    ours, theirs = position_limit(own.config), teacher.max_length
    return ours is not None and theirs is not None and ours > theirs


def aligned_parameters(teacher: Teacher, student: PreTrainedModel, whole: bool = False) -> list[str]:
    """Return the names of the student's parameters that `align` trains: attentions or layers, and P."""
    own = check_pair(teacher, student)
    attention = "attention." if plan_alignment(teacher, own, whole=whole).attention else ""
    prefixes = [f"{own.family.layers}.{index}.{attention}" for index in range(len(own.layers))]
    prefixes += ["luna.embeddings.packed_"]
    unread = set(map(id, own.model.unread_parameters()))
    names = [name for name, tensor in own.model.named_parameters() if id(tensor) not in unread]
    if own.config.model_type == "luna" and not own.pre_norm:
        # P is passed to the next layer without gradients, so that layers are independent.
        names = [name for name in names if not name.startswith(own.family.layers) or "packed_layer_norm" not in name]
    return [name for name in names if name.startswith(tuple(prefixes))]


def train_only(student: PreTrainedModel, names: Iterable[str] | None) -> list[nn.Parameter]:
    """Enable gradients only for the named parameters of a student and return these; None = all that a loss uses.

    Call it before DDP or FSDP2 wrap the model: they require a gradient for each parameter with `requires_grad`.
    """
    unread = set(map(id, student.unread_parameters()))
    chosen = None if names is None else set(names)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(id(parameter) not in unread and (chosen is None or name in chosen))
    return [parameter for parameter in student.parameters() if parameter.requires_grad]


def align(
    teacher: Teacher,
    student: nn.Module,
    batch: dict[str, Any],
    layers: Sequence[int] | None = None,
    whole: bool = False,
) -> torch.Tensor:
    """Return the alignment loss of each of the student's N layers `[N]`; 0 = equal, 1 = a constant output.

    Each layer receives the teacher's states. If complete layers are aligned, the first one receives the student's
    embeddings. Attention outputs are compared if the rest of the layer is copied, otherwise layer outputs. The loss of
    a layer only has gradients for that layer. The loss of the first layer of a Luna encoder also has gradients for P.
    Padding is ignored.

    The student is called once, so it can be wrapped by DDP or FSDP2. Train `aligned_parameters`.

    Args:
        teacher: the teacher of the student.
        student: model, possibly wrapped.
        batch: `input_ids` `[B, T]`, and `attention_mask` if there is padding.
        layers: as for `copy_weights`.
        whole: compare the outputs of complete layers. Pass the same value to `aligned_parameters`.

    Raises:
        ValueError: If the batch exceeds the length limit of teacher or student, or the student uses gradient
            checkpointing or layerdrop; see also `check_pair` and `match_layers`.
    """
    own = check_pair(teacher, student)
    repeats = any(getattr(module, "gradient_checkpointing", False) for module in own.model.modules())
    if own.model.training and (repeats or getattr(own.config, "layerdrop", 0.0)):
        raise ValueError("align requires one call of every layer; disable gradient checkpointing and layerdrop")
    seen = _Alignment(plan_alignment(teacher, own, layers, whole), own, teacher.show(batch))
    types = "token_type_ids" in batch and bool(own.tensors("token_types"))
    inputs = inputs_of(batch, types)
    nowhere = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    with seen, own.logits_at(None if own.is_classifier else nowhere):
        student(**inputs)
    return torch.stack(seen.losses)


class _Alignment:
    """Hooks on the layers of a student during one call: they replace the inputs and compare the outputs."""

    def __init__(self, plan: AlignmentPlan, own: Parts, observed: Observed):
        self.plan, self.own, self.observed = plan, own, observed
        self.losses, self.handles = [], []

    def __enter__(self):
        for index, layer in enumerate(self.own.layers):
            self.handles.append(layer.register_forward_pre_hook(self.exchange(index)))
            if self.plan.attention:
                self.handles += self.expose_attention(layer)
            self.handles.append(layer.register_forward_hook(self.compare(index)))

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def exchange(self, index: int):
        """Return a hook that passes the teacher's states, and P without gradients, to a layer."""

        def hook(module, args):
            hidden, *others = args
            self.layout = next(arg for arg in others if isinstance(arg, LAYOUTS))
            if index == 0:
                self.shift = (hidden - self.state(0, hidden)).detach() if self.plan.shifts else 0.0
            if index > 0 or self.plan.attention:
                hidden = self.state(self.plan.pairs[index][0], hidden) + self.shift
            if index > 0 and getattr(self.own.config, "contextual_projection", False):
                others[0] = others[0].detach()
            return hidden, *others

        return hook

    def expose_attention(self, layer: nn.Module) -> list:
        """Make a layer return its attention output instead of the tokens.

        The hook runs before the FSDP2 hooks of the layer, which gather the weights for the backward pass of its output.
        """
        outputs = []
        keep = layer.attention.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
        give = layer.register_forward_hook(lambda module, args, output: (outputs.pop(), *output[1:]), prepend=True)
        return [keep, give]

    def compare(self, index: int):
        """Return a hook that adds the loss of a layer."""

        def hook(module, args, output):
            got, target = output[0] if isinstance(output, tuple) else output, self.plan.pairs[index][1]
            if self.plan.attention:
                reference = self.layout.gather(self.observed.attended[target])
            else:
                reference = self.state(target, got) + self.shift
            self.losses.append(_distance(got.float(), reference.float(), self.layout.mask, self.plan.attention))

        return hook

    def state(self, index: int, like: torch.Tensor) -> torch.Tensor:
        return self.layout.gather(self.observed.states[index]).to(like.dtype)


def _distance(got: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor | None, together: bool) -> torch.Tensor:
    """Return the mean square of the difference, relative to the variance of `reference` `[B, T, d]`.

    The variance is computed over all entries together or per token: in pre-norm layers, a few tokens are far larger
    than all others. The result is 0 if no token is kept.
    """
    got, reference = (x.flatten(0, 1) if mask is None else x[mask] for x in (got, reference))
    if not len(got):
        return got.sum()
    if together:
        return (got - reference).square().mean() / reference.var()
    return ((got - reference).square().mean(dim=-1) / reference.var(dim=-1)).mean()
