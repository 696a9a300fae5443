"""Caches of Luna decoders, whose size is constant: `LunaCache`, and `LunaSeq2SeqCache` for encoder-decoders."""

import torch

from luna_mega.kernels.api import LunaCausalState
from luna_mega.modeling_common.cache import StateCache, StateLayer, StateSeq2SeqCache


class LunaCacheLayer(StateLayer):
    """State of one attention.

    Causal attention stores its state (`key_mean` `[B, H, K, L]`, `value_mean` `[B, H, L, K]`, `count` `[B]`), and of P
    `pack_query` `[B, L, H, K]` and `pack_mask` `[B, L]`, None if all rows are in use. Cross-attention stores the unpack
    `key` and `value` `[B, L, H, K]` of the packed source.
    """

    # Slots, see `StateLayer`. `_owned`: the state was computed without gradients, so that no graph contains it.
    __slots__ = ("_owned",)
    key: torch.Tensor
    value: torch.Tensor
    key_mean: torch.Tensor
    value_mean: torch.Tensor
    count: torch.Tensor
    pack_query: torch.Tensor
    fields = ("key_mean", "value_mean", "count", "pack_query", "pack_mask", "key", "value")

    @property
    def state(self) -> LunaCausalState:
        """Return the state of causal attention."""
        return LunaCausalState(self.key_mean, self.value_mean, self.count)

    def store_state(self, state: LunaCausalState, length: int) -> None:
        """Replace the state of causal attention after `length` more positions."""
        self.store(length, **state._asdict())
        self._owned = not torch.is_grad_enabled()

    def writes_over(self) -> bool:
        """Return whether a step may update this state in place: no gradient, program or other object requires it."""
        if self.is_static:
            return True
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not getattr(self, "_owned", False):
            return False
        return torch.is_inference_mode_enabled() or not self.key_mean.is_inference()


class LunaCache(StateCache):
    """Cache of a Luna decoder without cross-attention."""

    layer_class = LunaCacheLayer
    sized_by = ("hidden_size", "num_attention_heads", "projection_length")


class LunaSeq2SeqCache(StateSeq2SeqCache):
    """Cache of a Luna decoder with cross-attention: a `LunaCache` for self-attention and one for cross-attention."""

    self_attention_class = cross_attention_class = LunaCache


__all__ = ["LunaCache", "LunaSeq2SeqCache"]
