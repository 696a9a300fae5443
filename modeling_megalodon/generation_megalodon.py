"""The Megalodon language model: `MegalodonForCausalLM`."""

import torch
from torch import nn
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from luna_mega.modeling_common.generation import StateGenerationMixin
from luna_mega.modeling_common.heads import GenericForCausalLM, model_inputs
from luna_mega.modeling_common.outputs import CausalLMOutputWithPast
from luna_mega.modeling_megalodon.cache_megalodon import MegalodonCache
from luna_mega.modeling_megalodon.configuration_megalodon import MegalodonConfig
from luna_mega.modeling_megalodon.modeling_megalodon import MegalodonModel, MegalodonPreTrainedModel


class MegalodonForCausalLM(GenericForCausalLM, StateGenerationMixin, MegalodonPreTrainedModel):
    """Megalodon with an output layer; generates at constant memory, as attention is in chunks."""

    _tied_weights_keys = {"lm_head.weight": "megalodon.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    output_class = CausalLMOutputWithPast

    def make_body(self, config: MegalodonConfig) -> MegalodonModel:
        return MegalodonModel(config)

    def make_head(self, config: MegalodonConfig):
        self.lm_head = nn.Linear(config.hidden_size, config.scores, bias=False)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """Resize a vocabulary whose tokens all have a score."""
        if self.config.scores != self.config.vocab_size:
            raise NotImplementedError(
                f"the output layer has output_size={self.config.output_size} scores for a vocabulary of "
                f"{self.config.vocab_size} tokens: which rows belong together is not known, so it cannot be resized"
            )
        return super().resize_token_embeddings(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        past_key_values: MegalodonCache | None = None,
        use_cache: bool | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Predict the next tokens from the inputs of `MegalodonModel.forward`.

        `labels`: `[B, T]`, the tokens themselves (the loss shifts them), -100 = not counted. The keyword `shift_labels`
        `[B, T]` takes their place: it has the token that follows each position, also the last.
        `logits`: `[B, T, output_size]`, or those of the last `logits_to_keep` positions, or of these positions.

        Raises `ValueError` as `MegalodonModel.forward`, and for labels of other positions than those kept.
        """
        inputs = model_inputs(input_ids, attention_mask, inputs_embeds)
        inputs |= {"past_key_values": past_key_values, "use_cache": use_cache}
        return self.predict_next(inputs, labels, logits_to_keep, **kwargs)


__all__ = ["MegalodonForCausalLM"]
