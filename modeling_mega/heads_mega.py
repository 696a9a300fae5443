"""Mega with heads for masked language modeling, classification, multiple choice and question answering."""

from typing import Any, Unpack

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from luna_mega.modeling_common.heads import (
    GenericForMaskedLM,
    GenericForQuestionAnswering,
    GenericForTokenClassification,
)
from luna_mega.modeling_common.label_checks import check_pooled_labels, check_span, check_token_labels
from luna_mega.modeling_common.masks import read_mask
from luna_mega.modeling_common.pooled_heads import (
    ClassificationHead,
    GenericForMultipleChoice,
    GenericForSequenceClassification,
    GenericForSequencePairClassification,
    PooledHead,
)
from luna_mega.modeling_common.pooling import first_token, masked_mean
from luna_mega.modeling_mega.configuration_mega import MegaConfig, check_tied_widths
from luna_mega.modeling_mega.modeling_mega import MegaPreTrainedModel


class MegaForMaskedLM(GenericForMaskedLM, MegaPreTrainedModel):
    """Mega with a masked-language-modeling head."""

    _tied_weights_keys = {"mlm_head.weight": "mega.embedding_layer.word_embeddings.weight"}
    _tp_plan = {"mlm_head": "colwise_gather_output"}
    output_class = MaskedLMOutput
    output_layer = "mlm_head"

    def make_head(self, config: MegaConfig) -> None:
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if config.add_lm_hidden_dense_layer else None
        self.dropout = nn.Dropout(config.dropout_prob)
        check_tied_widths(config)
        self.mlm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def score_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.dense is not None:
            hidden_states = torch.tanh(self.dense(hidden_states))
        return self.mlm_head(self.dropout(hidden_states))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Predict tokens from the inputs of `MegaModel.forward`.

        `labels`: `[B, T]` tokens, -100 = not predicted. `logits`: `[B, T, vocab_size]`; in training with
        `sparse_prediction` there are logits of the M predicted positions only, `[M, vocab_size]`.
        """
        if labels is not None:
            check_token_labels(input_ids, inputs_embeds, labels=labels)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        return self.predict_tokens(outputs, labels, input_ids, attention_mask, **kwargs)


class MegaClassificationHead(ClassificationHead):
    """Classification head. Its first layer has the name of transformers v4."""

    def name_layers(self, layers: list[nn.Linear]) -> None:
        self.dense, self.deeper = layers[0] if layers else None, nn.ModuleList(layers[1:])

    def dense_layers(self) -> list[nn.Linear]:
        return [] if self.dense is None else [self.dense, *self.deeper]


class MegaPooledHead(PooledHead):
    """Base class of the heads on pooled states (`config.pooling`)."""

    head_class = MegaClassificationHead

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        head = self.classifier
        if self.config.input_type == "patches" and isinstance(module, nn.Linear):
            if module in (*head.dense_layers(), head.out_proj):
                init.xavier_uniform_(module.weight)

    def summarize(self, outputs: Any, mask: torch.Tensor | None) -> torch.Tensor:
        pool = first_token if self.config.pooling == "cls" else masked_mean
        return pool(outputs.last_hidden_state, mask)


class MegaForSequenceClassification(MegaPooledHead, GenericForSequenceClassification, MegaPreTrainedModel):
    """Mega with a sequence classification or regression head on the pooled states (`config.pooling`)."""

    output_class = SequenceClassifierOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        input_values: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify the inputs of `MegaModel.forward`.

        `labels`: `[B]` class ids, or numbers for regression. `logits`: `[B, num_labels]`.
        """
        return self.classify(
            labels,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            **kwargs,
        )


class MegaForImageClassification(MegaPooledHead, MegaPreTrainedModel):
    """Mega with an image classification head (Table 7) on the pooled states of the patches (`config.pooling`)."""

    main_input_name = "pixel_values"
    output_class = ImageClassifierOutput

    def check_config(self, config: MegaConfig) -> None:
        if config.input_type != "patches":
            raise ValueError(f"{type(self).__name__} needs input_type='patches', got {config.input_type!r}")

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images `[B, C, H, W]`, see `MegaModel.forward`.

        `attention_mask`: `[B, P]`, 1 = keep the patch; None = all. `labels`: `[B]` class ids, or numbers for
        regression. `logits`: `[B, num_labels]`.
        """
        if labels is not None and pixel_values is not None:
            check_pooled_labels(self.config, labels, len(pixel_values))
        outputs = self.base_model(
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            return_dict=True,
            **kwargs,
        )
        features = self.summarize(outputs, read_mask("attention_mask", attention_mask))
        return self.make_output(self.classifier(features), outputs, labels)


class MegaForSequencePairClassification(MegaPooledHead, GenericForSequencePairClassification, MegaPreTrainedModel):
    """Classification of pairs of sequences, encoded separately with the same weights (LRA Retrieval)."""


class MegaForMultipleChoice(GenericForMultipleChoice, MegaPreTrainedModel):
    """Mega with a multiple choice head."""

    body_options = {}
    output_class = MultipleChoiceModelOutput
    classifier: Any  # an nn.Linear, not a classification head

    def make_head(self, config: MegaConfig) -> None:
        self.dropout = nn.Dropout(config.classifier_dropout or 0.0)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def summarize(self, outputs: Any, mask: torch.Tensor | None) -> torch.Tensor:
        return outputs.pooler_output

    def score_options(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(features))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        """Score C options, `[B, C, T]`. `labels`: `[B]` indices of the correct options. `logits`: `[B, C]`."""
        return self.choose(
            labels,
            kwargs,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
        )


class MegaForTokenClassification(GenericForTokenClassification, MegaPreTrainedModel):
    """Mega with a token classification head."""

    output_class = TokenClassifierOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        input_values: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Classify the positions of the inputs of `MegaModel.forward`.

        `labels`: `[B, T]`, -100 = ignored. `logits`: `[B, T, num_labels]`.
        """
        if labels is not None:
            check_token_labels(input_ids, inputs_embeds, input_values, labels=labels)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            input_values=input_values,
            return_dict=True,
            **kwargs,
        )
        return self.label_tokens(outputs, labels, input_ids, attention_mask, **kwargs)


class MegaForQuestionAnswering(GenericForQuestionAnswering, MegaPreTrainedModel):
    """Mega with a head for extractive question answering."""

    output_class = QuestionAnsweringModelOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Score the positions of the inputs of `MegaModel.forward` as start and end of the answer.

        `start_logits`, `end_logits`: `[B, T]`, the lowest number of the dtype at masked positions. `start_positions`,
        `end_positions`: `[B]`, the columns of the answer. The loss ignores masked columns and columns after the end.
        """
        check_span(start_positions, end_positions, input_ids, inputs_embeds)
        outputs = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        return self.find_span(outputs, start_positions, end_positions, input_ids, attention_mask, **kwargs)


__all__ = [
    "MegaForImageClassification",
    "MegaForMaskedLM",
    "MegaForMultipleChoice",
    "MegaForQuestionAnswering",
    "MegaForSequenceClassification",
    "MegaForSequencePairClassification",
    "MegaForTokenClassification",
]
