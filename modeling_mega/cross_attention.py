"""Gated cross-attention of a Mega decoder.

The paper evaluates it on WMT'16 (section 4.4) but does not define it. This implementation follows the original code,
with the names and parameters of transformers v4.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from luna_mega.kernels.api import gated_attention
from luna_mega.kernels.support import is_exporting, longer
from luna_mega.modeling_common.layout import DenseLayout, Layout
from luna_mega.modeling_common.tensor_parallel import RankBoundary
from luna_mega.modeling_mega.cache_mega import MegaCacheLayer, MegaCrossCacheLayer
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.layers_mega import (
    MegaDropout,
    MegaSequenceNorm,
    build_relative_bias,
    restore_columns,
)


class MegaGatedCrossAttention(nn.Module):
    """Compute u * act(W_h(A V * r)) + (1 - u) * x: gates u, r and queries from x, keys and values from the source.

    In the relative bias, positions of source and target count from the first token after padding.
    """

    def __init__(self, config: MegaConfig):
        super().__init__()
        self.config = config
        width, shared = config.hidden_size, config.shared_representation_size
        self.sizes = (width, width, shared)
        self.norm = MegaSequenceNorm(config, config.norm_affine)
        self.k_proj = nn.Linear(width, shared)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, sum(self.sizes))
        self.h_proj = nn.Linear(width, width)
        self.rel_pos_bias = build_relative_bias(config, config.cross_positions)
        self.activation = ACT2FN[config.activation]
        self.dropout = MegaDropout(config.dropout_prob, config.use_feature_dropout)
        self.hidden_dropout = MegaDropout(config.hidden_dropout_prob, config.use_feature_dropout)
        self.whole, self.own_columns = RankBoundary(), RankBoundary()

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: Layout,
        encoder_hidden_states: torch.Tensor | None,
        encoder_layout: Layout,
        output_weights: bool = False,
        cache: MegaCacheLayer | None = None,
        cross_cache: MegaCrossCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return target states `[B, T, d]`, and with `output_weights` attention weights `[B, 1, T, S]`, else None.

        Args:
            hidden_states: States of the target, `[B, T, d]`, in `layout`.
            layout: Layout of the target.
            encoder_hidden_states: States of the source, `[B, S, d]`, in `encoder_layout`. None with a filled cache.
            encoder_layout: Layout of the source.
            output_weights: Return the attention weights.
            cache: Cache of the self-attention, which already contains the T positions.
            cross_cache: Cache of keys and values of the source.
        """
        residual = hidden_states
        if self.config.normalize_before_mega:
            hidden_states = self.norm(hidden_states, layout)
        update, reset, query = self.q_proj(hidden_states).split(self.sizes, dim=-1)
        reset, query = self.own_columns(nn.functional.silu(reset)), self.whole(query)
        if cross_cache is not None and cross_cache.is_initialized:
            key, value, encoder_layout = cross_cache.keys, cross_cache.values, DenseLayout(cross_cache.mask)
        else:
            key = self.whole(self.k_proj(encoder_hidden_states))
            value = self.activation(self.v_proj(encoder_hidden_states))
            if cross_cache is not None:
                cross_cache.store(keys=key, values=value, mask=encoder_layout.mask)
        value = self.hidden_dropout(value)
        positions, offset, row_offset = self.positions(query, key, layout, encoder_layout, cache)
        dropout, weights = self.config.attention_probs_dropout_prob if self.training else 0.0, None
        count = partial(self.count_tokens, query, key, layout, encoder_layout, cache)
        bias = self.whole(self.rel_pos_bias(positions, count=count))
        options: dict[str, Any] = {"mask": encoder_layout.mask, "offset": offset, "row_offset": row_offset}
        options |= {"function": self.config.attention_activation, "dropout": dropout}
        attended: Any = gated_attention(query, key, value, bias, return_weights=output_weights, **options)
        if output_weights:
            attended, weights = restore_columns(attended[0], attended[1], value, layout, encoder_layout, dropout)
        attended = self.dropout(self.activation(self.h_proj(attended * reset)))
        # Under autocast, the residual has a wider dtype, but lerp requires equal dtypes.
        output = torch.lerp(residual, attended.to(residual.dtype), update.to(residual.dtype).sigmoid())
        if not self.config.normalize_before_mega:
            output = self.norm(output, layout)
        return output, weights

    def count_tokens(
        self, query: torch.Tensor, key: torch.Tensor, layout: Layout, source: Layout, cache: MegaCacheLayer | None
    ) -> int:
        """Return the greatest number of tokens of a target or a source; arguments as in `positions`."""
        target = layout.counts() if cache is None else cache.position
        pairs = (target, query.shape[1]), (source.counts(), key.shape[1])
        return max(size if count is None else int(count.max()) for count, size in pairs)

    def positions(
        self, query: torch.Tensor, key: torch.Tensor, layout: Layout, source: Layout, cache: MegaCacheLayer | None
    ) -> tuple[int, int, torch.Tensor | None]:
        """Return the number of positions of the bias, and the `offset` and `row_offset` of the queries.

        If `cache` is given, the queries are the last positions of the sequences.
        """
        seen, start, source_start = query.shape[1], layout.start(), source.start()
        offset, positions = 0, longer(seen, key.shape[1])
        if cache is not None:
            start = cache.position - (seen if layout.lengths is None else layout.lengths)
            if not is_exporting():
                offset, positions = cache.seen - seen, max(cache.seen, key.shape[1])
                start = start - offset
            elif self.config.relative_positional_bias == "simple":
                positions = self.config.cross_positions
            else:  # a bound: lengths of exported programs are symbolic
                longest: Any = cache.position.max().item()
                torch._check(longest >= 1)
                positions = longest + key.shape[1]
        if source_start is None:
            return positions, offset, start
        return positions, offset, -source_start if start is None else start - source_start
