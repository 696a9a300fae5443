"""Megalodon with a classification head."""

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from luna_mega.modeling_common.pooled_heads import GenericForSequenceClassification
from luna_mega.modeling_common.pooling import LOCAL, Reductions, last_token, masked_mean
from luna_mega.modeling_megalodon.configuration_megalodon import MegalodonConfig
from luna_mega.modeling_megalodon.modeling_megalodon import MegalodonModel, MegalodonPreTrainedModel


class MegalodonForSequenceClassification(GenericForSequenceClassification, MegalodonPreTrainedModel):
    """Megalodon with a sequence classification or regression head; what it reads is `config.pooling`."""

    output_class = SequenceClassifierOutput

    def make_body(self, config: MegalodonConfig) -> MegalodonModel:
        return MegalodonModel(config)

    def summarize(
        self, outputs: BaseModelOutputWithPast, mask: torch.Tensor | None, reductions: Reductions = LOCAL
    ) -> torch.Tensor:
        """Return the representation of sequences `[B, d]`."""
        pool = last_token if self.config.pooling == "last" else masked_mean
        return pool(outputs.last_hidden_state, mask, reductions)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify the inputs of `MegalodonModel.forward`.

        `labels`: `[B]` class ids, or numbers for regression. `logits`: `[B, num_labels]`.
        """
        kwargs.setdefault("use_cache", False)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        return self.classify(inputs, labels, **kwargs)


__all__ = ["MegalodonForSequenceClassification"]
