"""Context parallelism: the ranks of a process group hold parts of one long sequence, and exchange tensors.

Every rank of the group holds one contiguous part of each sequence, in the order of ranks. The methods that exchange
tensors are differentiable: their backward is the transposed exchange, so that every rank gets the gradient of the sum
of all ranks' losses. All ranks have to call them in one order, and their backward too: a rank that uses the result has
to use it on every other rank, if only with a factor of 0.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import Function

from luna_mega.kernels.gated_attention.alignment import to_end


class ContextShard(NamedTuple):
    """The place of this rank's part in sequences that the ranks of a process group share.

    Args:
        group: the ranks that share the sequences.
        lengths: the number of positions that each rank holds, in the order of ranks.
        kept: `[ranks, B]`, how many of them belong to each sequence; they are the first ones. None = all.
    """

    group: "dist.ProcessGroup"
    lengths: tuple[int, ...]
    kept: torch.Tensor | None = None

    @classmethod
    def of(cls, group: "dist.ProcessGroup", length: int, device: torch.device, **same: int) -> "ContextShard":
        """Exchange the lengths of all parts. Every rank has to call this, with the `length` of its own part.

        A rank that cannot go on calls it with length 0, so that the others do not wait for it. `same` are numbers that
        have to be equal on all ranks, for instance the batch size.

        Raises:
            ValueError: on every rank, if one has no positions, or if the numbers of `same` differ.
        """
        mine = torch.tensor([length, *same.values()], device=device)
        table = mine.new_empty(group.size(), len(mine))
        dist.all_gather(list(table), mine, group=group)
        lengths, *others = table.T.tolist()
        if min(lengths) < 1:
            raise ValueError(
                f"a rank has no positions, or has refused its inputs: the parts of the group have the lengths {lengths}"
            )
        for name, values in zip(same, others, strict=True):
            if len(set(values)) > 1:
                raise ValueError(f"all ranks of the group need one {name}, got {values}")
        return cls(group, tuple(lengths))

    @property
    def rank(self) -> int:
        """Return the place of this rank in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.lengths)

    @property
    def start(self) -> int:
        """Return the number of positions before those of this rank."""
        return sum(self.lengths[: self.rank])

    @property
    def total(self) -> int:
        """Return the number of positions on all ranks."""
        return sum(self.lengths)

    def gaps(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how many positions are between this part and those of the ranks before it, and after it.

        Both are float64 `[ranks, B]`, or `[ranks, 1]` if all positions belong to the sequences.
        """
        kept = torch.tensor(self.lengths, device=device)[:, None] if self.kept is None else self.kept
        kept, rank = kept.double(), self.rank
        after = kept.cumsum(dim=0)
        return after[rank] - kept[rank] - after[:rank], (after - kept)[rank + 1 :] - after[rank]

    def to_end(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's `[B, T, ...]` with the positions of the sequences last instead of first."""
        return x if self.kept is None else to_end(x, self.kept[self.rank])

    def check(self, op: str, length: int) -> None:
        """Refuse a part that has another length than this rank has told the others."""
        if length != (here := self.lengths[self.rank]):
            raise ValueError(f"{op}: the shard has {here} positions here, and x {length}")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors `x` of all ranks, which have one shape, `[ranks, ...]`. Its backward sums and cuts."""
        return _AllGather.apply(x, self.group)

    def all_reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tensors `x` of all ranks, which have one shape. Its backward sums the gradients."""
        return _AllReduceSum.apply(x, self.group)

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum of the tensors `x` of all ranks, without a gradient."""
        largest = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def broadcast_first(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first rank's tensor `x`, without a gradient: random numbers that all ranks agree on."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(x, group=self.group, group_src=0)
        return x


class _AllGather(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        rows = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(rows), x.contiguous(), group=group)
        return rows

    @staticmethod
    def backward(ctx, grad):
        return _ReduceScatter.apply(grad, ctx.group), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        x = rows.new_empty(rows.shape[1:])
        dist.reduce_scatter(x, list(rows.contiguous()), group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return _AllGather.apply(grad, ctx.group), None


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return _AllReduceSum.apply(grad, ctx.group), None
