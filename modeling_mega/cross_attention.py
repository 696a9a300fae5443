"""Gated cross-attention: how a Mega decoder reads the source.

The paper evaluates it on WMT'16 (section 4.4) but does not write it down; it is that of the original code, from which
the Mega of transformers v4 has its names and parameters.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN

from luna_mega.kernels.api import gated_attention
from luna_mega.kernels.gated_attention import reference
from luna_mega.kernels.masks import drop_if_full
from luna_mega.modeling_mega.cache_mega import MegaCacheLayer, MegaCrossCacheLayer
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.parts import MegaDropout, MegaSequenceNorm, build_relative_bias, relative_bias, to_front


def _starts_late(mask: torch.Tensor | None) -> bool:
    """Whether padding precedes a first token; True as well where finding out is not free."""
    return mask is not None and drop_if_full(mask[:, :1]) is not None


def _places(mask: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
    """Positions of `[B, T, ...]` in the sequences themselves, `[B, T]`, below 0 in the padding before them; without a
    mask `[1, T]`."""
    positions = torch.arange(states.shape[1], device=states.device)
    return positions[None] if mask is None else positions - mask.int().argmax(dim=1, keepdim=True)


class MegaGatedCrossAttention(nn.Module):
    """u * act(W_h(A V * r)) + (1 - u) * x, with gates u and r and queries from x, keys and values from the source.

    The relative bias counts positions on both sides from the first token, wherever padding has put that.
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

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        encoder_mask: torch.Tensor | None,
        output_weights: bool = False,
        past: MegaCacheLayer | None = None,
        source: MegaCrossCacheLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[B, T, d]` and a source `[B, S, d]` -> `[B, T, d]`, and with `output_weights` weights `[B, 1, T, S]`.

        `past`, brought up to date already, tells where the sequences are; `source` keeps keys and values.
        """
        residual = hidden_states
        if self.config.normalize_before_mega:
            hidden_states = self.norm(hidden_states, mask)
        update, reset, query = self.q_proj(hidden_states).split(self.sizes, dim=-1)
        if source is not None and source.is_initialized:
            key, value, encoder_mask = source.keys, source.values, source.mask
        else:
            key, value = self.k_proj(encoder_hidden_states), self.activation(self.v_proj(encoder_hidden_states))
            if source is not None:
                source.store(keys=key, values=value, mask=encoder_mask, is_initialized=True)
        value = self.hidden_dropout(value)
        if output_weights or (past is not None and past.seen > query.shape[1]):
            attended, weights = self.attend_from(query, key, value, mask, encoder_mask, past)
        else:
            attended, weights = self.attend(query, key, value, mask, encoder_mask), None
        attended = self.dropout(self.activation(self.h_proj(attended * nn.functional.silu(reset))))
        # Under autocast the residual is wider than the other two, and lerp wants one dtype.
        output = torch.lerp(residual, attended.to(residual.dtype), update.to(residual.dtype).sigmoid())
        if not self.config.normalize_before_mega:
            output = self.norm(output, mask)
        return output, weights

    def attend(self, query, key, value, mask, encoder_mask):
        """Attention of whole targets, moved so that both sides begin at position 0."""
        move = _starts_late(mask)
        if move:
            query = to_front(query, mask)
        if _starts_late(encoder_mask):
            key, value, encoder_mask = (to_front(x, encoder_mask) for x in (key, value, encoder_mask))
        attended = gated_attention(
            query,
            key,
            value,
            relative_bias(self.config, self.rel_pos_bias, max(query.shape[1], key.shape[1])),
            function=self.config.attention_activation,
            mask=encoder_mask,
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
        )
        return to_front(attended, mask, back=True) if move else attended

    def attend_from(self, query, key, value, mask, encoder_mask, past):
        """Attention from wherever the queries are, which with `past` is behind it, and its weights `[B, 1, T, S]`."""
        new, key_places = query.shape[1], _places(encoder_mask, key)
        if past is None:
            places, longest = _places(mask, query), max(new, key.shape[1])
        else:
            places = past.position[:, None] + torch.arange(-new, 0, device=query.device)
            longest = max(past.seen, key.shape[1])
        bias = relative_bias(self.config, self.rel_pos_bias, longest)
        # Only padding has positions outside of the bias.
        lag = (key_places[:, None, :] - places[:, :, None]).clamp(1 - longest, longest - 1)
        function, dropout = self.config.attention_activation, self.config.attention_probs_dropout_prob
        with torch.autocast(value.device.type, enabled=False):
            wide = torch.promote_types(query.dtype, torch.float32)
            scores = query.to(wide) @ key.to(wide).transpose(1, 2)
            scores = scores / reference.divisor(query, key, encoder_mask, function, causal=False, offset=0)
            scores, padding = scores + bias.to(wide)[lag + longest - 1], None
            if encoder_mask is not None:
                padding = ~encoder_mask[:, None]
                scores = scores.masked_fill(padding, torch.finfo(wide).min)
            weights = scores.softmax(dim=-1) if function == "softmax" else getattr(reference, function)(scores)
            if padding is not None:
                weights = weights.masked_fill(padding, 0.0)
            weights = weights[:, None]
            attended = torch.dropout(weights.to(value.dtype), dropout, self.training) @ value[:, None]
        return attended[:, 0], weights
