"""Mega with classification heads: sequences, pairs of sequences, multiple choice, tokens, question answering."""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from luna_mega.kernels.varlen import refuse_packed
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.modeling_mega import MegaModel, MegaPreTrainedModel, first_token


def _recorded(outputs: BaseModelOutputWithPooling) -> dict:
    return {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}


class MegaClassificationHead(nn.Module):
    """dropout, then (dense, activation, dropout) x `classifier_num_layers`, then the output layer."""

    def __init__(self, config: MegaConfig, input_size: int, num_labels: int):
        super().__init__()
        hidden = config.classifier_hidden_size
        # The first layer has the name that it has in checkpoints of transformers v4.
        self.dense = nn.Linear(input_size, hidden) if config.classifier_num_layers else None
        self.deeper = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(config.classifier_num_layers - 1))
        self.activation = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        output_size = hidden if config.classifier_num_layers else input_size
        self.out_proj = nn.Linear(output_size, num_labels, bias=config.classifier_bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = self.dropout(features)
        for dense in [] if self.dense is None else [self.dense, *self.deeper]:
            features = self.dropout(self.activation(dense(features)))
        return self.out_proj(features)


class MegaPooledModel(MegaPreTrainedModel):
    """Mega and a sentence representation: what the classifiers of sequences share."""

    # The losses of these heads are means over the batch; Trainer divides them by the accumulation steps.
    accepts_loss_kwargs = False

    def pool(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.FloatTensor | None,
        input_values: torch.FloatTensor | None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, BaseModelOutputWithPooling]:
        """Sentence representation `[B, d]` by `config.pooling`, and the encoder's outputs."""
        mask = None if attention_mask is None else attention_mask.bool()
        inputs = next((x for x in (input_ids, inputs_embeds, input_values) if x is not None), None)
        if mask is None and inputs is not None:
            refuse_packed(self, inputs, kwargs.get("position_ids"), kwargs)
        if mask is None and input_ids is not None:
            mask = input_ids != self.config.pad_token_id
        outputs = self.mega(input_ids, mask, inputs_embeds, input_values, token_type_ids, **kwargs)
        states = outputs.last_hidden_state
        if self.config.pooling == "cls":
            return first_token(states, mask), outputs
        if mask is None:
            return states.mean(dim=1), outputs
        total = states.masked_fill(~mask[..., None], 0.0).sum(dim=1)
        return total / mask.sum(dim=1, keepdim=True).clamp(min=1), outputs


class MegaForSequenceClassification(MegaPooledModel):
    """Mega with a sequence classification or regression head."""

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        self.mega = MegaModel(config, add_pooling_layer=False)
        self.classifier = MegaClassificationHead(config, config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        input_values: torch.FloatTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """As `MegaModel.forward`; `labels` `[B]`: class ids, or numbers for regression; `logits`: `[B, num_labels]`."""
        features, outputs = self.pool(input_ids, attention_mask, inputs_embeds, input_values, token_type_ids, **kwargs)
        logits = self.classifier(features)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, **_recorded(outputs))


class MegaForSequencePairClassification(MegaPooledModel):
    """Two towers with one set of weights, classified together (LRA Retrieval)."""

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        self.mega = MegaModel(config, add_pooling_layer=False)
        towers = 2 if config.pair_features == "concat" else 4
        self.classifier = MegaClassificationHead(config, towers * config.hidden_size, config.num_labels)
        self.loss_type = "ForSequenceClassification"
        self.post_init()

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
    ) -> SequenceClassifierOutput:
        """Inputs `[B, T]` of the first and `pair_*` `[B, T']` of the second sequence, as in `MegaModel.forward`.

        `labels` and `logits` as in `MegaForSequenceClassification`; hidden states and attentions are the first's.
        """
        if "token_type_ids" in kwargs:
            raise ValueError("the sequences of a pair have no token types; leave token_type_ids out")
        first, outputs = self.pool(input_ids, attention_mask, inputs_embeds, input_values, **kwargs)
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
        return SequenceClassifierOutput(loss=loss, logits=logits, **_recorded(outputs))


class MegaForMultipleChoice(MegaPreTrainedModel):
    """Mega with one score for every option."""

    accepts_loss_kwargs = False

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        self.require_tokens()
        self.mega = MegaModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        """Inputs `[B, C, T]` for C options; `labels` `[B]` are the right options; `logits` are `[B, C]`."""
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is None or inputs.dim() < 3:
            shape = None if inputs is None else list(inputs.shape)
            raise ValueError(f"multiple choice needs input_ids [B, options, T] (or inputs_embeds), got {shape}")
        choices = inputs.shape[1]
        input_ids, attention_mask, inputs_embeds, token_type_ids = (
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, inputs_embeds, token_type_ids)
        )
        if attention_mask is None:
            refuse_packed(self, inputs.flatten(0, 1), kwargs.get("position_ids"), kwargs)
        outputs = self.mega(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(-1, choices)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return MultipleChoiceModelOutput(loss=loss, logits=logits, **_recorded(outputs))


class MegaForTokenClassification(MegaPreTrainedModel):
    """Mega with a label for every token."""

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        self.mega = MegaModel(config, add_pooling_layer=False)
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
        token_type_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """As `MegaModel.forward`; `labels` `[B, T]`, -100 = not counted; `logits` are `[B, T, num_labels]`."""
        outputs = self.mega(input_ids, attention_mask, inputs_embeds, input_values, token_type_ids, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, config=self.config, **kwargs)
        return TokenClassifierOutput(loss=loss, logits=logits, **_recorded(outputs))


class MegaForQuestionAnswering(MegaPreTrainedModel):
    """Mega with start and end scores for extractive question answering."""

    def __init__(self, config: MegaConfig):
        super().__init__(config)
        self.require_tokens()
        self.mega = MegaModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """As `MegaModel.forward`; `start_positions` and `end_positions` `[B]`; start and end logits are `[B, T]`."""
        outputs = self.mega(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, **_recorded(outputs)
        )


__all__ = [
    "MegaForMultipleChoice",
    "MegaForQuestionAnswering",
    "MegaForSequenceClassification",
    "MegaForSequencePairClassification",
    "MegaForTokenClassification",
]
