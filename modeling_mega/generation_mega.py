"""Mega models for text generation: `MegaForCausalLM` and the encoder-decoder (section 4.4)."""

from typing import Any, Unpack

import torch
from torch import nn
from transformers import GenerationConfig, initialization as init
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from luna_mega.modeling_common.generation import Seq2SeqGenerationMixin, StateGenerationMixin
from luna_mega.modeling_common.heads import GenericForCausalLM, checked_loss
from luna_mega.modeling_common.label_checks import check_next_labels
from luna_mega.modeling_common.outputs import CausalLMOutputWithCrossAttentions, Seq2SeqLMOutput
from luna_mega.modeling_common.seq2seq import Seq2SeqBody, Seq2SeqLM
from luna_mega.modeling_mega.adaptive import MegaAdaptiveSoftmax
from luna_mega.modeling_mega.cache_mega import MegaCache, MegaSeq2SeqCache
from luna_mega.modeling_mega.configuration_mega import MegaConfig, MegaSeq2SeqConfig, check_tied_widths
from luna_mega.modeling_mega.modeling_mega import MegaModel, MegaPreTrainedModel

_WORDS = "embedding_layer.word_embeddings.weight"


class MegaForCausalLM(GenericForCausalLM, StateGenerationMixin, MegaPreTrainedModel):
    """Mega with a language-modeling head; generates at constant memory if attention is in chunks.

    Requires `is_decoder=True` and `bidirectional=False`.
    """

    _tied_weights_keys = {"lm_head.weight": f"mega.{_WORDS}"}
    output_class = CausalLMOutputWithCrossAttentions
    mega: MegaModel
    lm_head: Any  # nn.Linear or MegaAdaptiveSoftmax

    def check_config(self, config: MegaConfig) -> None:
        if not config.is_decoder:
            raise ValueError("MegaForCausalLM requires a configuration with is_decoder=True and bidirectional=False")

    def make_head(self, config: MegaConfig) -> None:
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.add_lm_hidden_dense_layer else None
        self.dropout = nn.Dropout(config.dropout_prob)
        if config.adaptive_softmax_cutoffs is None:
            check_tied_widths(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        else:
            self.lm_head = MegaAdaptiveSoftmax(config)
            self._tied_weights_keys = {}  # tied weights of an adaptive softmax have a single name

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer, or None for an adaptive softmax, which has several."""
        return None if self.config.adaptive_softmax_cutoffs is not None else super().get_output_embeddings()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; raise `ValueError` for a `forward` of TRL that would skip layers of the head."""
        code = getattr(value, "__code__", None)
        if name == "forward" and code is not None and "fused_lm_head" in code.co_varnames:
            adaptive = self.config.adaptive_softmax_cutoffs is not None
            if adaptive or self.dense is not None:
                what = "an adaptive softmax" if adaptive else "a dense layer (add_lm_hidden_dense_layer=True)"
                raise ValueError(f"TRL computes logits from lm_head.weight, but this model has {what}; use Trainer")
        super().__setattr__(name, value)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        past_key_values: MegaCache | MegaSeq2SeqCache | None = None,
        use_cache: bool | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithCrossAttentions:
        """Predict the next token of each position from the inputs of `MegaModel.forward`.

        `labels` `[B, T]` are token ids, usually `input_ids`; the loss shifts them and ignores -100. The keyword
        argument `shift_labels` `[B, T]` replaces them: the token that follows each position, including the last.

        `logits` are `[B, T, vocab_size]`, restricted to the last `logits_to_keep` positions or to the positions in
        `logits_to_keep` if it is a tensor. With an adaptive softmax they are log-probabilities, or None if labels are
        given.

        Raises:
            ValueError: As in `MegaModel.forward`, and if labels do not match the positions of `logits_to_keep`.
        """
        options: dict[str, Any] = {**kwargs}
        shift_labels = options.pop("shift_labels", None)
        check_next_labels(input_ids, inputs_embeds, labels, shift_labels, logits_to_keep)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
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
            **options,
        )

    def score_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.dropout(self._project(hidden_states)))

    def score_next(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        targets: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the loss and the logits. An adaptive softmax returns only one of the two, the loss if labels exist."""
        if self.config.adaptive_softmax_cutoffs is None:
            return super().score_next(hidden_states, labels, targets, **kwargs)
        hidden_states = self._project(hidden_states)
        # Not the module itself: accelerate moves modules in arguments, and fails if the weights are offloaded.
        embedding = self.mega.get_input_embeddings().__call__
        if targets is None:
            return None, self.lm_head(hidden_states.flatten(0, 1), embedding).unflatten(0, hidden_states.shape[:2])
        counted = targets != -100
        hidden_states, targets, count = hidden_states[counted], targets[counted], counted.sum()
        total = checked_loss(
            lambda: self.lm_head.loss(hidden_states, targets, embedding), targets, self.config.vocab_size
        )
        items = kwargs.get("num_items_in_batch")
        return total / (count if items is None else items), None

    def _project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states if self.dense is None else torch.tanh(self.dense(hidden_states))


class MegaSeq2SeqModel(Seq2SeqBody, MegaPreTrainedModel):
    """A Mega encoder and a Mega decoder with gated cross-attention, without a head.

    `cross_attentions` has one tensor `[B, 1, T, S]` per layer. Other attention weights are as in `MegaModel`.
    """

    config_class = MegaSeq2SeqConfig
    _tied_weights_keys = {f"decoder.{_WORDS}": f"encoder.{_WORDS}"}


class MegaForConditionalGeneration(Seq2SeqLM, Seq2SeqGenerationMixin, MegaPreTrainedModel):
    """Mega encoder-decoder with a language-modeling head, for translation and other sequence-to-sequence tasks."""

    config_class = MegaSeq2SeqConfig
    body_class = MegaSeq2SeqModel
    _tied_weights_keys = {"lm_head.weight": f"mega.decoder.{_WORDS}"}
    output_class = Seq2SeqLMOutput
    mega: MegaSeq2SeqModel
    lm_head: nn.Linear

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.lm_head:
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)

    def _prepare_cache_for_generation(
        self, config: GenerationConfig, model_kwargs: dict[str, Any], mode: GenerationMode, batch: int, length: int
    ) -> Any:
        """Prepare the cache; raise `ValueError` if targets could exceed the relative bias tables."""
        decoder = self.mega.decoder.config
        tables = [decoder.cross_positions, *([] if decoder.use_chunking else [decoder.max_positions])]
        if decoder.relative_positional_bias == "simple" and length > min(tables):
            raise ValueError(
                f"max_length={length + 1} requires {length} positions of the decoder, but its "
                f"relative bias has {min(tables)}; reduce max_length"
            )
        super()._prepare_cache_for_generation(config, model_kwargs, mode, batch, length)


__all__ = ["MegaForCausalLM", "MegaForConditionalGeneration", "MegaSeq2SeqModel"]
