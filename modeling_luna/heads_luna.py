"""Luna with a masked-LM head, and with classification heads for sequences, pairs, choices, tokens and answers."""

from dataclasses import dataclass
from itertools import pairwise

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
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from luna_mega.kernels.api import luna_unpack
from luna_mega.kernels.varlen import refuse_packed
from luna_mega.modeling_luna.configuration_luna import LunaConfig
from luna_mega.modeling_luna.modeling_luna import LunaModel, LunaModelOutput, LunaPreTrainedModel

_PerLayer = tuple[torch.FloatTensor, ...] | None


@dataclass
class LunaMaskedLMOutput(MaskedLMOutput):
    """`MaskedLMOutput` with the packed sequence and attention of each layer, see `LunaModelOutput`."""

    packed_hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed_attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class LunaSequenceClassifierOutput(SequenceClassifierOutput):
    """`SequenceClassifierOutput` with the packed sequence and attention of each layer, see `LunaModelOutput`."""

    packed_hidden_states: _PerLayer = None
    packed_attentions: _PerLayer = None


@dataclass
class LunaMultipleChoiceOutput(MultipleChoiceModelOutput):
    """`MultipleChoiceModelOutput` with the packed sequence and attention of each layer, see `LunaModelOutput`."""

    packed_hidden_states: _PerLayer = None
    packed_attentions: _PerLayer = None


@dataclass
class LunaTokenClassifierOutput(TokenClassifierOutput):
    """`TokenClassifierOutput` with the packed sequence and attention of each layer, see `LunaModelOutput`."""

    packed_hidden_states: _PerLayer = None
    packed_attentions: _PerLayer = None


@dataclass
class LunaQuestionAnsweringOutput(QuestionAnsweringModelOutput):
    """`QuestionAnsweringModelOutput` with the packed sequence and attention of each layer, see `LunaModelOutput`."""

    packed_hidden_states: _PerLayer = None
    packed_attentions: _PerLayer = None


class LunaLMHead(nn.Module):
    """Masked-LM head: dense, activation, LayerNorm, decoder."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.layer_norm(self.activation(self.dense(hidden_states))))


class LunaForMaskedLM(LunaPreTrainedModel):
    """Luna with a masked-language-modelling head (`luna_bert` of the original code)."""

    _tied_weights_keys = {"lm_head.decoder.weight": "luna.embeddings.word_embeddings.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^pooler\.", r"^classifier\."]

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        self.require_tokens()
        self.luna = LunaModel(config)
        self.lm_head = LunaLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module):
        self.lm_head.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaMaskedLMOutput:
        """As `LunaModel.forward`; `labels` `[B, T]`: tokens, -100 = not predicted.

        `logits`: `[B, T, vocab_size]`, with `sparse_prediction` and labels only those of the M predicted positions,
        `[M, vocab_size]`.
        """
        outputs = self.luna(input_ids, attention_mask, inputs_embeds=inputs_embeds, position_ids=position_ids, **kwargs)
        hidden_states = outputs.last_hidden_state
        if labels is not None and self.config.sparse_prediction:
            predicted = labels != -100
            hidden_states, labels = hidden_states[predicted], labels[predicted]
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return LunaMaskedLMOutput(loss=loss, logits=logits, **outputs.recorded())


def _masked_mean(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean over the rows of `[B, T, d]` that the mask `[B or 1, T]` keeps; 0 where it keeps none."""
    if mask is None:
        return states.mean(dim=1)
    kept = states.masked_fill(~mask[..., None], 0.0).sum(dim=1)
    return kept / mask.sum(dim=1, keepdim=True).clamp(min=1)


class LunaPoolerAttention(nn.Module):
    """Multi-head attention of one query over the packed sequence."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, query: torch.Tensor, packed: torch.Tensor, packed_mask: torch.Tensor | None) -> torch.Tensor:
        query = self.q_proj(query)[:, None].unflatten(-1, (self.num_heads, -1))
        key, value = (proj(packed).unflatten(-1, (self.num_heads, -1)) for proj in (self.k_proj, self.v_proj))
        return self.out_proj(luna_unpack(query, key, value, packed_mask).flatten(2)[:, 0])


class LunaPooler(nn.Module):
    """Sequence vector `[B, d]` from tokens or packed sequence, by `config.pooling` (heads of `luna_bert` and LRA)."""

    def __init__(self, config: LunaConfig):
        super().__init__()
        self.pooling = config.pooling
        self.pool_padding = config.pool_padding
        if self.pooling == "packed_max":
            self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        elif self.pooling == "packed_attention":
            self.attention = LunaPoolerAttention(config)
            self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, outputs: LunaModelOutput, mask: torch.Tensor | None) -> torch.Tensor:
        """`mask` is `[B, T]` bool, True = keep; None = all."""
        tokens, packed = outputs.last_hidden_state, outputs.packed_last_hidden_state
        packed_mask = None if outputs.packed_mask is None else outputs.packed_mask.bool()
        if self.pooling == "mean":
            return _masked_mean(tokens, None if self.pool_padding else mask)
        if self.pooling == "packed_mean":
            # The original has as many rows as the longest sequence of the batch uses, and averages over all of those.
            return _masked_mean(packed, self._used_by_any(packed_mask) if self.pool_padding else packed_mask)
        if self.pooling == "packed_max":
            packed = self.dense(packed)
            if packed_mask is None:
                return packed.amax(dim=1)
            packed = packed.masked_fill(~packed_mask[..., None], torch.finfo(packed.dtype).min).amax(dim=1)
            return packed.masked_fill(~packed_mask.any(dim=1, keepdim=True), 0.0)
        first = tokens[:, 0] if mask is None else _take(tokens, _first(mask)[:, None])[:, 0]
        if self.pooling == "cls":
            return first
        return self.layer_norm(self.attention(first, packed, packed_mask))

    @staticmethod
    def _used_by_any(packed_mask):
        return None if packed_mask is None else packed_mask.any(dim=0, keepdim=True)


def _first(mask: torch.Tensor) -> torch.Tensor:
    """Position of the first token that the mask keeps, `[B]`: with padding on the left it is not 0."""
    return mask.int().argmax(dim=1)


def _take(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The positions `index` `[B, S]` of `[B, T]` or `[B, T, d]`."""
    return states.gather(1, index if states.dim() == 2 else index[..., None].expand(-1, -1, states.shape[2]))


def _without_first(states: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """`[B, T, ...]` without the first position that the mask keeps, `[B, T - 1, ...]`."""
    if states is None or mask is None:
        return states if states is None else states[:, 1:]
    index = torch.arange(mask.shape[1] - 1, device=mask.device)
    index = index + (index >= _first(mask)[:, None]).long()
    return _take(states, index)


class LunaClassificationHead(nn.Module):
    """dropout, then (dense, activation, dropout) x `classifier_num_layers`, then the output layer."""

    def __init__(self, config: LunaConfig, input_size: int, num_labels: int):
        super().__init__()
        sizes = [input_size] + [config.classifier_hidden_size] * config.classifier_num_layers
        self.dense = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.activation = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(sizes[-1], num_labels, bias=config.classifier_bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = self.dropout(features)
        for dense in self.dense:
            features = self.dropout(self.activation(dense(features)))
        return self.out_proj(features)


class LunaPooledModel(LunaPreTrainedModel):
    """Luna, a pooler and a classification head: what the sequence-level classes share."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    # The losses of these heads are means over the batch; Trainer divides them by the accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: LunaConfig, input_size: int, num_labels: int):
        super().__init__(config)
        self.luna = LunaModel(config)
        self.pooler = LunaPooler(config)
        self.classifier = LunaClassificationHead(config, input_size, num_labels)
        self.post_init()

    def pool(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.FloatTensor | None,
        input_values: torch.FloatTensor | None,
        position_ids: torch.LongTensor | None = None,
        drop_first_token: bool = False,
        **kwargs,
    ) -> tuple[torch.Tensor, LunaModelOutput]:
        """Sentence representation `[B, d]` and the encoder's outputs. Arguments as `LunaModel.forward`."""
        mask = None if attention_mask is None else attention_mask.bool()
        given = next((x for x in (input_ids, inputs_embeds, input_values) if x is not None), None)
        if mask is None and given is not None:
            refuse_packed(self, given, position_ids, kwargs)
        if mask is None and input_ids is not None:
            mask = input_ids != self.config.pad_token_id
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "input_values": input_values}
        if drop_first_token:
            if position_ids is not None:
                raise ValueError("drop_first_token shifts the positions: leave position_ids out")
            inputs = {name: _without_first(value, mask) for name, value in inputs.items()}
            mask = _without_first(mask, mask)
        outputs = self.luna(attention_mask=mask, position_ids=position_ids, **inputs, **kwargs)
        return self.pooler(outputs, mask), outputs


class LunaForSequenceClassification(LunaPooledModel):
    """Luna with a sequence classification or regression head; what it reads is `config.pooling`."""

    def __init__(self, config: LunaConfig):
        super().__init__(config, config.hidden_size, config.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        input_values: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaSequenceClassifierOutput:
        """As `LunaModel.forward`; `labels` `[B]`: class ids, or numbers for regression; `logits`: `[B, num_labels]`."""
        features, outputs = self.pool(
            input_ids,
            attention_mask,
            inputs_embeds,
            input_values,
            position_ids,
            drop_first_token=self.config.drop_first_token,
            **kwargs,
        )
        logits = self.classifier(features)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return LunaSequenceClassifierOutput(loss=loss, logits=logits, **outputs.recorded())


class LunaForSequencePairClassification(LunaPooledModel):
    """Two towers with one set of weights, classified together (LRA Retrieval; paper section 4.1)."""

    def __init__(self, config: LunaConfig):
        towers = 2 if config.pair_features == "concat" else 4
        super().__init__(config, towers * config.hidden_size, config.num_labels)
        self.loss_type = "ForSequenceClassification"

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        pair_input_ids: torch.LongTensor | None = None,
        pair_attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        pair_inputs_embeds: torch.FloatTensor | None = None,
        input_values: torch.FloatTensor | None = None,
        pair_input_values: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaSequenceClassifierOutput:
        """Inputs `[B, T]` of the first and `pair_*` `[B, T']` of the second sequence, as in `LunaModel.forward`.

        `labels` and `logits` as in `LunaForSequenceClassification`; hidden states and attentions are those of the
        first.
        """
        if "position_ids" in kwargs:
            raise ValueError("pairs take their positions from the attention masks; leave position_ids out")
        first, outputs = self.pool(
            input_ids,
            attention_mask,
            inputs_embeds,
            input_values,
            drop_first_token=self.config.drop_first_token,
            **kwargs,
        )
        second, _ = self.pool(pair_input_ids, pair_attention_mask, pair_inputs_embeds, pair_input_values)
        if len(first) != len(second):
            raise ValueError(f"the first input has {len(first)} sequences and the second {len(second)}; give pairs")
        if self.config.pair_features == "concat":
            features = torch.cat([second, first], dim=-1)
        else:
            features = torch.cat([first, second, first * second, first - second], dim=-1)
        logits = self.classifier(features)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return LunaSequenceClassifierOutput(loss=loss, logits=logits, **outputs.recorded())


class LunaForMultipleChoice(LunaPooledModel):
    """Luna with one score for every option (paper section 4.3: RACE, CommonsenseQA)."""

    def __init__(self, config: LunaConfig):
        super().__init__(config, config.hidden_size, 1)
        self.require_tokens()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaMultipleChoiceOutput:
        """Inputs `[B, C, T]` for C options; `labels` `[B]` are the right options; `logits` are `[B, C]`."""
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is None or inputs.dim() < 3:
            shape = None if inputs is None else list(inputs.shape)
            raise ValueError(f"multiple choice needs input_ids [B, options, T] (or inputs_embeds), got {shape}")
        choices = inputs.shape[1]
        input_ids, attention_mask, inputs_embeds, position_ids = (
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, inputs_embeds, position_ids)
        )
        features, outputs = self.pool(input_ids, attention_mask, inputs_embeds, None, position_ids, **kwargs)
        logits = self.classifier(features).view(-1, choices)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return LunaMultipleChoiceOutput(loss=loss, logits=logits, **outputs.recorded())


class LunaForTokenClassification(LunaPreTrainedModel):
    """Luna with a label for every token."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        self.luna = LunaModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        input_values: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaTokenClassifierOutput:
        """As `LunaModel.forward`; `labels` `[B, T]`, -100 = not counted; `logits` are `[B, T, num_labels]`."""
        outputs = self.luna(input_ids, attention_mask, inputs_embeds, input_values, position_ids, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, config=self.config, **kwargs)
        return LunaTokenClassifierOutput(loss=loss, logits=logits, **outputs.recorded())


class LunaForQuestionAnswering(LunaPreTrainedModel):
    """Luna with start and end scores for extractive question answering."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def __init__(self, config: LunaConfig):
        super().__init__(config)
        self.require_tokens()
        self.luna = LunaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LunaQuestionAnsweringOutput:
        """As `LunaModel.forward`; `start_positions` and `end_positions` `[B]`; start and end logits are `[B, T]`."""
        outputs = self.luna(input_ids, attention_mask, inputs_embeds=inputs_embeds, position_ids=position_ids, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return LunaQuestionAnsweringOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, **outputs.recorded()
        )


__all__ = [
    "LunaForMaskedLM",
    "LunaForMultipleChoice",
    "LunaForQuestionAnswering",
    "LunaForSequenceClassification",
    "LunaForSequencePairClassification",
    "LunaForTokenClassification",
]
