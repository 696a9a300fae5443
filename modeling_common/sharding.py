"""Context parallelism: each rank of a process group has a contiguous shard of every sequence."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.gated_attention.columns import roll_columns, take_columns
from luna_mega.kernels.upcast import upcast, upcast_dtype
from luna_mega.modeling_common.attention import KeyWindow
from luna_mega.modeling_common.layout import DenseLayout, align
from luna_mega.modeling_common.masks import can_look
from luna_mega.modeling_common.pooling import LOCAL, Loss, Pair, Reductions


def shard_sequence(batch: dict[str, Any], group: "dist.ProcessGroup", multiple: int = 1) -> dict[str, Any]:
    """Return the shard of a batch that this rank of `group` passes to a model with `cp_group=group`.

    Every rank calls this with the same complete batch. The sequences are cut into contiguous shards of nearly equal
    length, at multiples of `multiple`: a Mega with attention in chunks requires `multiple=config.chunk_size`. No
    padding is added.

    Args:
        batch: the arguments of a model. Token ids, labels of tokens and masks `[..., T]`, `input_values` `[B, T]` and
            `inputs_embeds` `[B, T, d]` are cut. Source and target, or the sequences of a pair, may have different
            lengths. Other values, such as labels `[B]` or floating-point labels, are not changed.
        group: the ranks that share the sequences.
        multiple: a divisor of the lengths of all shards except the last.

    Raises:
        ValueError: The sequences are too short for a shard on every rank.

    Example:
        >>> shard = shard_sequence(batch, group)  # doctest: +SKIP
        >>> model(**shard, cp_group=group).loss.backward()  # doctest: +SKIP
    """
    ranks, rank = group.size(), group.rank()

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or name.startswith("packed_"):
            return value
        if value.is_floating_point() and not name.endswith(("attention_mask", "input_values", "inputs_embeds")):
            return value
        axis = -2 if name.endswith("inputs_embeds") else -1
        units = -(-value.shape[axis] // multiple)
        if units < ranks:
            raise ValueError(
                f"{name} of length {value.shape[axis]} has {units} parts of {multiple} positions, fewer than the "
                f"{ranks} ranks of the group; use fewer ranks or longer sequences"
            )
        start = units * rank // ranks * multiple
        stop = min(units * (rank + 1) // ranks * multiple, value.shape[axis])
        return value.narrow(axis, start, stop - start).contiguous()

    return {name: cut(name, value) for name, value in batch.items()}


class ShardedLayout(NamedTuple):
    """One shard `[B, T]` of every sequence.

    Args:
        mask: `[B, T]` bool of this shard, True = keep; None = all.
        shard: the lengths of all shards, and the numbers of tokens that they keep.
        before: `[B]`, the number of tokens that earlier shards keep; None for the output of an encoder.
        columns, back: see `DenseLayout`.
        counts_padding: whether padding has positions, as in one process after the last token.
        lengths: None, because shards do not continue a cache.
    """

    mask: torch.Tensor | None
    shard: ContextShard
    before: Any = None
    columns: torch.Tensor | None = None
    back: torch.Tensor | None = None
    counts_padding: bool = False
    lengths: None = None

    @classmethod
    def of(cls, group: "dist.ProcessGroup", mask: torch.Tensor | None, states: torch.Tensor) -> "ShardedLayout":
        """Return the layout of shards with the mask `[B, T]` and states `[B, T, ...]`. All ranks call this.

        The ranks exchange tensors of the size B, whatever the length.
        """
        batch, device = states.shape[0], states.device
        shard = ContextShard.of(group, states.shape[1], device, batch=batch)
        mine = torch.full((batch,), shard.lengths[shard.rank], device=device) if mask is None else mask.sum(dim=1)
        kept, lengths = shard.all_gather(mine), torch.tensor(shard.lengths, device=device)[:, None]
        before = kept[: shard.rank].sum(dim=0)
        all_kept = kept.device.type == "cpu" and bool((kept == lengths).all())
        return cls(mask, shard._replace(kept=None if all_kept else kept), before)

    def close_gaps(self) -> "ShardedLayout":
        """Return the layout in which the kept positions of the shard are its first columns."""
        if self.mask is None:
            return self
        columns, back, mask = align(self.mask)
        return self._replace(mask=mask, columns=columns, back=back)

    @property
    def reductions(self) -> Reductions:
        return ShardedReductions(self.shard)

    def count_padding(self) -> "ShardedLayout":
        """Return the layout in which padding after the last token has positions, because statistics include it."""
        return self._replace(before=torch.full_like(self.before, self.shard.start), counts_padding=True)

    def options(self) -> dict[str, Any]:
        return {"mask": self.mask, "shard": self.shard._replace(kept=None) if self.counts_padding else self.shard}

    def sizes(self, x: torch.Tensor) -> tuple[int, int]:
        return x.shape[0], self.shard.total

    def counts(self) -> torch.Tensor | None:
        return None if self.shard.kept is None else self.shard.kept.sum(dim=0)[:, None]

    def start(self) -> torch.Tensor:
        return self.before

    def positions(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            return torch.arange(x.shape[1], device=x.device) + self.before[:, None]
        return (self.mask.cumsum(dim=1) - 1 + self.before[:, None]).clamp(min=0)

    def spread(self, factors: torch.Tensor, length: int) -> torch.Tensor:
        return self.shard.broadcast_first(factors)[:, None]

    def drop_features(self, x: torch.Tensor, probability: float) -> torch.Tensor:
        factors = x.new_ones(x.shape[0], x.shape[2])
        return x * self.spread(nn.functional.dropout(factors, probability), x.shape[1])

    def drop_shared(self, dropout: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.reductions.dropout(dropout, x)

    def draw(self) -> float:
        return self.shard.broadcast_first(torch.rand(()).to(self.before.device)).item()

    def key_window(self, key: torch.Tensor, value: torch.Tensor, chunk_size: int | None) -> KeyWindow:
        """Return the keys and values of this shard if they are in chunks, which begin with the shard, else of all.

        This is the only exchange whose size grows with the length.
        """
        if chunk_size is not None:
            return KeyWindow(key, value, self.mask)
        key, value = (gather_shards(self.shard, x) for x in (key, value))
        offset, mask, start = self.shard.start, self._mask_of_all(), self.before - self.shard.start
        if mask is not None:
            # The positions of all shards are consecutive, and this shard starts at the column `offset`.
            columns, _, mask = align(mask)
            shift = roll_columns(start, mask.shape[1])
            columns, mask = columns.gather(1, shift), mask.gather(1, shift)
            key, value = take_columns(key, columns), take_columns(value, columns)
        return KeyWindow(key, value, mask, start, offset)

    def _mask_of_all(self) -> torch.Tensor | None:
        """Return the mask of all shards, whose first columns are kept, `[B, total]`; None = all are kept."""
        kept = self.shard.kept
        if kept is None:
            return None
        columns = (torch.arange(length, device=kept.device) for length in self.shard.lengths)
        return torch.cat([x < count[:, None] for x, count in zip(columns, kept, strict=True)], dim=1)

    def of_source(self, states: torch.Tensor, mask: torch.Tensor | None) -> "ShardedLayout":
        return ShardedLayout(mask, ContextShard.of(self.shard.group, states.shape[1], states.device))

    def rows(self) -> DenseLayout:
        """Return the layout of the positions on this rank."""
        return DenseLayout(self.mask, self.columns, self.back)

    def has_rows(self) -> bool:
        return True

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows().gather(x)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows().scatter(x)

    def scatter_weights(self, weights: torch.Tensor, *dims: int) -> torch.Tensor:
        return self.rows().scatter_weights(weights, *dims)

    def clear_padding(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows().clear_padding(x)

    def columns_from(self, start: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        return self.rows().columns_from(start, x)


def gather_shards(shard: ContextShard, x: torch.Tensor) -> torch.Tensor:
    """Return the complete sequences `[B, total, W]` of shards `[B, T, W]`."""
    filled = nn.functional.pad(x, (0, 0, 0, max(shard.lengths) - x.shape[1]))
    parts = zip(shard.all_gather(filled), shard.lengths, strict=True)
    return torch.cat([part[:, :length] for part, length in parts], dim=1)


def prepare_sharded(model: Any, read: Callable[..., Any], group: "dist.ProcessGroup", arguments: dict[str, Any]) -> Any:
    """Return the inputs of `read` for the shards of this rank, with a `ShardedLayout`. All ranks call this."""
    tensors = (x for x in arguments.values() if isinstance(x, torch.Tensor))
    with raise_together(group, next((x.device for x in tensors), model.device)):
        if arguments.get("position_ids") is not None:
            raise ValueError("`position_ids` are not supported with `cp_group`, which counts over all ranks; omit them")
        if arguments.get("past_key_values") is None and arguments.get("use_cache") is None:
            arguments = arguments | {"use_cache": False}  # by default a decoder starts a cache
        inputs = read(model, **arguments)
        _check_sharded(model, inputs)
        check_tokens(inputs.given, model.config.vocab_size)
    layout = ShardedLayout.of(group, inputs.mask, inputs.given)
    model.check_shards(layout)
    if getattr(model.config, "padded_batch_statistics", False):
        layout = layout.count_padding()
    return inputs._replace(layout=layout.close_gaps() if model.closes_gaps else layout)


def _check_sharded(model: Any, inputs: Any) -> None:
    """Raise `ValueError` for arguments that are not supported with shards."""
    if inputs.past_key_values is not None:
        raise ValueError(
            "a cache is not supported with `cp_group`; omit `past_key_values`, pass `use_cache=False`, and generate "
            "without `cp_group`"
        )
    if inputs.output_weights:
        raise ValueError(
            "attention weights are not supported with `cp_group`; pass `output_attentions=False` and load the model "
            "with `attn_implementation='sdpa'`"
        )
    if not isinstance(inputs.layout, DenseLayout) or model.config.unpad_inputs:
        raise ValueError(
            "padding-free batches are not supported with `cp_group`; pad the batch, and set `unpad_inputs=False` in "
            "the configuration"
        )
    if model.config.input_type == "patches":
        raise ValueError("images are not supported with `cp_group`; omit it")
    if model.config.add_cross_attention and not model.packs:
        raise ValueError("a decoder with `add_cross_attention=True` does not support `cp_group`; omit it")


def check_tokens(given: torch.Tensor, vocab_size: int) -> None:
    """Raise `ValueError` for token ids outside the vocabulary, if reading them is free.

    In one process the embedding detects them. The other ranks would wait for one that raises an error so late.
    """
    if given.dim() == 2 and not given.is_floating_point() and can_look(given):
        first, last = (x.item() for x in given.aminmax())
        if first < 0 or last >= vocab_size:
            raise ValueError(
                f"`input_ids` are from {first} to {last}, but the vocabulary of this model has {vocab_size} tokens; "
                "use the tokenizer of this model"
            )


def check_shards(
    layout: ShardedLayout, chunk_size: int | None = None, truncation: int | None = None, counts_padding: bool = False
) -> None:
    """Raise `ValueError` on every rank for shards that a model with these options does not support.

    Args:
        layout: the shards.
        chunk_size: positions of an attention chunk; None = attention to the entire sequence.
        truncation: the distance after which a moving average forgets; None = it never forgets.
        counts_padding: whether norms include padding in their statistics.
    """
    total, lengths = layout.shard.total, torch.tensor(layout.shard.lengths, device=layout.before.device)[:, None]
    if truncation is not None and truncation < total:
        raise ValueError(
            f"truncation={truncation} is below the length {total}, which is not supported with `cp_group`; set "
            "`truncation=None` in the configuration, or omit `cp_group`"
        )
    kept = lengths if layout.shard.kept is None else layout.shard.kept
    borders = kept.cumsum(dim=0)  # in positions of the sequences
    if counts_padding and ((kept < lengths) & (borders < borders[-1])).any():
        raise ValueError(
            "padded_batch_statistics=True with `cp_group` requires padding after the last token; pad on the right, or "
            "set it to False in the configuration"
        )
    borders = lengths.cumsum(dim=0) if counts_padding else borders
    if chunk_size is not None and (cut := (borders % chunk_size != 0) & (borders < borders[-1])).any():
        raise ValueError(
            f"a context-parallel shard ends after {borders[cut][0]} tokens of a sequence, inside an attention chunk of "
            f"{chunk_size}; pad on the right only and use shard_sequence(batch, group, multiple={chunk_size})"
        )


class ShardedReductions(Reductions):
    """Reductions over the positions of sequences in shards."""

    def __init__(self, shard: ContextShard) -> None:
        self.shard = shard

    def is_local(self) -> bool:
        return False

    def require_complete(self, message: str) -> None:
        raise ValueError(message)

    def offset(self) -> int:
        return self.shard.start

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return self.shard.all_reduce_sum(x)

    def dropout(self, dropout: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not dropout.training or dropout.p == 0.0:
            return x
        return x * self.shard.broadcast_first(dropout(torch.ones_like(x)))

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return gather_shards(self.shard, x.long()[..., None])[..., 0].to(x.dtype)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.total(x.sum(dim=1, dtype=upcast_dtype(x))) / self.shard.total

    def first(self, first: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        is_first = self.shard.all_gather(_has_any(first, mask)).argmax(dim=0) == self.shard.rank
        return self.total(first.masked_fill(~is_first[:, None], 0.0))

    def last(self, last: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        later = self.shard.all_gather(_has_any(last, mask)).flip(0)
        is_last = later.argmax(dim=0) == self.shard.size - 1 - self.shard.rank
        return self.total(last.masked_fill(~is_last[:, None], 0.0))

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
        logits, length = upcast(logits), logits.shape[1]
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


def _has_any(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return 1 for each sequence of which the mask of a shard keeps a token, `[B]`."""
    return torch.ones_like(x[:, 0], dtype=torch.int) if mask is None else mask.any(dim=1).int()


def find_reductions(options: dict[str, Any], states: torch.Tensor) -> Reductions:
    """Return the reductions over sequences with `states` `[B, T, ...]`; remove `cp_group` from `options`."""
    group = options.pop("cp_group", None)
    if group is None:
        return LOCAL
    return ShardedReductions(ContextShard.of(group, states.shape[1], states.device, batch=states.shape[0]))


def raise_together(group: "dist.ProcessGroup | None", device: torch.device) -> AbstractContextManager[None]:
    """Return a context that makes all ranks of a group raise an error if the block raises one on any rank.

    The other ranks detect the error in their next call of `ContextShard.of`.
    """
    return nullcontext() if group is None else _raise_on_others(group, device)


@contextmanager
def _raise_on_others(group: "dist.ProcessGroup", device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception:
        with suppress(ValueError):
            ContextShard.of(group, 0, device, batch=0)
        raise
