"""Attention of Megalodon: rotary positions, and heads with causal attention within chunks."""

import math

import torch
from torch import nn

from luna_mega.kernels.support import upcast
from luna_mega.modeling_common.attention import attend
from luna_mega.modeling_common.layout import Layout
from luna_mega.modeling_common.tensor_parallel import RankBoundary
from luna_mega.modeling_megalodon.cache_megalodon import MegalodonCacheLayer
from luna_mega.modeling_megalodon.configuration_megalodon import MegalodonConfig

Rotation = tuple[torch.Tensor, torch.Tensor]


class MegalodonRotary(nn.Module):
    """Rotary position embedding: cosine and sine of the angles of every position within its chunk."""

    freqs: torch.Tensor

    def __init__(self, config: MegalodonConfig):
        super().__init__()
        self.chunk_size, self.base = config.chunk_size, config.rope_theta
        width = config.shared_representation_size // config.num_attention_heads
        # Persistent: checkpoints in half precision have different frequencies.
        self.register_buffer("freqs", self.frequencies(width))

    def frequencies(self, width: int) -> torch.Tensor:
        """Return the angles per position of `width / 2` pairs of features."""
        return 1.0 / self.base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)

    def forward(self, x: torch.Tensor, layout: Layout, cache: MegalodonCacheLayer | None) -> Rotation:
        """Return the two factors of `rotate`, `[B or 1, T, 1, z / 2 H, 2]`, for the positions of `x` after `cache`.

        The first factor is for the features of a pair, the second for the features of the pair in reverse order.
        """
        start = layout.start() if cache is None else cache.start(layout.mask)
        freqs, positions = upcast(self.freqs), layout.columns_from(start, x)
        angles = (positions % self.chunk_size)[..., None, None].to(freqs.dtype) * freqs
        cosine, sine = angles.cos(), angles.sin()
        return torch.stack((cosine, cosine), -1), torch.stack((-sine, sine), -1)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate pairs of adjacent features of every head of `[B, T, z]`."""
    cosine, sine = rotation
    pairs = upcast(x).unflatten(-1, (-1, *cosine.shape[-2:]))
    return torch.addcmul(pairs * cosine, pairs.flip(-1), sine).flatten(-3).to(x.dtype)


class MegalodonChunkAttention(nn.Module):
    """Causal attention of every head within chunks (section 3.4), counted from the first token of a sequence."""

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
        layout: Layout,
        rotation: Rotation,
        output_weights: bool = False,
        cache: MegalodonCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `[B, T, v]`, and with `output_weights` the weights `[B, H, chunks, C, C]`."""
        # The op divides scores by the square root of the width, but normalized attention does not.
        query, key = rotate(query, rotation) * math.sqrt(self.size), rotate(key, rotation)
        chunk, heads = self.chunk_size, query.shape[-1] // self.size
        if cache is None:
            window = layout.key_window(key, value, chunk)
        else:
            window = cache.extend(key, value, layout.mask, chunk)
        dropout = self.dropout if self.training else 0.0
        attended, weights = attend(query, window, heads, return_weights=output_weights, causal=True, dropout=dropout)
        return attended, self.all_heads.join_heads(weights) if output_weights else None
