"""The part of each sequence that this process has: the whole, or under context parallelism one of several.

Layers, heads and pooling ask a `Parts` for what depends on all tokens of a sequence, and need not know which it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from luna_mega.kernels.context_parallel import ContextShard

Loss = Callable[..., torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


class Parts:
    """Sequences `[B, T, ...]` that this process has whole."""

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments by which an op knows the parts."""
        return {}

    def is_whole(self) -> bool:
        """Return whether this process has the sequences whole."""
        return True

    def refuse(self, what: str) -> None:
        """Raise `ValueError` for what sequences in parts do not have."""

    def length(self, x: torch.Tensor) -> int:
        """Return the length of the whole sequences; `x` `[B, T, ...]` is the part of this process."""
        return x.shape[1]

    def counts(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the number of tokens that each sequence keeps, `[B, 1]`; None = all."""
        return None if mask is None else mask.sum(dim=1, keepdim=True)

    def start(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the position of the first column in each sequence, `[B]`, see `TokenLayout.start`."""
        return None if mask is None else -mask.int().argmax(dim=1)

    def number(self, positions: torch.Tensor) -> torch.Tensor:
        """Return positions `[B or 1, T]`, counted from the beginning of this part, as positions in the sequence."""
        return positions

    def mask(self) -> torch.Tensor | None:
        """Return the mask `[B, T]` of shards whose first columns are kept, over all of them; None = all are kept."""
        return None

    def offset(self) -> int:
        """Return the number of positions before this part."""
        return 0

    def of_others(self, states: torch.Tensor) -> "Parts":
        """Return the parts of other sequences, `states` `[B, S, ...]`, that the same processes have."""
        return self

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all parts."""
        return x

    def dropout(self, dropout: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, which all parts have, after the same dropout in all."""
        return dropout(x)

    def agree(self, x: torch.Tensor) -> torch.Tensor:
        """Return random numbers that all parts have, without a gradient."""
        return x

    def draw(self) -> float:
        """Return a random number from 0 to 1 that all parts have."""
        return torch.rand(()).item()

    def reach(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors `[B, T, W]` of the whole sequences."""
        return tensors

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return labels or a mask `[B, T]` of the complete sequences."""
        return x

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over all positions of `[B, T, d]`."""
        return x.mean(dim=1)

    def first(self, first: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the first token of each sequence; `first` `[B, d]` are those that the masks `[B, T]` keep of parts."""
        return first

    def last(self, last: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the last token of each sequence; `last` `[B, d]` are those that the masks `[B, T]` keep of parts."""
        return last

    def mean_loss(self, loss_function: Loss, counted: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Return the mean loss over the labels `counted` that are not -100.

        `loss_function` is one of transformers', which divide by `num_items_in_batch` in place of the number of labels.
        """
        return loss_function(**arguments)

    def position_loss(
        self, loss_function: Loss, logits: Pair, positions: Pair, mask: torch.Tensor | None, **arguments: Any
    ) -> torch.Tensor:
        """Return the mean cross-entropy of the two labels `positions`, `[B]` each, for the two `logits` `[B, T]`.

        Labels after the end of the sequences, or at positions that the bool `mask` `[B, T]` drops, do not count.
        """
        if mask is not None:
            length = mask.shape[1]
            padded = nn.functional.pad(mask, (0, 1))
            first, second = (
                x.masked_fill(~padded.gather(1, x.clamp(0, length)[:, None])[:, 0], length) for x in positions
            )
            positions = first, second
        return loss_function(*logits, *positions, **arguments)


class SharedParts(Parts):
    """Parts `[B, T, ...]` of sequences that the ranks of a group share, each a contiguous part in the order of ranks.

    Args:
        shard: the lengths of the parts, and which of them this process has.
        kept: `[ranks, B]`, the number of tokens that each rank keeps; None = all, or nobody asked.
        begins: `[B]`, the first column that is kept, counted over all ranks; None = nobody asked.
    """

    kept: torch.Tensor | None
    begins: Any

    def __init__(
        self, shard: ContextShard, kept: torch.Tensor | None = None, begins: torch.Tensor | None = None
    ) -> None:
        self.shard, self.kept, self.begins = shard, kept, begins

    @classmethod
    def count(cls, shard: ContextShard, mask: torch.Tensor | None, batch: int, device: torch.device) -> "SharedParts":
        """Return the parts of B sequences of which this rank keeps `mask` `[B, T]`; all ranks tell each other.

        What they tell each other has the size B, whatever the length.
        """
        mine = torch.tensor([shard.lengths[shard.rank], 0], device=device).expand(batch, 2)
        if mask is not None:
            mine = torch.stack([mask.sum(dim=1), mask.int().argmax(dim=1)], dim=1)
        kept, first = shard.all_gather(mine).unbind(dim=-1)
        lengths = torch.tensor(shard.lengths, device=device)[:, None]
        first = first + lengths.cumsum(dim=0) - lengths
        first = first.gather(0, (kept > 0).int().argmax(dim=0, keepdim=True))[0]
        all_kept = kept.device.type == "cpu" and bool((kept == lengths).all())
        kept = None if all_kept else kept
        return cls(shard._replace(kept=kept), kept, first)

    def options(self) -> dict[str, Any]:
        return {"shard": self.shard}

    def is_whole(self) -> bool:
        return False

    def refuse(self, what: str) -> None:
        raise ValueError(what)

    def length(self, x: torch.Tensor) -> int:
        return self.shard.total

    def counts(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        return None if self.kept is None else self.kept.sum(dim=0)[:, None]

    def start(self, mask: torch.Tensor | None) -> torch.Tensor:
        return self.before()

    def number(self, positions: torch.Tensor) -> torch.Tensor:
        return positions + self.before()[:, None]

    def before(self) -> torch.Tensor:
        """Return how many tokens of each sequence earlier ranks keep, `[B]`."""
        if self.kept is None:
            return torch.full_like(self.begins, self.offset())
        return self.kept[: self.shard.rank].sum(dim=0)

    def mask(self) -> torch.Tensor | None:
        if self.kept is None:
            return None
        columns = (torch.arange(length, device=self.kept.device) for length in self.shard.lengths)
        return torch.cat([x < kept[:, None] for x, kept in zip(columns, self.kept, strict=True)], dim=1)

    def offset(self) -> int:
        return self.shard.start

    def of_others(self, states: torch.Tensor) -> "SharedParts":
        return SharedParts(ContextShard.of(self.shard.group, states.shape[1], states.device))

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return self.shard.all_reduce_sum(x)

    def dropout(self, dropout: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not dropout.training or dropout.p == 0.0:
            return x
        return x * self.agree(dropout(torch.ones_like(x)))

    def agree(self, x: torch.Tensor) -> torch.Tensor:
        return self.shard.broadcast_first(x)

    def draw(self) -> float:
        return self.agree(torch.rand(()).to(self.begins.device)).item()

    def reach(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self._gather(x) for x in tensors)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return self._gather(x.long()[..., None])[..., 0].to(x.dtype)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        filled = nn.functional.pad(x, (0, 0, 0, max(self.shard.lengths) - x.shape[1]))
        parts = zip(self.shard.all_gather(filled), self.shard.lengths, strict=True)
        return torch.cat([part[:, :length] for part, length in parts], dim=1)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.total(x.sum(dim=1)) / self.length(x)

    def first(self, first: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        has_any = torch.ones_like(first[:, 0], dtype=torch.int) if mask is None else mask.any(dim=1).int()
        return self.total(first.masked_fill(~self._is_first(has_any)[:, None], 0.0))

    def last(self, last: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        has_any = torch.ones_like(last[:, 0], dtype=torch.int) if mask is None else mask.any(dim=1).int()
        is_last = self.shard.all_gather(has_any).flip(0).argmax(dim=0) == self.shard.size - 1 - self.shard.rank
        return self.total(last.masked_fill(~is_last[:, None], 0.0))

    def _is_first(self, has_any: torch.Tensor) -> torch.Tensor:
        """Return for which sequences `[B]` this rank is the first of those where `has_any` `[B]` is 1."""
        return self.shard.all_gather(has_any).argmax(dim=0) == self.shard.rank

    def mean_loss(self, loss_function: Loss, counted: torch.Tensor, **arguments: Any) -> torch.Tensor:
        if arguments.get("num_items_in_batch") is None:
            arguments["num_items_in_batch"] = self.total((counted != -100).sum())
        return self.total(loss_function(**arguments))

    def position_loss(
        self, loss_function: Loss, logits: Pair, positions: Pair, mask: torch.Tensor | None, **arguments: Any
    ) -> torch.Tensor:
        items = arguments.get("num_items_in_batch")
        first, second = (self._position_loss(*pair, mask, items) for pair in zip(logits, positions, strict=True))
        return (first + second) / 2

    def _position_loss(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """Return the cross-entropy of one label."""
        length = logits.shape[1]
        column = positions.clamp(min=0)[:, None] - self.offset()
        place = column.clamp(0, length - 1)
        found = (column == place)[:, 0]  # on this rank
        if mask is not None:
            found = found & mask.gather(1, place)[:, 0]
        largest = self.shard.all_reduce_max(logits.amax(dim=1))
        exponentials = (logits - largest[:, None]).exp().sum(dim=1)
        label = logits.gather(1, place)[:, 0].masked_fill(~found, 0.0)
        exponentials, label, counted = self.total(torch.stack([exponentials, label, found.to(logits.dtype)])).unbind()
        loss = (largest + exponentials.log() - label)[counted > 0].sum()
        return loss / ((counted > 0).sum() if num_items_in_batch is None else num_items_in_batch)


WHOLE = Parts()


def find_parts(options: dict[str, Any], states: torch.Tensor) -> Parts:
    """Return the parts of the sequences with `states` `[B, T, ...]` here, and take their group out of `options`."""
    group = options.pop("cp_group", None)
    if group is None:
        return WHOLE
    return SharedParts(ContextShard.of(group, states.shape[1], states.device, batch=states.shape[0]))
