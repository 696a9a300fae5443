"""Styles and checks of tensor parallelism plans, in addition to transformers' styles.

A `base_model_tp_plan` maps names of modules to styles that specify how transformers distributes them over the ranks.
Linear layers have styles of transformers. At a `RankBoundary`, a tensor changes between replicated and sharded.
"""

import re

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers.integrations.tensor_parallel import ParallelInterface, TensorParallelLayer
from transformers.modeling_utils import PreTrainedModel


class RankBoundary(nn.Identity):
    """Boundary where tensor parallelism redistributes a tensor. In a single process it is the identity.

    Attributes:
        ranks (`int`): number of ranks that share the tensor.
    """

    ranks = 1

    def join_heads(self, weights: torch.Tensor | None) -> torch.Tensor | None:
        """Gather the attention weights of all heads from the weights of this rank, `[B, heads, ...]`; None for None.

        The style of the boundary must join `[..., heads, K]`. In a single process the result is the same tensor, so
        that it has a gradient.
        """
        if weights is None or self.ranks == 1:
            return weights
        return self(weights.movedim(1, -2)).movedim(-2, 1)


class Redistribute(TensorParallelLayer):
    """Style that redistributes a tensor, and its gradient in the backward pass.

    Args:
        source, target: placements of the tensor before and after.
        gradient: placement of the gradient of the result; None = `target`.
    """

    def __init__(self, source: Placement, target: Placement, gradient: Placement | None = None):
        self.source, self.target = source, target
        self.gradient = None if gradient is None else [gradient]

    def install_forward(self, module: RankBoundary, mesh: DeviceMesh) -> RankBoundary:
        module.ranks = mesh.size()
        return super().install_forward(module, mesh)

    def transform_output_post_forward(self, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if self.source == self.target and not output.requires_grad:
            return output
        spread = DTensor.from_local(output, mesh, [self.source], run_check=False)
        return spread.redistribute(placements=[self.target]).to_local(grad_placements=self.gradient)


STYLES = {
    # [..., heads of this rank, K] -> [..., heads, K]
    "luna_all_heads": Redistribute(Shard(-2), Replicate()),
    # [..., columns] -> [..., columns of this rank]
    "mega_own_columns": Redistribute(Replicate(), Shard(-1)),
    # Each rank computes the part of the gradient that belongs to its own columns.
    "mega_whole": Redistribute(Replicate(), Replicate(), gradient=Partial()),
}
for _name, _style in STYLES.items():
    ParallelInterface.register(_name, _style)  # type: ignore[arg-type]  # transformers registers its styles so too


def known_rules(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """Return the rules of `plan` that match a linear layer, an embedding or a boundary of the model.

    All models of a family share one plan, and each has only some of its modules.
    """
    kinds = (nn.Linear, nn.Embedding, RankBoundary)
    names = {wildcard(name) for name, module in model.named_modules() if isinstance(module, kinds)}
    return {rule: style for rule, style in plan.items() if rule in names}


def wildcard(name: str) -> str:
    """Return the rule of a plan for a module: its name with `*` in place of each layer index."""
    return re.sub(r"\.\d+\b", ".*", name)


def check_plan(model: PreTrainedModel, planned: dict[str, str], size: int) -> None:
    """Check that the plan of a model gives correct results with `size` ranks.

    Args:
        model: model with the plan of the caller.
        planned: rules of the model without the caller's.
        size: number of ranks.

    Raises:
        ValueError: If `size` does not divide a layer, or the caller changes only some rules of a group.
    """
    plan = model._tp_plan or {}
    groups: dict[str, dict[str, bool]] = {}
    for rule, style in planned.items():
        groups.setdefault(rule.rpartition(".")[0], {})[rule] = plan.get(rule) == style
    for group, kept in groups.items():
        if len(set(kept.values())) > 1:
            changed = ", ".join(rule for rule, same in kept.items() if not same)
            raise ValueError(
                f"`tp_plan` changes only {changed}, but the {len(kept)} rules of {group} are correct only together; "
                "change all or none of them"
            )
    for name, module in model.named_modules():
        split = plan.get(wildcard(name))
        if not isinstance(module, nn.Linear) or split not in ("colwise", "rowwise"):
            continue
        width = module.out_features if split == "colwise" else module.in_features
        parent, _, child = name.rpartition(".")
        attribute = "pack_head_size" if child.startswith("pack_") else "head_size"
        part = getattr(model.get_submodule(parent), attribute, 1)
        if width // part % size:
            raise ValueError(
                f"`tp_size={size}` does not divide the {width // part} {'columns' if part == 1 else 'heads'} of {name}"
                f"; change `tp_size`, or pass a `tp_plan` without the layers of {wildcard(parent)}"
            )
