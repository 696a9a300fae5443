"""Attention of sequences whose parts lie on several ranks: chunks must not be cut, full attention gathers all keys."""

from itertools import accumulate

import torch
from torch import nn

from luna_mega.kernels.context_parallel import ContextShard, all_gather
from luna_mega.modeling_common.layout import TokenLayout
from luna_mega.modeling_mega.configuration_mega import MegaConfig


def check_parts(layout: TokenLayout, config: MegaConfig):
    """Raise `ValueError` on every rank for what sequences that ranks share do not have, and for a chunk that is cut."""
    if layout.shard is None:
        return
    if config.input_type == "patches":
        raise ValueError("cp_group does not share pictures: leave it out")
    if config.add_cross_attention:
        raise ValueError("a decoder with add_cross_attention=True takes no cp_group: leave it out")
    if config.truncation is not None and config.truncation < layout.shard.total:
        raise ValueError(
            f"with cp_group an average never forgets, and truncation={config.truncation} is below the length "
            f"{layout.shard.total}: set truncation=None in the configuration, or leave cp_group out"
        )
    if (chunk := config.attention_chunk) is None:
        return
    borders, first = list(accumulate(layout.shard.lengths))[:-1], layout.first.tolist()
    if any(border > start and (border - start) % chunk for border in borders for start in first):
        raise ValueError(
            f"parts that end at {borders} cut attention chunks of {chunk} positions, which count from the first tokens "
            f"at {sorted(set(first))}: pad on the right and cut with shard_sequence(batch, group, multiple={chunk})"
        )
    if config.padded_batch_statistics and any(first):
        raise ValueError(
            "with cp_group and attention in chunks, padded_batch_statistics=True cannot count the padding on the left, "
            f"where sequences begin at {sorted(set(first))}: pad on the right"
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
