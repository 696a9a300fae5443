"""Context parallelism: the ranks of a process group share long sequences and exchange tensors.

Every rank holds one contiguous shard of each sequence, in rank order. The communication methods are differentiable:
their backward is the transposed communication, so every rank receives the gradient of the sum of all ranks' losses. All
ranks must call them, and run their backward, in the same order. If one rank uses a result, every other rank must use
it too, if necessary multiplied by 0.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from luna_mega.kernels.gated_attention.columns import to_end


class ContextShard(NamedTuple):
    """The position of this rank's shard in sequences shared by the ranks of a process group.

    Args:
        group: process group of the ranks that share the sequences.
        lengths: number of positions on each rank, in rank order.
        kept: `[ranks, B]`, number of leading positions that belong to each sequence; None = all.
    """

    group: "dist.ProcessGroup"
    lengths: tuple[int, ...]
    kept: Tensor | None = None

    @classmethod
    def of(cls, group: "dist.ProcessGroup", length: int, device: torch.device, **same: int) -> "ContextShard":
        """Exchange the lengths of all shards. Every rank must call this with the `length` of its own shard.

        A rank that failed calls it with length 0, so that the other ranks do not wait for it. The values in `same`,
        for example the batch size, must be equal on all ranks.

        Raises:
            ValueError: on every rank, if a rank has no positions or the values in `same` differ.
        """
        mine = torch.tensor([length, *same.values()], device=device)
        table = mine.new_empty(group.size(), len(mine))
        dist.all_gather(list(table), mine, group=group)
        lengths, *others = table.T.tolist()
        if min(lengths) < 1:
            raise ValueError(
                f"a rank has no positions, or its inputs were invalid: the shards of the group have lengths {lengths}"
            )
        for name, values in zip(same, others, strict=True):
            if len(set(values)) > 1:
                raise ValueError(f"{name} must be equal on all ranks of the group, got {values}")
        return cls(group, tuple(lengths))

    @property
    def rank(self) -> int:
        """Return the index of this rank in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.lengths)

    @property
    def start(self) -> int:
        """Return the number of positions before this rank's."""
        return sum(self.lengths[: self.rank])

    @property
    def total(self) -> int:
        """Return the number of positions on all ranks."""
        return sum(self.lengths)

    def gaps(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the number of positions between this shard and each earlier shard, and each later shard.

        Both are float64 `[ranks, B]`, or `[ranks, 1]` if all positions belong to the sequences.
        """
        kept = torch.tensor(self.lengths, device=device)[:, None] if self.kept is None else self.kept
        kept, rank = kept.double(), self.rank
        after = kept.cumsum(dim=0)
        return after[rank] - kept[rank] - after[:rank], (after - kept)[rank + 1 :] - after[rank]

    def to_end(self, x: Tensor) -> Tensor:
        """Return this rank's `[B, T, ...]` with the positions of the sequences last instead of first."""
        return x if self.kept is None else to_end(x, self.kept[self.rank])

    def check(self, op: str, length: int) -> None:
        """Raise `ValueError` if the shard's length differs from the length that this rank declared."""
        if length != (here := self.lengths[self.rank]):
            raise ValueError(f"{op}: the shard has {here} positions on this rank, but x has length {length}")

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the stacked tensors `x` of all ranks, `[ranks, ...]`; shapes must be equal."""
        return _AllGather.apply(x, self.group)  # type: ignore[no-untyped-call]

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors `x` of all ranks; shapes must be equal. The backward sums the gradients."""
        return all_reduce_sum(x, self.group)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the element-wise maximum of the tensors `x` of all ranks, without gradient."""
        largest = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def broadcast_first(self, x: Tensor) -> Tensor:
        """Return the first rank's tensor `x`, without gradient, so that all ranks use the same random numbers."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(x, group=self.group, group_src=0)
        return x


def all_reduce_sum(x: Tensor, group: "dist.ProcessGroup | None" = None) -> Tensor:
    """Return the sum of `x` over a process group, None = the default group. The backward sums the gradients."""
    return _AllReduceSum.apply(x, group)  # type: ignore[no-untyped-call]


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(rows), x.contiguous(), group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatter.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = rows.new_empty(rows.shape[1:])
        dist.reduce_scatter(x, list(rows.contiguous()), group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllGather.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduceSum.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]
