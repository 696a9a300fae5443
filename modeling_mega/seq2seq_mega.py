"""The Mega encoder-decoder of the paper's machine translation (section 4.4): its body, and the model that generates."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple

from luna_mega.modeling_mega.cache_mega import MegaSeq2SeqCache
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.modeling_mega import MegaModel, MegaPreTrainedModel

_WORDS = "embedding_layer.word_embeddings.weight"


@MegaModel.register_encoder_decoder
class MegaSeq2SeqModel(MegaPreTrainedModel):
    """A Mega encoder and a Mega decoder with gated cross-attention, without a head."""

    _tied_weights_keys = {f"decoder.{_WORDS}": f"encoder.{_WORDS}"}

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        if not config.is_encoder_decoder:
            raise ValueError(f"{type(self).__name__} needs a configuration with is_encoder_decoder=True")
        self.encoder = MegaModel(config.encoder_config, add_pooling_layer=False)
        self.decoder = MegaModel(config.decoder_config, add_pooling_layer=False)
        if not config.shares_embeddings:
            self._tied_weights_keys = {}
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.encoder.set_input_embeddings(value)
        if self.config.shares_embeddings:
            self.decoder.set_input_embeddings(value)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        return _resize(self, self.decoder, super().resize_token_embeddings, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        past_key_values: MegaSeq2SeqCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode B sources of S positions, or take them as they are, and run the decoder over T positions of targets.

        Args:
            input_ids, inputs_embeds: the source, `[B, S]` tokens or `[B, S, d]` embeddings.
            attention_mask: `[B, S]`, 1 = keep. None = all positions, with `input_ids` all that are not `pad_token_id`.
            decoder_input_ids, decoder_inputs_embeds, decoder_attention_mask: the same of the target, `[B, T]`.
            encoder_outputs: what the encoder returned, in place of a source; `attention_mask` is still that of it.
            past_key_values: what was returned for the positions before these. It is changed in place, and has the
                source already.
            use_cache: return `past_key_values`. None = `config.use_cache`, but not in training.
            kwargs: `output_hidden_states`, `output_attentions`, `return_dict`.

        Returns:
            `last_hidden_state` `[B, T, d]`, `past_key_values` or None, `encoder_last_hidden_state` `[B, S, d]` (rows at
            padding are meaningless); `decoder_hidden_states`, `decoder_attentions`, `cross_attentions` N of
            `[B, 1, T, S]`, `encoder_hidden_states` and `encoder_attentions` where they are asked for.

        Raises:
            ValueError: as `MegaModel.forward`, of either side; a cache of another batch, source or model.
        """
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            raise ValueError("give exactly one of decoder_input_ids and decoder_inputs_embeds")
        for name in ("output_hidden_states", "output_attentions"):
            kwargs.setdefault(name, getattr(self.config, name))
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids != self.config.pad_token_id
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)
        elif not isinstance(encoder_outputs, ModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            past_key_values=past_key_values,
            use_cache=self.config.use_cache and not self.training if use_cache is None else use_cache,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


def _resize(model: MegaPreTrainedModel, decoder: MegaModel, resize, *args, **kwargs) -> nn.Embedding:
    """`resize`, the base class's, which knows of a source's embedding and an output layer, for the target's as well."""
    config = model.config
    if config.decoder_vocab_size not in (None, config.vocab_size):
        raise NotImplementedError(
            f"source and target have vocabularies of {config.vocab_size} and {config.decoder_vocab_size}, and one new "
            "size does not say which it is for: build a model with the new sizes and copy the rows"
        )
    if not config.shares_embeddings:
        decoder.resize_token_embeddings(*args, **kwargs)
    embeddings = resize(*args, **kwargs)
    if config.decoder_vocab_size is not None:
        config.decoder_vocab_size = config.vocab_size
    return embeddings


class MegaForConditionalGeneration(MegaPreTrainedModel, GenerationMixin):
    """The Mega encoder-decoder with an output layer: translation and other sequence-to-sequence tasks."""

    _tied_weights_keys = {"lm_head.weight": f"mega.encoder.{_WORDS}"}
    _is_stateful = True  # a moving average cannot go back, so no assisted decoding

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        self.mega = MegaSeq2SeqModel(config)
        decoder = self.mega.decoder.config
        self.lm_head = nn.Linear(decoder.hidden_size, decoder.vocab_size, bias=False)
        if not config.shares_embeddings:
            self._tied_weights_keys = {"lm_head.weight": f"mega.decoder.{_WORDS}"}
        self.loss_type = "ForMaskedLM"  # labels are those of the same positions
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if module is self.lm_head:
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        return _resize(self, self.mega.decoder, super().resize_token_embeddings, *args, **kwargs)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Labels `[B, T]`, -100 = padding on either side, one place to the right, behind `decoder_start_token_id`."""
        pad, start = self.config.pad_token_id, self.config.decoder_start_token_id
        first = (labels != -100).int().argmax(dim=1, keepdim=True)
        shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=pad)
        return shifted.masked_fill(shifted == -100, pad).scatter(1, first, start)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        past_key_values: MegaSeq2SeqCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """As `MegaSeq2SeqModel.forward`; `labels` `[B, T]`: the target's tokens, -100 = not counted.

        Without another target the decoder reads the labels, see `prepare_decoder_input_ids_from_labels`. `logits`:
        `[B, T, vocabulary of the target]`, or those of the last `logits_to_keep` positions, or of these positions.

        Raises `ValueError` as `MegaSeq2SeqModel.forward`, and for labels of other positions than those kept.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.mega(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            past_key_values,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.lm_head(outputs.last_hidden_state[:, kept]), None
        if labels is not None:
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels must have the shape {list(logits.shape[:2])} of the positions, with logits_to_keep of "
                    f"those kept, got {list(labels.shape)}"
                )
            labels = labels.contiguous()
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)

    def _prepare_model_inputs(self, *args, **kwargs):
        """Called by `generate`, which does not look for padding in a source."""
        source, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)
        model_kwargs.pop("labels", None)  # Seq2SeqTrainer passes the whole batch
        if source.shape[1] == 0:
            raise ValueError("the sources have length 0: give each a token, such as eos_token_id")
        if "logits_to_keep" in model_kwargs:  # under this name it does not go to the encoder
            model_kwargs["decoder_logits_to_keep"] = model_kwargs.pop("logits_to_keep")
        mask = model_kwargs.get("attention_mask")
        if mask is None:
            given = source != self.config.pad_token_id if name == "input_ids" else source.new_ones(source.shape[:2])
            mask = model_kwargs["attention_mask"] = given.long()
        if not (filled := mask.any(dim=1)).all():
            raise ValueError(
                f"nothing but padding in the sources {(~filled).nonzero().flatten().tolist()}: give each a token, such "
                "as eos_token_id"
            )
        return source, name, model_kwargs

    def _prepare_decoder_input_ids_for_generation(self, *args, **kwargs):
        """Called by `generate`, which tells by this mask what of a target `past_key_values` has already."""
        target, model_kwargs = super()._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        if "decoder_logits_to_keep" in model_kwargs:
            model_kwargs["logits_to_keep"] = model_kwargs.pop("decoder_logits_to_keep")
        if model_kwargs.get("decoder_attention_mask") is None:
            model_kwargs["decoder_attention_mask"] = (target != self.config.pad_token_id).long()
        past, length = model_kwargs.get("past_key_values"), model_kwargs["decoder_attention_mask"].shape[1]
        if past is not None and (seen := past.get_seq_length()) >= length:
            raise ValueError(
                f"past_key_values has {seen} positions already, and the target {length}: pass a new cache, or "
                "decoder_input_ids that go on from it"
            )
        return target, model_kwargs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, batch_size, max_cache_length):
        """Called by `generate`."""
        decoder = self.mega.decoder.config
        tables = [decoder.cross_positions, *([] if decoder.use_chunking else [decoder.max_positions])]
        if decoder.relative_positional_bias == "simple" and max_cache_length > min(tables):
            raise ValueError(
                f"max_length={max_cache_length + 1} needs {max_cache_length} positions of the decoder, whose bias "
                f"serves {min(tables)}: generate fewer tokens"
            )
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r}: a Mega decoder keeps its own "
                "MegaSeq2SeqCache; leave the argument out"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = MegaSeq2SeqCache(decoder)
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, max_cache_length)

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

    def init_continuous_batching(self, *args, **kwargs):
        """Refuse what needs a cache of keys and values alone; `generate` batches sources of any lengths."""
        raise NotImplementedError("continuous batching needs attention caches; call generate with a padded batch")

    generate_batch = init_continuous_batching


__all__ = ["MegaForConditionalGeneration", "MegaSeq2SeqModel"]
