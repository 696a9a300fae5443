"""The checked inputs that Luna has beside those of `modeling_common`: positions, P, and what comes from an encoder."""

from typing import Any

import torch

from luna_mega.modeling_common.inputs import CheckedInputs, InputsMixin
from luna_mega.modeling_luna.cache_luna import LunaCache, LunaSeq2SeqCache


class LunaInputsMixin(InputsMixin):
    """The checked inputs of `LunaModel`."""

    forward_options = InputsMixin.forward_options | {"output_packed_attentions"}

    @property
    def embedding_width(self) -> int:
        """Width of `inputs_embeds`."""
        return self.config.hidden_size

    def own_cache(self, past: LunaCache | LunaSeq2SeqCache | None) -> LunaCache | None:
        """Return the part of a cache that is about the positions so far, None where there are none."""
        if past is None or not past.get_seq_length():
            return None
        return past.self_attention_cache if self.config.add_cross_attention else past

    def wants_weights(self, past: LunaCache | LunaSeq2SeqCache | None, options: dict[str, Any]) -> bool:
        """Return whether attention runs step by step, which has weights to return."""
        return self.is_asked("output_packed_attentions", options) or super().wants_weights(past, options)

    def find_restarts(
        self, position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, options: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return the positions where they tell ragged sequences apart, which nothing else does."""
        told = attention_mask is not None or options.get("cu_seq_lens_q") is not None
        return None if told else position_ids

    def check_cache(self, past: LunaCache | LunaSeq2SeqCache | None, batch: int, options: dict[str, Any]):
        """Refuse the cache of another model or batch."""
        if (cache := self.own_cache(past)) is None:
            return
        config, layers = self.config, cache.layers
        heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        heads //= self.decoder.layers[0].attention.all_heads.ranks
        given = tuple(layers[0].tensors["key_mean"].shape[:3])
        if given != (batch, heads, width) or len(layers) != config.num_hidden_layers:
            raise ValueError(
                f"past_key_values does not fit this model and batch: {len(layers)} layers with states of (batch, "
                f"heads, head size) {given}, needed are {config.num_hidden_layers} with {(batch, heads, width)}"
            )

    def number_positions(self, position_ids: torch.Tensor | None, inputs: CheckedInputs) -> torch.Tensor:
        """Return the position of every token, `[B or 1, T]`, or `[1, total]` of a ragged batch.

        A position counts the tokens before it that the mask keeps, so that neither side nor amount of padding matters.
        """
        embeddings, _, layout, past, _ = inputs
        if layout.is_ragged():
            if position_ids is None:
                position_ids = layout.locate(embeddings.shape[1])[1][None]
            else:
                position_ids = layout.gather(position_ids.expand(layout.shape))
        elif position_ids is None:
            if layout.mask is None:
                position_ids = torch.arange(embeddings.shape[1], device=embeddings.device)[None]
            else:
                position_ids = layout.mask.cumsum(dim=1) - 1
            if layout.shard is not None:
                position_ids = position_ids + layout.before()[:, None]
            if layout.mask is not None:
                position_ids = position_ids.clamp(min=0)
            if (cache := self.own_cache(past)) is not None:
                position_ids = position_ids + cache.layers[0].tensors["count"][:, None]
        self._check_positions(position_ids, layout.sizes(embeddings)[1], past)
        return position_ids

    def _check_positions(self, position_ids, length, past):
        """Refuse positions that are not in the table of learned ones."""
        table = self.config.max_position_embeddings
        length += 0 if past is None else past.get_seq_length()
        if self.config.position_embedding_type == "learned" and length > table:
            # With a cache the length counts padding, which has no positions.
            if past is None or (length := int(position_ids.max()) + 1) > table:
                raise ValueError(
                    f"sequences of length {length} exceed the {table} learned positions of the model; truncate the "
                    "input or train with a larger max_position_embeddings (max_target_positions of a decoder)"
                )

    def check_packed_states(self, states: torch.Tensor | None, mask: torch.Tensor | None, inputs: CheckedInputs):
        """Refuse a given P that is not `[B, L, d]`, or a mask that is not its."""
        if states is None:
            if mask is not None:
                raise ValueError("packed_mask is the mask of packed_states: give both, or neither")
            if self.config.add_cross_attention:
                raise ValueError("a decoder with add_cross_attention=True needs packed_states, the P of its encoder")
            return
        batch, width = inputs.layout.sizes(inputs.embeddings)[0], inputs.embeddings.shape[2]
        if states.dim() != 3 or states.shape[::2] != (batch, width):
            raise ValueError(f"packed_states must have the shape [{batch}, rows, {width}], got {list(states.shape)}")
        if mask is not None and mask.shape != states.shape[:2]:
            raise ValueError(
                f"packed_mask must have the shape {list(states.shape[:2])} of packed_states, got {list(mask.shape)}"
            )

    def check_context(
        self,
        context: torch.Tensor | None,
        mask: torch.Tensor | None,
        past: LunaCache | LunaSeq2SeqCache | None,
    ):
        """Refuse an encoder's output where there is no use for it, and its absence where there is."""
        if not self.config.add_cross_attention:
            if context is not None or mask is not None:
                raise ValueError("encoder_hidden_states needs a decoder with add_cross_attention=True")
        elif context is None and self.own_cache(past) is None:
            raise ValueError("a decoder with add_cross_attention=True needs encoder_hidden_states")
        elif context is not None and mask is not None and mask.shape != context.shape[:2]:
            raise ValueError(
                f"encoder_attention_mask must have the shape {list(context.shape[:2])} of encoder_hidden_states, got "
                f"{list(mask.shape)}"
            )
