"""Attention of sequences whose parts lie on several ranks: chunks must not be cut, full attention gathers all keys."""

from itertools import accumulate

import torch
from torch import nn

from luna_mega.kernels.context_parallel import ContextShard, all_gather
from luna_mega.modeling_common.layout import TokenLayout


def check_borders(layout: TokenLayout, chunk: int | None):
    """Raise `ValueError` on every rank where the border between two of them cuts a chunk of attention."""
    if layout.shard is None or chunk is None:
        return
    borders, first = list(accumulate(layout.shard.lengths))[:-1], layout.first.tolist()
    if any(border > start and (border - start) % chunk for border in borders for start in first):
        raise ValueError(
            f"parts that end at {borders} cut attention chunks of {chunk} positions, which count from the first tokens "
            f"at {sorted(set(first))}: pad on the right and cut with shard_sequence(batch, group, multiple={chunk})"
        )


def reach_keys(
    key: torch.Tensor, value: torch.Tensor, layout: TokenLayout, chunk: int | None
) -> tuple[torch.Tensor, torch.Tensor, TokenLayout, torch.Tensor, int]:
    """Return keys and values for the queries of this rank, their layout and start, and the column of the first query.

    In chunks they are those of this rank. Full attention needs those of all ranks, the only exchange of a Mega that
    grows with the length.
    """
    start = layout.start()
    if chunk is not None:
        return key, value, TokenLayout(layout.mask), start.clamp(max=0), 0
    shard, mask = layout.shard, None
    if layout.kept is not None:
        mask = key.new_ones(key.shape[:2], dtype=torch.bool) if layout.mask is None else layout.mask
        mask = _gather_positions(mask[..., None].to(torch.uint8), shard)[..., 0].bool()
    key, value = (_gather_positions(x, shard) for x in (key, value))
    return key, value, TokenLayout(mask), start - shard.start, shard.start


def _gather_positions(x: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """Return `[B, total, W]` of the parts `[B, T, W]`."""
    filled = nn.functional.pad(x, (0, 0, 0, max(shard.lengths) - x.shape[1]))
    parts = zip(all_gather(filled, shard), shard.lengths, strict=True)
    return torch.cat([part[:, :length] for part, length in parts], dim=1)
