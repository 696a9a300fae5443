"""Alignment: every layer of the student learns what the teacher's does on the teacher's own states."""

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
from luna_mega.modeling_common.sharding import ShardedLayout

LAYOUTS = (DenseLayout, PaddingFreeLayout, ShardedLayout)


@dataclass(frozen=True)
class AlignmentPlan:
    """The pairs of states that alignment compares.

    Args:
        pairs: for each layer the index of the teacher's states that it reads, and of the states it should return.
        attention: whether it should return the teacher's attention output, as the rest of the layer is copied; else
            it returns the states behind the teacher's layer.
        shifts: the student's positions differ from the teacher's, which has none or fewer; what this makes in the
            embeddings is added to all these states.
    """

    pairs: list[tuple[int, int]]
    attention: bool
    shifts: bool


def plan_alignment(
    teacher: Teacher, own: Parts, layers: Sequence[int] | None = None, whole: bool = False
) -> AlignmentPlan:
    """Return what the layers of a student are aligned with; `layers` and `whole` as for `align`."""
    matched = match_layers(teacher, own, layers)
    shifts = _adds_positions(teacher, own)
    is_encoder = own.config.model_type == "luna" and not own.config.is_decoder
    adds = "output" in teacher.family.layer  # a Mega mixes its attention into the input, by a gate
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
    """Return the names of the student's parameters that `align` has gradients for: attentions or layers, and P."""
    own = check_pair(teacher, student)
    attention = "attention." if plan_alignment(teacher, own, whole=whole).attention else ""
    prefixes = [f"{own.family.layers}.{index}.{attention}" for index in range(len(own.layers))]
    prefixes += ["luna.embeddings.packed_"]
    unread = set(map(id, own.model.unread_parameters()))
    names = [name for name, tensor in own.model.named_parameters() if id(tensor) not in unread]
    if own.config.model_type == "luna" and not own.pre_norm:
        # P goes on to the next layer without gradients, so that layers are independent.
        names = [name for name in names if not name.startswith(own.family.layers) or "packed_layer_norm" not in name]
    return [name for name in names if name.startswith(tuple(prefixes))]


def train_only(student: PreTrainedModel, names: Iterable[str] | None) -> list[nn.Parameter]:
    """Let gradients reach the named parameters of a student alone, and return them; None = all that a loss reads.

    DDP and FSDP2 ask for it: each parameter that requires a gradient must get one. Call it before they wrap the model.
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
    """Return for each of the student's N layers how far it is from the teacher's, `[N]`; 0 = equal, 1 = a constant.

    Each layer reads the teacher's states and none of the student's, but for the first of layers that are aligned as a
    whole, which reads the student's embeddings. Where the rest of the layer is copied, it is the attention outputs that
    are compared, else what leaves the layer. The loss of a layer has gradients for that layer alone (of a Luna encoder
    the first one's also for P). Padding counts nowhere.

    The student is called once, as a whole, so that it may be wrapped by DDP or FSDP2. Train `aligned_parameters`.

    Args:
        student: a model, maybe wrapped.
        batch: `input_ids` `[B, T]`, and `attention_mask` where there is padding.
        layers: as for `copy_weights`.
        whole: compare what leaves the layer everywhere, and give the same to `aligned_parameters`.

    Raises:
        ValueError: the batch is longer than teacher or student read, or the student has gradient checkpointing or
            layerdrop; see also `check_pair` and `match_layers`.
    """
    own = check_pair(teacher, student)
    repeats = any(getattr(module, "gradient_checkpointing", False) for module in own.model.modules())
    if own.model.training and (repeats or getattr(own.config, "layerdrop", 0.0)):
        raise ValueError("align runs every layer once: turn gradient checkpointing and layerdrop off")
    seen = _Alignment(plan_alignment(teacher, own, layers, whole), own, teacher.show(batch))
    types = "token_type_ids" in batch and bool(own.tensors("token_types"))
    inputs = inputs_of(batch, types)
    nowhere = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    with seen, own.logits_at(None if own.is_classifier else nowhere):
        student(**inputs)
    return torch.stack(seen.losses)


class _Alignment:
    """Hooks on the layers of a student, while it runs once: they exchange what goes in and compare what comes out."""

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
        """Return a hook that lets a layer read the teacher's states, and P without gradients."""

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
        """Let a layer return its attention's output in place of the tokens.

        The output has to leave through the layer, whose hooks of FSDP2 then gather its weights for the backward pass:
        therefore this hook goes before those.
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
                want = self.layout.gather(self.observed.attended[target])
            else:
                want = self.state(target, got) + self.shift
            self.losses.append(_distance(got.float(), want.float(), self.layout.mask, self.plan.attention))

        return hook

    def state(self, index: int, like: torch.Tensor) -> torch.Tensor:
        return self.layout.gather(self.observed.states[index]).to(like.dtype)


def _distance(got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor | None, together: bool) -> torch.Tensor:
    """Return the mean square of the difference, relative to the variance of `want` `[B, T, d]`.

    The variance is taken over all entries together, or for each token by itself: in states of layers that begin with
    a norm, a few tokens are far larger than all others. Where no token is kept, it is 0.
    """
    got, want = (x.flatten(0, 1) if mask is None else x[mask] for x in (got, want))
    if not len(got):
        return got.sum()
    if together:
        return (got - want).square().mean() / want.var()
    return ((got - want).square().mean(dim=-1) / want.var(dim=-1)).mean()
