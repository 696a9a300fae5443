"""Attention of Megalodon: rotary positions, and heads that attend causally within chunks."""

import math

import torch
from torch import nn
from torch.nn.functional import pad

from luna_mega.kernels.api import gated_attention, gated_attention_step
from luna_mega.modeling_common.layout import TokenLayout
from luna_mega.modeling_common.tensor_parallel import RankBoundary
from luna_mega.modeling_megalodon.cache_megalodon import MegalodonCacheLayer
from luna_mega.modeling_megalodon.configuration_megalodon import MegalodonConfig

Rotation = tuple[torch.Tensor, torch.Tensor]


def widen(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32, or float64 where it is that."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class MegalodonRotary(nn.Module):
    """Rotary position embedding: cosine and sine of the angles of every position within its chunk."""

    def __init__(self, config: MegalodonConfig):
        super().__init__()
        self.chunk_size, self.base = config.chunk_size, config.rope_theta
        width = config.shared_representation_size // config.num_attention_heads
        # Persistent, because the numbers of a checkpoint decide: a file in half precision has other ones.
        self.register_buffer("freqs", self.frequencies(width))

    def frequencies(self, width: int) -> torch.Tensor:
        """Return the angles per position of `width / 2` pairs of features."""
        return 1.0 / self.base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)

    def forward(self, x: torch.Tensor, layout: TokenLayout, past: MegalodonCacheLayer | None) -> Rotation:
        """Return what `rotate` needs, `[B or 1, T, 1, z / 2 H, 2]`, for positions of `x`, which follow those in `past`.

        Two factors for both features of a pair: of the features themselves, and of the pair the other way around.
        """
        start = layout.start() if past is None else past.start(layout.mask)
        if layout.is_ragged():
            row, position = layout.locate(x.shape[1])
            position = (position if start is None else position + start[row])[None]
        else:
            position = torch.arange(x.shape[1], device=x.device)[None]
            position = position if start is None else position + start[:, None]
        freqs = widen(self.freqs)
        angles = (position % self.chunk_size)[..., None, None].to(freqs.dtype) * freqs
        cosine, sine = angles.cos(), angles.sin()
        return torch.stack((cosine, cosine), -1), torch.stack((-sine, sine), -1)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate neighbouring features of every head of `[B, T, z]`."""
    cosine, sine = rotation
    pairs = widen(x).unflatten(-1, (-1, *cosine.shape[-2:]))
    return torch.addcmul(pairs * cosine, pairs.flip(-1), sine).flatten(-3).to(x.dtype)


def by_head(x: torch.Tensor, heads: int, ragged: bool = False) -> torch.Tensor:
    """Return the heads of `[B, T, H K]` as sequences, `[B H, T, K]`; of a ragged batch end to end, `[1, H T, K]`."""
    x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return x.flatten(1, 2) if ragged else x.flatten(0, 1)


class MegalodonChunkAttention(nn.Module):
    """Causal attention of every head within chunks (section 3.4), which count from a sequence's first token."""

    def __init__(self, config: MegalodonConfig):
        super().__init__()
        self.chunk_size, self.dropout = config.chunk_size, config.attention_probs_dropout_prob
        self.size = config.shared_representation_size // config.num_attention_heads
        self.all_heads = RankBoundary()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: TokenLayout,
        rotation: Rotation,
        output_weights: bool = False,
        past: MegalodonCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `[B, T, v]`, and with `output_weights` the weights `[B, H, chunks, C, C]`."""
        # The op divides scores by the root of the width, which normalized attention does not.
        query, key = rotate(query, rotation) * math.sqrt(self.size), rotate(key, rotation)
        if past is None:
            start = layout.start() if layout.parts.is_whole() else None  # chunks begin with a shard
            return self.attend(query, key, value, layout, start, 0, output_weights)
        reach = past.extend(key, value, layout.mask, self.chunk_size)
        if (ragged := reach.layout) is not None:
            attended, _ = self.attend(ragged.scatter(query), reach.keys, reach.values, ragged, None, 0, False)
            return ragged.gather(attended), None
        offset = reach.keys.shape[1] - query.shape[1]
        if query.shape[1] > 1 or output_weights:
            keys = (reach.keys, reach.values, TokenLayout(reach.mask), reach.start)
            return self.attend(query, *keys, offset, output_weights)
        return self.attend_last(query, reach), None

    def attend_last(self, query, reach):
        """Attend from one position, head by head: the cache has heads side by side, and is not copied."""
        heads, one_chunk = query.shape[-1] // self.size, reach.column is not None or reach.start is None
        options = {"chunk_size": None if one_chunk else self.chunk_size, "mask": reach.mask, "start": reach.start}
        options |= {"column": reach.column, "slots": reach.slots}
        options |= {"dropout": self.dropout if self.training else 0.0}
        parts = (x.chunk(heads, -1) for x in (query[:, 0], reach.keys, reach.values))
        return torch.cat([gated_attention_step(*part, **options) for part in zip(*parts, strict=True)], -1)[:, None]

    def attend(self, query, key, value, layout, start, offset, output_weights):
        """Attend from the column `offset` on to keys: their layout, and the position `start` `[B]` of the first."""
        length, heads, ragged = query.shape[1], query.shape[-1] // self.size, layout.is_ragged()
        options = {"causal": True, "chunk_size": self.chunk_size, "offset": offset, "return_weights": output_weights}
        options |= {"heads": heads, "dropout": self.dropout if self.training else 0.0}
        if ragged:
            before = torch.arange(heads, device=query.device)[:, None] * length
            bounds = pad((layout.cu_seqlens[:-1] + before).flatten(), (0, 1), value=heads * length)
            options |= {"cu_seqlens": bounds, "max_seqlen": layout.max_seqlen}
        else:
            rows = (None if x is None else x.repeat_interleave(heads, 0) for x in (layout.mask, start))
            options |= dict(zip(("mask", "start"), rows, strict=True))
        attended = gated_attention(*(by_head(x, heads, ragged) for x in (query, key, value)), **options)
        weights = None
        if output_weights:
            attended, weights = attended
            weights = self.all_heads.join_heads(weights)
        attended = attended.view(-1, heads, length, attended.shape[-1])
        return attended.transpose(1, 2).flatten(2), weights
