"""Megalodon with a classification head."""

from typing import Any, Unpack

import torch
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from luna_mega.modeling_common.pooled_heads import GenericForSequenceClassification
from luna_mega.modeling_common.pooling import last_token, masked_mean
from luna_mega.modeling_megalodon.modeling_megalodon import MegalodonPreTrainedModel


class MegalodonForSequenceClassification(GenericForSequenceClassification, MegalodonPreTrainedModel):
    """Megalodon with a sequence classification or regression head on the pooled states (`config.pooling`)."""

    output_class = SequenceClassifierOutput

    def summarize(self, outputs: Any, mask: torch.Tensor | None) -> torch.Tensor:
        pool = last_token if self.config.pooling == "last" else masked_mean
        return pool(outputs.last_hidden_state, mask)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify the inputs of `MegalodonModel.forward`.

        `labels`: `[B]` class ids, or numbers for regression. `logits`: `[B, num_labels]`.
        """
        return self.classify(
            labels,
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **{"use_cache": False, **kwargs},
        )


__all__ = ["MegalodonForSequenceClassification"]
