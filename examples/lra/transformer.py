"""Baseline of Long Range Arena: ModernBERT's Transformer encoder with global attention and rotary positions.

In addition to ModernBERT, it supports real numbers and pairs, and has the classifier of Luna and Mega.
"""

from typing import Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.modernbert.configuration_modernbert import ModernBertConfig
from transformers.models.modernbert.modeling_modernbert import ModernBertModel, ModernBertPreTrainedModel

from luna_mega.modeling_common.base import INPUT_NAMES
from luna_mega.modeling_common.inputs import ValueEmbeddings
from luna_mega.modeling_common.pooled_heads import (
    ClassificationHead,
    first_token,
    masked_mean,
    pair_features,
    pair_size,
)


@strict
class TransformerConfig(ModernBertConfig):
    """Configuration of ModernBERT with the fields of Luna and Mega for inputs and classifier.

    With `pairs`, the classifier reads two sequences.
    """

    model_type = "transformer"

    vocab_size: int = 32
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    cls_token_id: int | None = None
    sep_token_id: int | None = None
    input_type: Literal["tokens", "values"] = "tokens"
    pairs: bool = False
    pair_features: str = "concat"
    pooling: Literal["cls", "mean"] = "mean"
    classifier_num_layers: int = 1
    classifier_hidden_size: int | None = None
    classifier_bias: bool = True

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.classifier_hidden_size is None:
            self.classifier_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)


class TransformerPreTrainedModel(ModernBertPreTrainedModel):
    config_class = TransformerConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, ValueEmbeddings):  # with a bias of 0, the following norm would keep only the sign
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            nn.init.normal_(module.bias, std=self.config.initializer_range)


class TransformerModel(TransformerPreTrainedModel, ModernBertModel):
    """ModernBERT for tokens or real numbers `input_values` `[B, T]`."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.main_input_name = INPUT_NAMES[config.input_type]
        if config.input_type == "values":
            self.embeddings.tok_embeddings = ValueEmbeddings(config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        input_values: torch.FloatTensor | None = None,
        **kwargs,
    ):
        return super().forward(input_ids if input_values is None else input_values, attention_mask, **kwargs)


class TransformerForSequenceClassification(TransformerPreTrainedModel):
    """Transformer with the classifier of Luna and Mega, for one sequence or a pair."""

    accepts_loss_kwargs = False  # the loss is the mean over the batch

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.main_input_name = INPUT_NAMES[config.input_type]
        self.model = TransformerModel(config)
        self.classifier = ClassificationHead(
            config, pair_size(config) if config.pairs else config.hidden_size, config.num_labels
        )
        self.post_init()

    def pool(self, attention_mask: torch.Tensor | None, **inputs: torch.Tensor | None) -> torch.Tensor:
        """Return the sentence representation `[B, d]`."""
        states = self.model(attention_mask=attention_mask, **inputs).last_hidden_state
        pool = first_token if self.config.pooling == "cls" else masked_mean
        return pool(states, None if attention_mask is None else attention_mask.bool())

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        input_values: torch.FloatTensor | None = None,
        pair_input_ids: torch.LongTensor | None = None,
        pair_attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """Classify sequences `[B, T]` or, with `pairs`, pairs of them; `labels` `[B]`, `logits` `[B, num_labels]`."""
        features = self.pool(attention_mask, input_ids=input_ids, input_values=input_values)
        if self.config.pairs:
            features = pair_features(self.config, features, self.pool(pair_attention_mask, input_ids=pair_input_ids))
        logits = self.classifier(features)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


AutoConfig.register(TransformerConfig.model_type, TransformerConfig, exist_ok=True)
AutoModel.register(TransformerConfig, TransformerModel, exist_ok=True)
AutoModelForSequenceClassification.register(TransformerConfig, TransformerForSequenceClassification, exist_ok=True)
