"""Luna language models: `LunaForCausalLM`, and the encoder-decoder `LunaForConditionalGeneration` (section 3.3)."""

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils.generic import ModelOutput, can_return_tuple

from luna_mega.compat import with_cache_alias
from luna_mega.modeling_common.arguments import HeadKwargs
from luna_mega.modeling_common.generation import Seq2SeqGenerationMixin, StateGenerationMixin
from luna_mega.modeling_common.heads import GenericForCausalLM
from luna_mega.modeling_common.label_checks import check_next_labels
from luna_mega.modeling_common.seq2seq import Seq2SeqBody, Seq2SeqLM
from luna_mega.modeling_luna.cache_luna import LunaCache
from luna_mega.modeling_luna.configuration_luna import LunaConfig, LunaSeq2SeqConfig
from luna_mega.modeling_luna.modeling_luna import LunaModelOutput, LunaPreTrainedModel


@with_cache_alias
@dataclass
class LunaCausalLMOutput(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` with the P of each layer, see `LunaModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None


@with_cache_alias
@dataclass
class LunaSeq2SeqModelOutput(Seq2SeqModelOutput):
    """`Seq2SeqModelOutput` of an encoder-decoder with S source and T target positions, and what Luna adds.

    Args:
        encoder_packed_last_hidden_state: `[B, L, d]`, P after the encoder.
        packed_last_hidden_state: `[B, L, d]`, P after the decoder; None with a filled cache.
        packed_mask: `[B, L]`, 1 = a row of both that is in use; None = all, or nothing was encoded.
        encoder_packed_hidden_states, packed_hidden_states: with `output_hidden_states=True`, P before the first layer
            and after each layer of encoder and decoder.
        cross_attentions, decoder_attentions, encoder_attentions: with `output_attentions=True`, weights over the rows
            of P, not over positions: `[B, heads, T, L]`, of the encoder `[B, heads, S, L]`.
        cross_packed_attentions: with `output_packed_attentions=True`, the pack weights of the source,
            `[B, pack heads, L, S]`; None with a filled cache.
    """

    packed_last_hidden_state: torch.FloatTensor | None = None
    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed_mask: torch.LongTensor | None = None
    encoder_packed_last_hidden_state: torch.FloatTensor | None = None
    encoder_packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    cross_packed_attentions: tuple[torch.FloatTensor, ...] | None = None


@with_cache_alias
@dataclass
class LunaSeq2SeqLMOutput(Seq2SeqLMOutput):
    """`Seq2SeqLMOutput` with the recorded states and attention weights of P, as in `LunaSeq2SeqModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    encoder_packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    cross_packed_attentions: tuple[torch.FloatTensor, ...] | None = None


class LunaForCausalLM(GenericForCausalLM, StateGenerationMixin, LunaPreTrainedModel):
    """Luna with a language-modeling head; generates at constant memory. Requires `is_decoder=True`.

    P is a parameter of each layer (section 3.3), unless `packed_states` is given, such as the
    `packed_last_hidden_state` of a `LunaModel` for a prefix.
    """

    _tied_weights_keys = {"lm_head.weight": "luna.embeddings.word_embeddings.weight"}
    output_class = LunaCausalLMOutput

    def check_config(self, config: LunaConfig) -> None:
        if not config.learns_causal_projection:
            raise ValueError(
                "LunaForCausalLM requires a configuration with is_decoder=True and add_cross_attention=False"
            )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        packed_states: torch.FloatTensor | None = None,
        packed_mask: torch.Tensor | None = None,
        past_key_values: LunaCache | None = None,
        use_cache: bool | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[HeadKwargs],
    ) -> LunaCausalLMOutput:
        """Predict the next token of each position from the inputs of `LunaModel.forward`.

        `labels` `[B, T]` are token ids, usually `input_ids`; the loss shifts them and ignores -100. The keyword
        argument `shift_labels` `[B, T]` replaces them: the token that follows each position, including the last.

        `logits` are `[B, T, vocab_size]`, restricted to the last `logits_to_keep` positions or to the positions in
        `logits_to_keep` if it is a tensor.

        Raises:
            ValueError: As in `LunaModel.forward`, and if labels do not match the positions of `logits_to_keep`.
        """
        options: dict[str, Any] = {**kwargs}
        shift_labels = options.pop("shift_labels", None)
        check_next_labels(input_ids, inputs_embeds, labels, shift_labels, logits_to_keep)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            packed_states=packed_states,
            packed_mask=packed_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **options,
        )
        return self.predict_next(
            outputs,
            labels,
            shift_labels,
            logits_to_keep,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **options,
        )


class LunaSeq2SeqModel(Seq2SeqBody, LunaPreTrainedModel):
    """Luna encoder-decoder without a head. The layers of the decoder continue from the P of the encoder.

    In addition to the arguments of `Seq2SeqBody`, `forward` accepts `decoder_position_ids` `[B, T]`, which start at 0,
    and `output_packed_attentions`. If `encoder_outputs` is a tuple, it contains
    `(token states, P, P mask, token mask)`; one or both masks can be omitted, first the P mask.
    """

    config_class = LunaSeq2SeqConfig
    _tied_weights_keys = {"decoder.embeddings.word_embeddings.weight": "encoder.embeddings.word_embeddings.weight"}
    encoder_output_class = LunaModelOutput
    body_output_class = LunaSeq2SeqModelOutput

    def read_outputs(self, outputs: ModelOutput | tuple[torch.Tensor, ...] | None) -> LunaModelOutput | None:
        if outputs is None or isinstance(outputs, LunaModelOutput):
            return outputs
        states = [value for value in outputs if isinstance(value, torch.Tensor)]
        if not 2 <= len(states) <= 4:
            raise ValueError(
                "`encoder_outputs` must be the LunaModelOutput of the encoder, or a tuple with the states of the "
                f"tokens and P, got a {type(outputs).__name__} with {len(states)} tensors"
            )
        names = ["last_hidden_state", "packed_last_hidden_state", "packed_mask", "attention_mask"]
        if len(states) == 3:
            names.remove("packed_mask")
        named: dict[str, Any] = dict(zip(names, states, strict=False))
        return LunaModelOutput(**named)

    def decoder_inputs(self, encoded: LunaModelOutput, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "position_ids": options.pop("decoder_position_ids", None),
            "packed_states": encoded.packed_last_hidden_state,
            "packed_mask": encoded.packed_mask,
        }

    def make_output(self, encoded: LunaModelOutput, decoded: LunaModelOutput, **fields: Any) -> Seq2SeqModelOutput:
        return super().make_output(
            encoded,
            decoded,
            packed_last_hidden_state=decoded.packed_last_hidden_state,
            packed_hidden_states=decoded.packed_hidden_states,
            packed_mask=encoded.packed_mask,
            encoder_packed_last_hidden_state=encoded.packed_last_hidden_state,
            encoder_packed_hidden_states=encoded.packed_hidden_states,
            cross_packed_attentions=decoded.packed_attentions,
            **fields,
        )


class LunaForConditionalGeneration(Seq2SeqLM, Seq2SeqGenerationMixin, LunaPreTrainedModel):
    """Luna encoder-decoder with a language-modeling head, for translation and other sequence-to-sequence tasks."""

    config_class = LunaSeq2SeqConfig
    body_class = LunaSeq2SeqModel
    _tied_weights_keys = {"lm_head.weight": "luna.decoder.embeddings.word_embeddings.weight"}
    output_class = LunaSeq2SeqLMOutput


__all__ = ["LunaForCausalLM", "LunaForConditionalGeneration", "LunaSeq2SeqModel"]
