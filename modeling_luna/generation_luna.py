"""Luna models that write: `LunaForCausalLM`, and with an encoder `LunaForConditionalGeneration` (section 3.3)."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from luna_mega.modeling_luna.cache_luna import LunaCache, LunaSeq2SeqCache
from luna_mega.modeling_luna.configuration_luna import LunaConfig
from luna_mega.modeling_luna.modeling_luna import LunaModel, LunaModelOutput, LunaPreTrainedModel


@dataclass
class LunaCausalLMOutput(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` with the P of each layer, see `LunaModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class LunaSeq2SeqModelOutput(Seq2SeqModelOutput):
    """`Seq2SeqModelOutput` of an encoder-decoder with S source and T target positions, and what Luna adds.

    Args:
        encoder_packed_last_hidden_state: `[B, L, d]`, the P that the encoder gives to the decoder.
        packed_last_hidden_state: `[B, L, d]`, P behind the decoder; None with a filled cache.
        packed_mask: `[B, L]`, 1 = a row of both that is in use; None = all are, or nothing was encoded.
        encoder_packed_hidden_states, packed_hidden_states: with `output_hidden_states=True`, P as it is given to the
            first layer and leaves each layer of encoder and decoder.
        cross_attentions, decoder_attentions, encoder_attentions: with `output_attentions=True`, weights over the rows
            of P, not over positions: `[B, heads, T, L]`, of the encoder `[B, heads, S, L]`.
        cross_packed_attentions: with `output_packed_attentions=True`, the weights of the source in these rows,
            `[B, pack heads, L, S]`; None with a filled cache.
    """

    packed_last_hidden_state: torch.FloatTensor | None = None
    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed_mask: torch.LongTensor | None = None
    encoder_packed_last_hidden_state: torch.FloatTensor | None = None
    encoder_packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    cross_packed_attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class LunaSeq2SeqLMOutput(Seq2SeqLMOutput):
    """`Seq2SeqLMOutput` with what was recorded of P, see `LunaSeq2SeqModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    encoder_packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    cross_packed_attentions: tuple[torch.FloatTensor, ...] | None = None


class LunaGenerationMixin(GenerationMixin):
    """What `generate` has to know of a Luna decoder."""

    _is_stateful = True  # sums over tokens cannot go back, so no assisted decoding

    def _prepare_model_inputs(self, *args, **kwargs):
        """Called by `generate`."""
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)
        if inputs.shape[1] == 0:
            raise ValueError("the prompts have length 0: give each a token, or no input_ids to begin with bos_token_id")
        return inputs, name, model_kwargs

    def _prepare_decoder_input_ids_for_generation(self, *args, **kwargs):
        """Called by `generate`, of an encoder-decoder."""
        target, model_kwargs = super()._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        past = model_kwargs.get("past_key_values")
        if past is not None and (seen := past.get_seq_length()) >= target.shape[1]:
            raise ValueError(
                f"past_key_values has {seen} positions already, and the target {target.shape[1]}: pass a new cache, or "
                "decoder_input_ids that go on from it"
            )
        return target, model_kwargs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        """Called by `generate`."""
        encoded = model_kwargs.get("encoder_outputs")
        mask = model_kwargs.get("attention_mask", None if encoded is None else encoded.attention_mask)
        if mask is not None and not (filled := mask.any(dim=1)).all():
            raise ValueError(
                f"nothing but padding in the sequences {(~filled).nonzero().flatten().tolist()}: give each a token, "
                "such as bos_token_id or eos_token_id"
            )
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r}: a Luna decoder keeps its own cache, "
                "already of constant size; leave the argument out"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            config = self.config
            seq2seq = config.is_encoder_decoder
            model_kwargs["past_key_values"] = LunaSeq2SeqCache(config.decoder_config) if seq2seq else LunaCache(config)
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)

    def init_continuous_batching(self, *args, **kwargs):
        """Refuse what needs a cache of keys and values alone; `generate` batches prompts of any lengths."""
        raise NotImplementedError("continuous batching needs attention caches; call generate with a padded batch")

    generate_batch = init_continuous_batching


class LunaForCausalLM(LunaGenerationMixin, LunaPreTrainedModel):
    """Luna with a language-modelling head; generates at constant memory. Needs `is_decoder=True`.

    P is a parameter of every layer (section 3.3), or given as `packed_states`, such as the `packed_last_hidden_state`
    of a `LunaModel` that has read a prefix.
    """

    _tied_weights_keys = {"lm_head.weight": "luna.embeddings.word_embeddings.weight"}

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        if not config.learns_causal_projection:
            raise ValueError("LunaForCausalLM needs a configuration with is_decoder=True and add_cross_attention=False")
        self.luna = LunaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module):
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        packed_states: torch.FloatTensor | None = None,
        packed_mask: torch.Tensor | None = None,
        past_key_values: LunaCache | None = None,
        use_cache: bool | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaCausalLMOutput:
        """As `LunaModel.forward`; `labels` `[B, T]`: the tokens themselves (the loss shifts them), -100 = not counted.

        The keyword `shift_labels` `[B, T]` in place of `labels`: the token that follows each position, also the last.
        `logits`: `[B, T, vocab_size]`, or those of the last `logits_to_keep` positions, or of these positions.

        Raises `ValueError` as `LunaModel.forward`, and for labels of other positions than those kept.
        """
        shift_labels = kwargs.pop("shift_labels", None)  # as a parameter, Trainer would take it for a second label
        outputs = self.luna(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            packed_states=packed_states,
            packed_mask=packed_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(_kept(outputs.last_hidden_state, logits_to_keep))
        loss = None
        targets = labels if shift_labels is None else shift_labels
        if targets is not None:
            if targets.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels must have the shape {list(logits.shape[:2])} of the positions, with logits_to_keep of "
                    f"those kept, got {list(targets.shape)}"
                )
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels.contiguous()
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return LunaCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            packed_hidden_states=outputs.packed_hidden_states,
        )

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, inputs_embeds=None, **kwargs):
        """Called by `generate`, which drops a mask that keeps everything; in `forward` its absence drops padding."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        if attention_mask is None:
            given = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            inputs["attention_mask"] = given.new_ones(given.shape[:2], dtype=torch.long)
        return inputs


def _kept(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    return hidden_states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]


@LunaModel.register_encoder_decoder
class LunaSeq2SeqModel(LunaPreTrainedModel):
    """Luna encoder-decoder without a head: the decoder's P is the encoder's, and goes on through its layers."""

    _tied_weights_keys = {"decoder.embeddings.word_embeddings.weight": "encoder.embeddings.word_embeddings.weight"}

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        if not config.is_encoder_decoder:
            raise ValueError(f"{type(self).__name__} needs a configuration with is_encoder_decoder=True")
        if not config.shares_embeddings:
            self._tied_weights_keys = {}
        self.encoder = LunaModel(config.encoder_config)
        self.decoder = LunaModel(config.decoder_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.encoder.set_input_embeddings(value)
        if self.config.shares_embeddings:
            self.decoder.set_input_embeddings(value)

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return self.encoder if modality is None else super().get_encoder(modality)

    def get_decoder(self) -> nn.Module:
        return self.decoder

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: LunaModelOutput | None = None,
        past_key_values: LunaSeq2SeqCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaSeq2SeqModelOutput:
        """Encode B sources of S positions and decode B targets of T positions.

        Args:
            input_ids, attention_mask, inputs_embeds: of the source, `[B, S]`, `[B, S]`, `[B, S, d]`, as in
                `LunaModel.forward`.
            decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds, decoder_position_ids: of the target, which
                begins with `decoder_start_token_id`; masks as in `LunaModel.forward`.
            encoder_outputs: what the encoder returned for this source, in place of the source.
            past_key_values: what was returned for the target positions before these; it holds what came from the
                encoder, so that the source may be left out.
            use_cache: return `past_key_values`. None = `config.use_cache`, but not in training.
            kwargs: `output_hidden_states`, `output_attentions`, `output_packed_attentions`, `return_dict`.

        Raises:
            ValueError: as `LunaModel.forward`; `encoder_outputs` that are no `LunaModelOutput`.
        """
        decoded = past_key_values is not None and past_key_values.get_seq_length() > 0
        for name in ("output_hidden_states", "output_attentions"):  # both sides have configurations of their own
            kwargs.setdefault(name, getattr(self.config, name))
        recording = {name: value for name, value in kwargs.items() if name.startswith("output_")}
        if encoder_outputs is None and not (decoded and input_ids is None and inputs_embeds is None):
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **recording)
        elif encoder_outputs is None:
            encoder_outputs = LunaModelOutput()
        elif not isinstance(encoder_outputs, LunaModelOutput):
            raise ValueError(
                f"encoder_outputs must be the LunaModelOutput of the encoder, got a {type(encoder_outputs).__name__}"
            )
        context = encoder_outputs.last_hidden_state
        outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            position_ids=decoder_position_ids,
            packed_states=encoder_outputs.packed_last_hidden_state,
            packed_mask=encoder_outputs.packed_mask,
            encoder_hidden_states=context,
            encoder_attention_mask=encoder_outputs.attention_mask if attention_mask is None else attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        return LunaSeq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=context,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            packed_last_hidden_state=outputs.packed_last_hidden_state,
            packed_hidden_states=outputs.packed_hidden_states,
            packed_mask=encoder_outputs.packed_mask,
            encoder_packed_last_hidden_state=encoder_outputs.packed_last_hidden_state,
            encoder_packed_hidden_states=encoder_outputs.packed_hidden_states,
            cross_packed_attentions=outputs.packed_attentions,
        )


class LunaForConditionalGeneration(LunaGenerationMixin, LunaPreTrainedModel):
    """Luna encoder-decoder with a language-modelling head, for translation and the like."""

    _tied_weights_keys = {"lm_head.weight": "luna.decoder.embeddings.word_embeddings.weight"}

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        self.luna = LunaSeq2SeqModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.decoder_config.vocab_size, bias=False)
        if config.shares_embeddings:
            self._tied_weights_keys = {"lm_head.weight": "luna.encoder.embeddings.word_embeddings.weight"}
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return self.luna.get_encoder(modality)

    def get_decoder(self) -> nn.Module:
        return self.luna.get_decoder()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module):
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Resize a vocabulary that source and target have in common, wherever it has embeddings."""
        if self.config.decoder_vocab_size not in (None, self.config.vocab_size):
            raise NotImplementedError(
                "source and target have vocabularies of their own, and it is not said which to resize: replace the "
                "embeddings by get_encoder().set_input_embeddings, or those of get_decoder() and set_output_embeddings"
            )
        embedding = super().resize_token_embeddings(*args, **kwargs)
        if not self.config.shares_embeddings:
            self.get_decoder().resize_token_embeddings(*args, **kwargs)
        self.config.decoder_vocab_size = None
        return embedding

    def _update_finished_beams(self, *, topk_log_probs, next_token_hits_stopping_criteria, early_stopping, **state):
        """Called by beam search. With `early_stopping=True` the first `num_beams` that are complete remain, as in
        fairseq: transformers lets those that complete last, where more do than there is room for, displace others."""
        if early_stopping is True:
            complete = next_token_hits_stopping_criteria & state["top_num_beam_mask"]
            order = topk_log_probs.masked_fill(~complete, float("-inf")).argsort(dim=1, descending=True)
            room = (~state["is_sent_finished"]).sum(dim=1, keepdim=True)
            next_token_hits_stopping_criteria = complete & (order.argsort(dim=1) < room)
        return super()._update_finished_beams(
            topk_log_probs=topk_log_probs,
            next_token_hits_stopping_criteria=next_token_hits_stopping_criteria,
            early_stopping=early_stopping,
            **state,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Decoder inputs `[B, T]` for labels `[B, T]`: shifted by one behind `decoder_start_token_id`."""
        shifted = labels.new_full(labels.shape, self.config.decoder_start_token_id)
        shifted[:, 1:] = labels[:, :-1]
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: LunaModelOutput | None = None,
        past_key_values: LunaSeq2SeqCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaSeq2SeqLMOutput:
        """As `LunaSeq2SeqModel.forward`; `labels` `[B, T]`: the target with its `</s>`, -100 = not counted.

        Without decoder inputs the labels, shifted by one, are those. `logits`: `[B, T, target tokens]`, or those
        of the last `logits_to_keep` positions, or of these positions.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        outputs = self.luna(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(_kept(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels must have the shape {list(logits.shape[:2])} of the target positions, with "
                    f"logits_to_keep of those kept, got {list(labels.shape)}"
                )
            loss = ForMaskedLMLoss(logits.flatten(0, 1), labels.flatten(), logits.shape[-1], num_items_in_batch)
        return LunaSeq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
            packed_hidden_states=outputs.packed_hidden_states,
            encoder_packed_hidden_states=outputs.encoder_packed_hidden_states,
            cross_packed_attentions=outputs.cross_packed_attentions,
        )


__all__ = ["LunaForCausalLM", "LunaForConditionalGeneration", "LunaSeq2SeqModel"]
