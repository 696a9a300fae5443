"""Caches of Mega decoders. Their size is constant if attention is in chunks."""

import torch

from luna_mega.modeling_common.attention import KeyValueCacheLayer
from luna_mega.modeling_common.cache import StateCache, StateLayer, StateSeq2SeqCache


class MegaCacheLayer(KeyValueCacheLayer):
    """Recurrent state of one block for B sequences, and the visible keys and values.

    `average` `[B, D, N]` has the states of the moving average. If it is truncated, `inputs` `[B, truncation, D]` are
    its last inputs, and `forgotten` `[B, D, N]` the states of the inputs before them.
    """

    average: torch.Tensor | None
    inputs: torch.Tensor
    forgotten: torch.Tensor
    keys: torch.Tensor

    fields = ("average", "keys", "values", "mask", "position", "inputs", "forgotten")


class MegaCrossCacheLayer(StateLayer):
    """Source of the cross-attention of one block: `keys` `[B, S, Z]`, `values` `[B, S, D]`, `mask` `[B, S]` or None."""

    keys: torch.Tensor  # None before the source is stored
    values: torch.Tensor
    mask: torch.Tensor | None

    fields = ("keys", "values", "mask")

    def get_seq_length(self) -> int:
        """Return S, or 0 before the source is stored."""
        return 0 if self.keys is None else self.keys.shape[1]


class MegaCache(StateCache):
    """Cache of a Mega decoder without cross-attention, its `past_key_values`."""

    layer_class = MegaCacheLayer
    sized_by = (
        "hidden_size", "ema_projection_size", "attention_chunk", "shared_representation_size", "intermediate_size",
        "truncation",
    )  # fmt: skip


class MegaCrossCache(StateCache):
    """Cache of the source of a Mega decoder with cross-attention."""

    layer_class = MegaCrossCacheLayer
    sized_by = ("hidden_size", "shared_representation_size")


class MegaSeq2SeqCache(StateSeq2SeqCache):
    """Cache of a Mega decoder with cross-attention: a `MegaCache` and a `MegaCrossCache`."""

    self_attention_class, cross_attention_class = MegaCache, MegaCrossCache


__all__ = ["MegaCache", "MegaCrossCache", "MegaSeq2SeqCache"]
