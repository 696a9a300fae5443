"""Luna with a masked-LM head, and with classification heads for sequences, pairs, choices, tokens and answers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from luna_mega.kernels.api import luna_unpack
from luna_mega.modeling_common.arguments import HeadKwargs
from luna_mega.modeling_common.heads import (
    GenericForMaskedLM,
    GenericForQuestionAnswering,
    GenericForTokenClassification,
)
from luna_mega.modeling_common.label_checks import check_span, check_token_labels
from luna_mega.modeling_common.pooled_heads import (
    GenericForMultipleChoice,
    GenericForSequenceClassification,
    GenericForSequencePairClassification,
    PooledHead,
)
from luna_mega.modeling_common.pooling import first_token, masked_mean
from luna_mega.modeling_luna.configuration_luna import LunaConfig
from luna_mega.modeling_luna.modeling_luna import LunaModel, LunaModelOutput, LunaPreTrainedModel


@dataclass
class LunaPackedOutputs:
    """P and the attention that packs it, of each layer, in the outputs of heads; see `LunaModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed_attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class LunaMaskedLMOutput(LunaPackedOutputs, MaskedLMOutput):
    """`MaskedLMOutput` with `LunaPackedOutputs`."""


@dataclass
class LunaSequenceClassifierOutput(LunaPackedOutputs, SequenceClassifierOutput):
    """`SequenceClassifierOutput` with `LunaPackedOutputs`."""


@dataclass
class LunaMultipleChoiceOutput(LunaPackedOutputs, MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with `LunaPackedOutputs`."""


@dataclass
class LunaTokenClassifierOutput(LunaPackedOutputs, TokenClassifierOutput):
    """`TokenClassifierOutput` with `LunaPackedOutputs`."""


@dataclass
class LunaQuestionAnsweringOutput(LunaPackedOutputs, QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with `LunaPackedOutputs`."""


class LunaLMHead(nn.Module):
    """Masked-LM head: dense, activation, LayerNorm, decoder."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        width = cast(int, config.embedding_size)
        self.dense = nn.Linear(config.hidden_size, width)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(width, config.vocab_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.layer_norm(self.activation(self.dense(hidden_states))))


class LunaForMaskedLM(GenericForMaskedLM, LunaPreTrainedModel):
    """Luna with a masked-language-modeling head (`luna_bert` of the original code)."""

    _tied_weights_keys = {"lm_head.decoder.weight": "luna.embeddings.word_embeddings.weight"}
    _tp_plan = {"lm_head.decoder": "colwise_gather_output"}
    _keys_to_ignore_on_load_unexpected = [r"^pooler\.", r"^classifier\."]
    output_class = LunaMaskedLMOutput
    output_layer = "lm_head.decoder"

    def make_head(self, config: LunaConfig) -> None:
        self.lm_head = LunaLMHead(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> LunaMaskedLMOutput:
        """Predict tokens from the inputs of `LunaModel.forward`.

        `labels`: `[B, T]` tokens, -100 = not predicted. `logits`: `[B, T, vocab_size]`; in training with
        `sparse_prediction` there are logits of the M predicted positions only, `[M, vocab_size]`.
        """
        if labels is not None:
            check_token_labels(input_ids, inputs_embeds, labels=labels)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        return self.predict_tokens(outputs, labels, input_ids, attention_mask, **kwargs)


class LunaPoolerAttention(nn.Module):
    """Multi-head attention of one query to the packed sequence."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, query: torch.Tensor, packed: torch.Tensor, packed_mask: torch.Tensor | None) -> torch.Tensor:
        query = self.q_proj(query)[:, None].unflatten(-1, (self.num_heads, -1))
        key, value = (proj(packed).unflatten(-1, (self.num_heads, -1)) for proj in (self.k_proj, self.v_proj))
        attended: Any = luna_unpack(query, key, value, packed_mask)
        return self.out_proj(attended.flatten(2)[:, 0])


class LunaPooler(nn.Module):
    """Sequence vector `[B, d]` of tokens or packed sequence, by `config.pooling` (heads of `luna_bert` and LRA)."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.pooling = config.pooling
        self.reads_tokens = config.pooling not in ("packed_max", "packed_mean")
        self.reads_packed = config.pooling.startswith("packed")
        self.pool_padding = config.pool_padding
        if self.pooling == "packed_max":
            self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        elif self.pooling == "packed_attention":
            self.attention = LunaPoolerAttention(config)
            self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, outputs: LunaModelOutput, mask: torch.Tensor | None) -> torch.Tensor:
        """Return `[B, d]`; `mask` is `[B, T]` bool, True = keep, None = all."""
        states: Any = outputs.last_hidden_state, outputs.packed_last_hidden_state
        tokens, packed = states
        packed_mask = None if outputs.packed_mask is None else outputs.packed_mask.bool()
        if self.pooling == "mean":
            return masked_mean(tokens, None if self.pool_padding else mask)
        if self.pooling == "packed_mean":
            if self.pool_padding and packed_mask is not None:
                # The original averages over the rows that the longest sequence of the batch uses.
                packed_mask = packed_mask.any(dim=0, keepdim=True)
            return masked_mean(packed, packed_mask)
        if self.pooling == "packed_max":
            packed = self.dense(packed)
            if packed_mask is None:
                return packed.amax(dim=1)
            packed = packed.masked_fill(~packed_mask[..., None], torch.finfo(packed.dtype).min).amax(dim=1)
            return packed.masked_fill(~packed_mask.any(dim=1, keepdim=True), 0.0)
        first = first_token(tokens, mask)
        if self.pooling == "cls":
            return first
        return self.layer_norm(self.attention(first, packed, packed_mask))


class LunaPooledHead(PooledHead):
    """Base of the heads for sequences, which read the outputs by `config.pooling`."""

    pooler: LunaPooler
    luna: LunaModel
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def make_head(self, config: LunaConfig) -> None:
        self.pooler = LunaPooler(config)
        super().make_head(config)

    def summarize(self, outputs: LunaModelOutput, mask: torch.Tensor | None) -> torch.Tensor:
        return self.pooler(outputs, mask)

    def unread_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that no loss depends on."""
        return self.luna.encoder.unread_parameters(self.pooler.reads_tokens, self.pooler.reads_packed)


class LunaForSequenceClassification(LunaPooledHead, GenericForSequenceClassification, LunaPreTrainedModel):
    """Luna with a sequence classification or regression head, which reads the outputs by `config.pooling`."""

    output_class = LunaSequenceClassifierOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        input_values: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> LunaSequenceClassifierOutput:
        """Classify the inputs of `LunaModel.forward`.

        `labels`: `[B]` class ids, or numbers for regression. `logits`: `[B, num_labels]`.
        """
        if self.config.drop_first_token and position_ids is not None:
            raise ValueError("`position_ids` are not supported with `drop_first_token=True`; omit them")
        return self.classify(
            labels,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            drop_first_token=self.config.drop_first_token,
            **kwargs,
        )


class LunaForSequencePairClassification(LunaPooledHead, GenericForSequencePairClassification, LunaPreTrainedModel):
    """Two towers with one set of weights, classified together (LRA Retrieval; paper section 4.1)."""

    output_class = LunaSequenceClassifierOutput
    unsupported_options = {"position_ids": "the positions of pairs are counted from the attention masks"}


class LunaForMultipleChoice(LunaPooledHead, GenericForMultipleChoice, LunaPreTrainedModel):
    """Luna with one score for every option (paper section 4.3: RACE, CommonsenseQA)."""

    output_class = LunaMultipleChoiceOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> LunaMultipleChoiceOutput:
        """Score C options, `[B, C, T]`; `labels` `[B]` are the right options, and `logits` are `[B, C]`."""
        return self.choose(
            labels,
            kwargs,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )


class LunaForTokenClassification(GenericForTokenClassification, LunaPreTrainedModel):
    """Luna with a label for every token."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    output_class = LunaTokenClassifierOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        input_values: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> LunaTokenClassifierOutput:
        """Label the positions of the inputs of `LunaModel.forward`.

        `labels`: `[B, T]`, -100 = not counted. `logits`: `[B, T, num_labels]`.
        """
        if labels is not None:
            check_token_labels(input_ids, inputs_embeds, input_values, labels=labels)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            return_dict=True,
            **kwargs,
        )
        return self.label_tokens(outputs, labels, input_ids, attention_mask, **kwargs)


class LunaForQuestionAnswering(GenericForQuestionAnswering, LunaPreTrainedModel):
    """Luna with start and end scores for extractive question answering."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    output_class = LunaQuestionAnsweringOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> LunaQuestionAnsweringOutput:
        """Score the positions of the inputs of `LunaModel.forward` as start and end of the answer.

        `start_logits`, `end_logits`: `[B, T]`, the lowest number of the dtype at positions that the mask drops.
        `start_positions`, `end_positions`: `[B]`, the columns of the answer. Columns that the mask drops and columns
        after the end are ignored.
        """
        check_span(start_positions, end_positions, input_ids, inputs_embeds)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        return self.find_span(
            outputs,
            start_positions,
            end_positions,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **kwargs,
        )


__all__ = [
    "LunaForMaskedLM",
    "LunaForMultipleChoice",
    "LunaForQuestionAnswering",
    "LunaForSequenceClassification",
    "LunaForSequencePairClassification",
    "LunaForTokenClassification",
]
