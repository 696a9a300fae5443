"""What a Mega decoder remembers between calls: `MegaCache`, of constant size where attention is in chunks.

A decoder with cross-attention has a `MegaSeq2SeqCache`, which has the keys and values of the source as well.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from luna_mega.modeling_mega.configuration_mega import MegaConfig


class _StateLayer(CacheLayerMixin):
    """Tensors `[B, ...]`, the attributes named in `_fields`; None = nothing yet."""

    is_sliding = False
    supports_early_init = False
    _fields: tuple[str, ...]

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        """Forget everything."""
        for field in self._fields:
            setattr(self, field, None)
        self.is_initialized = False

    def store(self, **fields: torch.Tensor | None):
        """Replace fields."""
        for field, tensor in fields.items():
            setattr(self, field, tensor)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor):
        """Nothing to prepare: `store` brings the tensors."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        raise NotImplementedError("a Mega layer keeps more than keys and values; it calls `store`")

    def map(self, function):
        """Replace every tensor by `function` of it."""
        for field in self._fields:
            if (tensor := getattr(self, field)) is not None:
                setattr(self, field, function(tensor))

    def reorder_cache(self, beam_idx: torch.LongTensor):
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor):
        self.map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int):
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))


class MegaCacheLayer(_StateLayer):
    """The memory of one layer over the last W positions of B sequences.

    `average` `[B, D, N]`: states of the moving average. `keys` `[B, W, Z]`, `values` `[B, W, V]`, `mask` `[B, W]`: what
    attention can still reach, all positions or, with chunks, the last `chunk_size - 1`. `position` `[B]`: positions
    from a sequence's first token to the end, 0 = it has had none yet. With a truncated moving average also `inputs`
    `[B, truncation, D]`, the last of its inputs, and `forgotten` `[B, D, N]`, the states of those before.
    """

    _fields = ("average", "keys", "values", "mask", "position", "inputs", "forgotten")

    def reset(self):
        super().reset()
        self.seen = 0

    def extend(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the keys, values and mask of T positions, and keep the last `window` of all (None: all).

        Returns keys, values and mask of the W positions before and the T new ones, and the position `[B]` of the first
        of these in its sequence: below 0 where padding precedes the first token.
        """
        length, first = mask.shape[1], mask.int().argmax(dim=1)
        begun = first.new_zeros(len(mask)) if self.position is None else self.position
        start = torch.where(begun > 0, begun, -first)
        position = torch.where((begun > 0) | mask.any(dim=1), start + length, 0)
        if self.is_initialized:
            start = start - self.keys.shape[1]
            keys, values, mask = (
                torch.cat(pair, dim=1) for pair in ((self.keys, keys), (self.values, values), (self.mask, mask))
            )
        cut = 0 if window is None else max(keys.shape[1] - window, 0)
        self.store(position=position)
        # A copy, so that what is cut off is freed.
        self.store(
            **{
                name: x[:, cut:].clone() if cut else x
                for name, x in (("keys", keys), ("values", values), ("mask", mask))
            }
        )
        self.seen, self.is_initialized = self.seen + length, True
        return keys, values, mask, start

    def get_seq_length(self) -> int:
        """Positions seen, padding included."""
        return self.seen

    @property
    def batch_size(self) -> int | None:
        return len(self.position) if self.is_initialized else None

    def crop(self, max_length: int):
        """Refuse to forget the last positions: a moving average cannot be run backwards."""
        if max_length < 0:
            max_length += self.seen
        if max_length < self.seen:
            raise ValueError(
                f"a MegaCache cannot be cropped from {self.seen} to {max_length} positions: the moving average holds "
                "all of them; copy the cache before the positions that may have to go, or compute it anew"
            )


class MegaCrossCacheLayer(_StateLayer):
    """What one layer makes of B sources of S positions, once: `keys` `[B, S, Z]`, `values` `[B, S, D]`, and `mask`
    `[B, S]` (None = all)."""

    _fields = ("keys", "values", "mask")

    def get_seq_length(self) -> int:
        """S, 0 before the source has come."""
        return self.keys.shape[1] if self.is_initialized else 0


class MegaCache(Cache):
    """The `past_key_values` of a Mega decoder, one `MegaCacheLayer` per block; made empty, filled in place."""

    def __init__(self, config: MegaConfig):
        super().__init__(layers=[MegaCacheLayer() for _ in range(config.num_hidden_layers)])

    def detach(self):
        """Cut the graph: what was computed so far gets no gradient from what follows (truncated back-propagation)."""
        for layer in self.layers:
            layer.map(torch.Tensor.detach)


class MegaCrossCache(Cache):
    """The sources of a decoder with cross-attention, one `MegaCrossCacheLayer` per block."""

    def __init__(self, config: MegaConfig):
        super().__init__(layers=[MegaCrossCacheLayer() for _ in range(config.num_hidden_layers)])


class MegaSeq2SeqCache(EncoderDecoderCache):
    """The `past_key_values` of a decoder with cross-attention: a `MegaCache` and a `MegaCrossCache`.

    `config`: that of the decoder, for an encoder-decoder `config.decoder_config`.
    """

    def __init__(self, config: MegaConfig):
        super().__init__(MegaCache(config), MegaCrossCache(config))

    def check_dynamic_cache(self, method: str):
        """Nothing to refuse: both parts have every method of a cache."""


__all__ = ["MegaCache", "MegaCrossCache", "MegaSeq2SeqCache"]
