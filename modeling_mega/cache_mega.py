"""Caches of Mega decoders. Their size is constant if attention is in chunks."""

from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.modeling_common.attention import KeyValueCacheLayer
from luna_mega.modeling_common.cache import ANOTHER_SOURCE, StateCache, StateLayer, StateSeq2SeqCache


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

    def shapes(self, config: PreTrainedConfig, batch: int, ranks: int) -> tuple[str, Any, Any]:
        layer = self.layers[0]
        kept = max(layer.seen, layer.keys.shape[1]) if config.attention_chunk is None else config.attention_chunk
        needed = [
            (batch, config.hidden_size, config.ema_projection_size),
            (batch, kept, config.shared_representation_size),
            (batch, kept, config.intermediate_size // ranks),
        ]
        if config.truncation is not None:
            needed.append((batch, config.truncation, config.hidden_size))
        tensors = (layer.average, layer.keys, layer.values, layer.inputs)
        given = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
        return "states, keys and values", given, needed


class MegaCrossCache(StateCache):
    """Cache of the source of a Mega decoder with cross-attention."""

    layer_class = MegaCrossCacheLayer

    def check_source(self, config: PreTrainedConfig, batch: int, length: int | None, ranks: int) -> None:
        keys, values = self.layers[0].keys, self.layers[0].values
        length = keys.shape[1] if length is None else length
        needed = [(batch, length, config.shared_representation_size), (batch, length, config.hidden_size // ranks)]
        given = [tuple(keys.shape), tuple(values.shape)]
        self.require_shapes("keys and values", given, needed, config.num_hidden_layers, ANOTHER_SOURCE)


class MegaSeq2SeqCache(StateSeq2SeqCache):
    """Cache of a Mega decoder with cross-attention: a `MegaCache` and a `MegaCrossCache`."""

    self_attention_class, cross_attention_class = MegaCache, MegaCrossCache


__all__ = ["MegaCache", "MegaCrossCache", "MegaSeq2SeqCache"]
