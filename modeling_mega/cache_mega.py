"""Memory of a Mega decoder between calls: `MegaCache`, of constant size where attention is in chunks.

A decoder with cross-attention has a `MegaSeq2SeqCache`, which keeps the keys and values of the source as well.
"""

import torch
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.modeling_common.cache import StateCache, StateLayer, StateSeq2SeqCache
from luna_mega.modeling_common.key_cache import KeyValueCacheLayer


class MegaCacheLayer(KeyValueCacheLayer):
    """The memory of one block over B sequences: beside keys and values, states of the moving average.

    `average` `[B, D, N]`; with a truncated moving average also `inputs` `[B, truncation, D]`, the last of its inputs,
    and `forgotten` `[B, D, N]`, the states of those before.
    """

    fields = ("average", "keys", "values", "mask", "position", "inputs", "forgotten")


class MegaCrossCacheLayer(StateLayer):
    """The source in one block, computed once: `keys` `[B, S, Z]`, `values` `[B, S, D]`, `mask` `[B, S]` (None: all)."""

    fields = ("keys", "values", "mask")

    def get_seq_length(self) -> int:
        """Return S, 0 before the source has come."""
        return 0 if self.keys is None else self.keys.shape[1]


class MegaCache(StateCache):
    """The `past_key_values` of a Mega decoder without cross-attention."""

    layer_class = MegaCacheLayer

    def check(self, config: PreTrainedConfig, batch: int, ranks: int) -> None:
        layer = self.layers[0]
        # Comparing sizes would tie an exported program to the size of the example's cache.
        if not layer.is_initialized or torch.compiler.is_exporting():
            return
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
        if given != needed or len(self) != config.num_hidden_layers:
            raise ValueError(
                f"past_key_values does not fit this model and batch: {len(self)} layers with states, keys, values of "
                f"{given}, needed are {config.num_hidden_layers} with {needed} (batch size first)"
            )


class MegaCrossCache(StateCache):
    """The source of a Mega decoder with cross-attention."""

    layer_class = MegaCrossCacheLayer

    def check_source(self, config: PreTrainedConfig, batch: int, length: int | None, ranks: int) -> None:
        keys, values = self.layers[0].keys, self.layers[0].values
        length = keys.shape[1] if length is None else length
        needed = [(batch, length, config.shared_representation_size), (batch, length, config.hidden_size // ranks)]
        given = [tuple(keys.shape), tuple(values.shape)]
        if given != needed or len(self) != config.num_hidden_layers:
            raise ValueError(
                f"past_key_values has another source, of another batch or model: {len(self)} layers with keys and "
                f"values of {given}, needed are {config.num_hidden_layers} with {needed}; begin with a new cache"
            )


class MegaSeq2SeqCache(StateSeq2SeqCache):
    """The `past_key_values` of a Mega decoder with cross-attention: a `MegaCache` and a `MegaCrossCache`."""

    self_attention_class, cross_attention_class = MegaCache, MegaCrossCache


__all__ = ["MegaCache", "MegaCrossCache", "MegaSeq2SeqCache"]
