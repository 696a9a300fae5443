"""Tensor parallelism: the styles that the plans of both models need beside those of transformers, and their checks.

A `base_model_tp_plan` names modules and the style in which transformers splits each over the ranks. A linear layer has
a style of transformers' own. Where tensors pass from whole to split between two layers, models have a `RankBoundary`.
"""

import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers.integrations.tensor_parallel import ParallelInterface, TensorParallelLayer
from transformers.modeling_utils import PreTrainedModel


class RankBoundary(nn.Identity):
    """A place where tensor parallelism changes how a tensor is spread over the ranks; in one process it does nothing.

    `ranks` is the number of ranks that it is spread over.
    """

    ranks = 1

    def join_heads(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        """Return attention weights `[B, heads, ...]` of all heads; in one process the tensor itself, for its gradient.

        None stays None. The boundary is one that joins `[..., heads, K]`.
        """
        if weights is None or self.ranks == 1:
            return weights
        return self(weights.movedim(1, -2)).movedim(-2, 1)


class Redistribute(TensorParallelLayer):
    """Take a tensor from one placement to another, and bring its gradient back.

    Args:
        source, target: how the ranks hold the tensor before and after.
        gradient: how they hold the gradient that comes back; None = as `target`.
    """

    def __init__(self, source: Placement, target: Placement, gradient: Placement | None = None):
        self.source, self.target, self.gradient = source, target, gradient and [gradient]

    def install_forward(self, module: RankBoundary, mesh: DeviceMesh) -> RankBoundary:
        module.ranks = mesh.size()
        return super().install_forward(module, mesh)

    def transform_output_post_forward(self, module, output, mesh):
        if self.source == self.target and not output.requires_grad:
            return output
        spread = DTensor.from_local(output, mesh, [self.source], run_check=False)
        return spread.redistribute(placements=[self.target]).to_local(grad_placements=self.gradient)


STYLES = {
    # [..., heads of this rank, K] -> [..., heads, K]
    "luna_all_heads": Redistribute(Shard(-2), Replicate()),
    # [..., columns] -> [..., columns of this rank]
    "mega_own_columns": Redistribute(Replicate(), Shard(-1)),
    # Every rank has the whole tensor and uses it for its own columns, and so for a part of the gradient.
    "mega_whole": Redistribute(Replicate(), Replicate(), gradient=Partial()),
}
for _name, _style in STYLES.items():
    ParallelInterface.register(_name, _style)


def known_rules(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """Return the rules of `plan` for linear layers, embeddings and boundaries that the model has.

    One plan serves encoders and decoders, all kinds of attention, and vocabularies that are adaptive and stay whole.
    """
    kinds = (nn.Linear, nn.Embedding, RankBoundary)
    names = {wildcard(name) for name, module in model.named_modules() if isinstance(module, kinds)}
    return {rule: style for rule, style in plan.items() if rule in names}


def wildcard(name: str) -> str:
    """Return the rule of a plan for a module: its name with `*` in place of the number of a layer."""
    return re.sub(r"\.\d+\b", ".*", name)


def check_plan(model: PreTrainedModel, planned: dict[str, str], size: int):
    """Refuse the plan of a model where `size` ranks cannot have equal parts, or where rules are changed one by one.

    `planned` has the rules of the model before the caller's own.

    Raises:
        ValueError: the message has the numbers and the way out.
    """
    plan = model._tp_plan
    groups = {}
    for rule, style in planned.items():
        groups.setdefault(rule.rpartition(".")[0], {})[rule] = plan.get(rule) == style
    for group, kept in groups.items():
        if len(set(kept.values())) > 1:
            changed = ", ".join(rule for rule, same in kept.items() if not same)
            raise ValueError(
                f"tp_plan changes {changed} alone, and the {len(kept)} rules of {group} are exact together only: "
                "change all of them, or none"
            )
    for name, module, style in _planned_linears(model, plan):
        width = module.out_features if style == "colwise" else module.in_features
        parent, _, child = name.rpartition(".")
        attribute = "pack_head_size" if child.startswith("pack_") else "head_size"
        part = getattr(model.get_submodule(parent), attribute, 1)
        if width // part % size:
            raise ValueError(
                f"tp_size={size} does not divide the {width // part} {'columns' if part == 1 else 'heads'} of {name}: "
                f"choose a tp_size that does, or a tp_plan that leaves the layers of {wildcard(parent)} whole"
            )


def _planned_linears(model: PreTrainedModel, plan: dict[str, str]) -> Iterator[tuple[str, nn.Linear, str]]:
    for name, module in model.named_modules():
        style = plan.get(wildcard(name))
        if isinstance(module, nn.Linear) and style in ("colwise", "rowwise"):
            yield name, module, style


class TensorParallelMixin:
    """The plans of `CommonPreTrainedModel`, and what splits it by them.

    `ranks` is the number of ranks that the heads or columns of a layer are spread over.
    """

    ranks = 1

    def init_parallel_plans(self):
        """Collect the plans of configuration and classes, without the rules that are for other models of the family."""
        super().init_parallel_plans()
        self._tp_plan = known_rules(self, self._tp_plan)

    @classmethod
    def maybe_distribute_model(cls, model: PreTrainedModel, distributed_config, mesh) -> PreTrainedModel:
        """Split a model over the ranks of `mesh` (None: do not), and refuse a plan that would not be exact.

        transformers calls this in `from_pretrained` before it loads weights.
        """
        plan = None if distributed_config is None else distributed_config.tp_plan
        if isinstance(plan, str) and plan != "auto":
            raise ValueError(f"tp_plan must be 'auto' or a dictionary of modules and styles, got {plan!r}")
        planned = model._tp_plan
        model = super().maybe_distribute_model(model, distributed_config, mesh)
        if mesh is not None and distributed_config.tp_size > 1:
            check_plan(model, planned, distributed_config.tp_size)
            for part in (module for module in model.modules() if isinstance(module, TensorParallelMixin)):
                part.ranks = max((x.ranks for x in part.modules() if isinstance(x, RankBoundary)), default=1)
        return model
