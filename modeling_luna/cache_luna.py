"""Memory of a Luna decoder between calls, of constant size: `LunaCache`, with an encoder `LunaSeq2SeqCache`."""

from luna_mega.modeling_common.cache import StateCache, StateLayer, StateSeq2SeqCache


class LunaCacheLayer(StateLayer):
    """The memory of one attention.

    Causal attention keeps its state (`key_mean` `[B, H, K, L]`, `value_mean` `[B, H, L, K]`, `count` `[B]`), and of P
    `pack_query` `[B, L, H, K]` and `pack_mask` `[B, L]`, None where all rows are in use. Cross-attention keeps the
    unpack `key` and `value` `[B, L, H, K]` of what it packed once.
    """

    fields = ("key_mean", "value_mean", "count", "pack_query", "pack_mask", "key", "value")


class LunaCache(StateCache):
    """The `past_key_values` of a Luna decoder without cross-attention."""

    layer_class = LunaCacheLayer


class LunaSeq2SeqCache(StateSeq2SeqCache):
    """The `past_key_values` of a Luna decoder with cross-attention: a `LunaCache` for each of its attentions."""

    target_class = source_class = LunaCache


__all__ = ["LunaCache", "LunaSeq2SeqCache"]
