"""Context parallelism of the models: the cut of a batch, and what heads exchange for losses and pooling."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from luna_mega.kernels.context_parallel import ContextShard, all_reduce_max, all_reduce_sum, first_ranks


def shard_sequence(batch: dict[str, Any], group: "dist.ProcessGroup", multiple: int = 1) -> dict[str, Any]:
    """Return the part of a batch that this rank of `group` passes to a model with `cp_group=group`.

    Every rank calls this with the same whole batch. The sequences are cut into contiguous parts of nearly equal length,
    at multiples of `multiple`: a Mega with attention in chunks needs `multiple=config.chunk_size`. Nothing is padded.

    Args:
        batch: what a model takes. Token ids, labels of tokens and masks `[..., T]`, `input_values` `[B, T]` and
            `inputs_embeds` `[B, T, d]` are cut, source and target or the two of a pair each by its own length. The
            rest, such as `labels` `[B]` or of floating point, stays as it is.
        group: the ranks that share the sequences.
        multiple: of which the lengths of all parts but the last are multiples.

    Raises:
        ValueError: the sequences are too short for a part on every rank.

    Example:
        >>> part = shard_sequence(batch, group)  # doctest: +SKIP
        >>> model(**part, cp_group=group).loss.backward()  # doctest: +SKIP
    """
    ranks, rank = group.size(), group.rank()

    def part(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or name.startswith("packed_"):
            return value
        if value.is_floating_point() and not name.endswith(("attention_mask", "input_values", "inputs_embeds")):
            return value
        axis = -2 if name.endswith("inputs_embeds") else -1
        units = -(-value.shape[axis] // multiple)
        if units < ranks:
            raise ValueError(
                f"{name} of length {value.shape[axis]} has {units} parts of {multiple} positions, fewer than the "
                f"{ranks} ranks of the group: use fewer ranks or longer sequences"
            )
        start = units * rank // ranks * multiple
        stop = min(units * (rank + 1) // ranks * multiple, value.shape[axis])
        return value.narrow(axis, start, stop - start).contiguous()

    return {name: part(name, value) for name, value in batch.items()}


@contextmanager
def refuse_together(group: "dist.ProcessGroup", device: torch.device) -> Iterator[None]:
    """Tell the other ranks of the group when the checks inside the block refuse this rank's inputs.

    They learn it from the `ContextShard.of` with their batch size that follows the block, and raise an error as well.
    """
    try:
        yield
    except Exception:
        with suppress(ValueError):
            ContextShard.of(group, 0, device, batch=0)
        raise


def dropout_alike(dropout: nn.Dropout, x: torch.Tensor, shard: ContextShard | None) -> torch.Tensor:
    """Return `x` after dropout; ranks that share sequences drop the same elements of what they all have."""
    if not dropout.training or dropout.p == 0.0:
        return x
    if shard is None:
        return dropout(x)
    return x * first_ranks(dropout(torch.ones_like(x)), shard)


def find_shard(group: "dist.ProcessGroup | None", states: torch.Tensor) -> ContextShard | None:
    """Return where the part `states` `[B, T, ...]` of this rank is in sequences that `group` shares; None without."""
    return None if group is None else ContextShard.of(group, states.shape[1], states.device)


def mean_loss(
    loss_function: Callable[..., torch.Tensor], counted: torch.Tensor, shard: ContextShard | None, **arguments: Any
) -> torch.Tensor:
    """Return the mean loss over the labels `counted` that are not -100, on all ranks that share sequences.

    `loss_function` is one of transformers', which divide by `num_items_in_batch` in place of the number of labels.
    """
    if shard is None:
        return loss_function(**arguments)
    if arguments.get("num_items_in_batch") is None:
        arguments["num_items_in_batch"] = all_reduce_sum((counted != -100).sum(), shard)
    return all_reduce_sum(loss_function(**arguments), shard)


def position_loss(
    logits: torch.Tensor, positions: torch.Tensor, shard: ContextShard, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """Return the cross-entropy of the right `positions` `[B]` of whole sequences for the `logits` `[B, T]` of a part.

    Sequences whose position is beyond their end do not count.
    """
    positions = positions.view(-1).clamp(0, shard.total)
    place, length = positions - shard.start, logits.shape[1]
    largest = all_reduce_max(logits.amax(dim=1), shard)
    right = logits.gather(1, place.clamp(0, length - 1)[:, None])[:, 0]
    right = right.masked_fill((place < 0) | (place >= length), 0.0)
    exponentials = (logits - largest[:, None]).exp().sum(dim=1)
    exponentials, right = all_reduce_sum(torch.stack([exponentials, right]), shard).unbind()
    counted = positions < shard.total
    loss = (largest + exponentials.log() - right)[counted].sum()
    return loss / (counted.sum() if num_items_in_batch is None else num_items_in_batch)
