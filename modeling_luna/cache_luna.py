"""What a Luna decoder remembers between calls, of constant size: `LunaCache`, with an encoder `LunaSeq2SeqCache`."""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from luna_mega.modeling_luna.configuration_luna import LunaConfig


class LunaCacheLayer(CacheLayerMixin):
    """The memory of one attention over B sequences: `tensors`, by name, every one with the batch first.

    Causal attention keeps its state (`key_mean` `[B, H, K, L]`, `value_mean` `[B, H, L, K]`, `count` `[B]`), and of P
    `pack_query` `[B, L, H, K]` and `pack_mask` `[B, L]`, absent where all rows are in use. Cross-attention keeps the
    unpack `key` and `value` `[B, L, H, K]` of what it packed once.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        """Forget everything."""
        self.tensors, self.seen, self.is_initialized = {}, 0, False

    def store(self, length: int, **tensors: torch.Tensor | None):
        """Add or replace tensors (None is left out) after `length` more positions."""
        self.tensors |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.seen, self.is_initialized = self.seen + length, True

    def get_seq_length(self) -> int:
        """Positions seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int | None:
        return len(next(iter(self.tensors.values()))) if self.is_initialized else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor):
        """Nothing to prepare: `store` brings the tensors."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        raise NotImplementedError("a Luna layer keeps more than keys and values; it calls `store`")

    def crop(self, max_length: int):
        """Refuse to forget the last positions: their sums cannot be taken apart."""
        if max_length < 0:
            max_length += self.seen
        if max_length < self.seen:
            raise ValueError(
                f"a LunaCache cannot be cropped from {self.seen} to {max_length} positions: it holds sums over all of "
                "them; copy the cache before the positions that may have to go, or compute it anew"
            )

    def map(self, function):
        """Replace every tensor by `function` of it."""
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}

    def reorder_cache(self, beam_idx: torch.LongTensor):
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor):
        self.map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int):
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))


class LunaCache(Cache):
    """The `past_key_values` of a Luna decoder, one `LunaCacheLayer` per layer; made empty, filled in place."""

    def __init__(self, config: LunaConfig):
        super().__init__(layers=[LunaCacheLayer() for _ in range(config.num_hidden_layers)])

    def detach(self):
        """Cut the graph: what was computed so far gets no gradient from what follows (truncated back-propagation)."""
        for layer in self.layers:
            layer.map(torch.Tensor.detach)


class LunaSeq2SeqCache(EncoderDecoderCache):
    """The `past_key_values` of the decoder of an encoder-decoder: a `LunaCache` for each of its attentions.

    Args:
        config: of the decoder (`LunaConfig.decoder_config`).
    """

    def __init__(self, config: LunaConfig):
        super().__init__(LunaCache(config), LunaCache(config))

    def check_dynamic_cache(self, method: str):
        """Everything that transformers asks this of works with a `LunaCache`, or says why not."""


__all__ = ["LunaCache", "LunaSeq2SeqCache"]
