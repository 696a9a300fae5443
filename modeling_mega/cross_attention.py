"""Gated cross-attention of a Mega decoder.

The paper evaluates it on WMT'16 (section 4.4) but does not define it. This implementation follows the original code,
with the names and parameters of transformers v4.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN

from luna_mega.kernels.api import gated_attention
from luna_mega.modeling_common.layout import DenseLayout, Layout
from luna_mega.modeling_common.tensor_parallel import RankBoundary
from luna_mega.modeling_mega.cache_mega import MegaCacheLayer, MegaCrossCacheLayer
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.layers_mega import (
    MegaDropout,
    MegaSequenceNorm,
    build_relative_bias,
    relative_bias,
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
        """Attend from target states to a source.

        Args:
            hidden_states: states of the target, `[B, T, d]`.
            layout: layout of the target.
            encoder_hidden_states: states of the source, `[B, S, d]`; None if `cross_cache` is filled.
            encoder_layout: layout of the source.
            output_weights: return the attention weights.
            cache: cache of the self-attention, which contains the T positions already.
            cross_cache: cache of keys and values of the source.

        Returns:
            States `[B, T, d]`, and with `output_weights` attention weights `[B, 1, T, S]`, else None.
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
        attended, weights = self.attend(query, key, value, layout, encoder_layout, output_weights, cache)
        attended = self.dropout(self.activation(self.h_proj(attended * reset)))
        # Under autocast, the residual has a wider dtype, but lerp requires equal dtypes.
        output = torch.lerp(residual, attended.to(residual.dtype), update.to(residual.dtype).sigmoid())
        if not self.config.normalize_before_mega:
            output = self.norm(output, layout)
        return output, weights

    def attend(self, query, key, value, layout, encoder_layout, output_weights, cache):
        """Attend to the source. If `cache` is given, the queries are the last positions of the sequences."""
        seen, start, source_start = query.shape[1], layout.start(), encoder_layout.start()
        offset, positions = 0, max(seen, key.shape[1])
        if cache is not None:
            start = cache.position - (query.shape[1] if layout.lengths is None else layout.lengths)
        if cache is not None and torch.compiler.is_exporting():
            positions = self.exported_positions(cache, key)
        elif cache is not None:
            seen, offset = cache.seen, cache.seen - query.shape[1]
            start, positions = start - offset, max(seen, key.shape[1])
        row_offset = start
        if source_start is not None:
            row_offset = -source_start if start is None else start - source_start
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        attended = gated_attention(
            query,
            key,
            value,
            self.whole(relative_bias(self.config, self.rel_pos_bias, positions)),
            function=self.config.attention_activation,
            mask=encoder_layout.mask,
            offset=offset,
            row_offset=row_offset,
            dropout=dropout,
            return_weights=output_weights,
        )
        if not output_weights:
            return attended, None
        return restore_columns(*attended, value, layout, encoder_layout, dropout)

    def exported_positions(self, cache: MegaCacheLayer, key: torch.Tensor) -> int:
        """Return a bound on the lengths of source and target for exported programs, whose lengths are symbolic."""
        if self.config.relative_positional_bias == "simple":
            return self.config.cross_positions
        seen = cache.position.max().item()
        torch._check(seen >= 1)
        return seen + key.shape[1]
