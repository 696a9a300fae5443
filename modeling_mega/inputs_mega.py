"""The checked inputs that Mega has beside those of `modeling_common`: token types, caches, and the source."""

from typing import Any

import torch

from luna_mega.modeling_common.base import INPUT_NAMES
from luna_mega.modeling_common.inputs import CheckedInputs, InputsMixin
from luna_mega.modeling_common.layout import drop_if_full
from luna_mega.modeling_mega.cache_mega import MegaCache, MegaCrossCache, MegaSeq2SeqCache


class MegaInputsMixin(InputsMixin):
    """The checked inputs of `MegaModel`."""

    forward_options = InputsMixin.forward_options | {"position_ids"}

    @property
    def embedding_width(self) -> int:
        """Width of `inputs_embeds`, which a projection may bring to `hidden_size`."""
        config = self.config
        projected = config.input_type == "tokens" and config.adaptive_input_cutoffs is None
        return config.embedding_size if projected else config.hidden_size

    def embed_pictures(
        self, pixel_values: torch.Tensor, interpolate: bool, *others: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the embeddings of patches `[B, P, d]`, and the numbers of their rows and columns.

        Refuses pictures in a model of something else, or beside other inputs.
        """
        if self.config.input_type != "patches" or any(other is not None for other in others):
            raise ValueError(
                f"this model has input_type={self.config.input_type!r}: give exactly one of "
                f"{INPUT_NAMES[self.config.input_type]} and inputs_embeds"
            )
        patches = self.embedding_layer.patch_embeddings
        grid = patches.find_grid(pixel_values, interpolate)
        return patches(pixel_values), grid

    def check_token_types(self, token_type_ids: torch.LongTensor | None):
        """Refuse token types where there are no embeddings of them."""
        if token_type_ids is not None and not self.config.add_token_type_embeddings:
            raise ValueError("this model has add_token_type_embeddings=False: leave token_type_ids out")

    def wants_weights(self, past: MegaCache | MegaSeq2SeqCache | None, options: dict[str, Any]) -> bool:
        """Return whether attention runs step by step, which it does not from a filled cache on."""
        return super().wants_weights(past, options) and (past is None or not past.get_seq_length())

    def find_restarts(
        self, position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, options: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return the positions, which tell where ragged sequences begin and are of no other use."""
        if position_ids is not None and attention_mask is not None:
            raise ValueError(
                "Mega models take position_ids of ragged sequences only, which have no attention_mask: leave one out"
            )
        return position_ids

    def parts_of(self, past: MegaCache | MegaSeq2SeqCache | None) -> tuple[MegaCache | None, MegaCrossCache | None]:
        """Return the parts of a cache that are about the target and about the source."""
        if past is None or not self.config.add_cross_attention:
            return past, None
        return past.self_attention_cache, past.cross_attention_cache

    def check_cache(self, past: MegaCache | MegaSeq2SeqCache | None, batch: int, options: dict[str, Any]):
        """Refuse the cache of another model or batch, and weights of positions that are in a cache."""
        past, _ = self.parts_of(past)
        if past is None:
            return
        config, layer = self.config, past.layers[0]
        # Numbers in an exported program would tie it to caches like that of the example.
        if not layer.is_initialized or torch.compiler.is_exporting():
            return
        kept = max(layer.seen, layer.keys.shape[1]) if config.attention_chunk is None else config.attention_chunk
        values = config.intermediate_size // self.layers[0].mega_layer.own_columns.ranks
        expected = [
            (batch, config.hidden_size, config.ema_projection_size),
            (batch, kept, config.shared_representation_size),
            (batch, kept, values),
        ]
        if config.truncation is not None:
            expected.append((batch, config.truncation, config.hidden_size))
        tensors = (layer.average, layer.keys, layer.values, layer.inputs)
        given = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
        if given != expected or len(past) != config.num_hidden_layers:
            raise ValueError(
                f"past_key_values does not fit this model and batch: {len(past)} layers with states, keys, values of "
                f"{given}, needed are {config.num_hidden_layers} with {expected} (batch size first)"
            )
        if self.is_asked("output_attentions", options):
            raise ValueError("output_attentions=True goes with a new cache only; pass use_cache=False for the weights")

    def check_source(
        self,
        states: torch.Tensor | None,
        mask: torch.Tensor | None,
        sources: MegaCrossCache | None,
        inputs: CheckedInputs,
    ) -> torch.Tensor | None:
        """Return the mask of the source as bool `[B, S]`, or None; what a cache has of a source must fit."""
        if not self.config.add_cross_attention:
            if states is not None or mask is not None:
                raise ValueError("encoder_hidden_states need a decoder with add_cross_attention=True; leave them out")
            return None
        kept = None if sources is None or not sources.layers[0].is_initialized else sources.layers[0]
        if states is None and kept is None:
            raise ValueError("a decoder with add_cross_attention=True needs encoder_hidden_states [B, S, d]")
        batch, width = inputs.embeddings.shape[0], self.config.hidden_size
        length = (kept.keys if states is None else states).shape[1]
        if states is not None and (states.dim() != 3 or states.shape[::2] != (batch, width) or length == 0):
            raise ValueError(
                f"encoder_hidden_states must have the shape [{batch}, S, {width}], S at least 1, got "
                f"{list(states.shape)}"
            )
        if mask is not None and mask.shape != (batch, length):
            raise ValueError(f"encoder_attention_mask must have the shape {[batch, length]}, got {list(mask.shape)}")
        if kept is not None:
            values = width // self.layers[0].cross_attn.own_columns.ranks
            expected = [(batch, length, self.config.shared_representation_size), (batch, length, values)]
            given = [tuple(tensor.shape) for tensor in (kept.keys, kept.values)]
            if given != expected or len(sources) != self.config.num_hidden_layers:
                raise ValueError(
                    f"past_key_values has another source, of another batch or model: {len(sources)} layers with keys "
                    f"and values of {given}, needed are {self.config.num_hidden_layers} with {expected}; begin with a "
                    "new cache"
                )
        return None if mask is None else drop_if_full(mask.bool())
