"""Context parallelism of the models: the cut of a batch into the parts that the ranks of a group pass to a model."""

from typing import Any

import torch
import torch.distributed as dist


def shard_sequence(batch: dict[str, Any], group: "dist.ProcessGroup", multiple: int = 1) -> dict[str, Any]:
    """Return the part of a batch that this rank of `group` passes to a model with `cp_group=group`.

    Every rank calls this with the same whole batch. The sequences are cut into contiguous parts of nearly equal length,
    at multiples of `multiple`: a Mega with attention in chunks needs `multiple=config.chunk_size`. Nothing is padded.

    Args:
        batch: what a model takes. Token ids, labels of tokens and masks `[..., T]`, `input_values` `[B, T]` and
            `inputs_embeds` `[B, T, d]` are cut, source and target or the two of a pair each by its own length. The
            rest, such as `labels` `[B]` or of floating point, stays as it is.
        group: the ranks that share the sequences.
        multiple: a number that divides the lengths of all parts but the last.

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
