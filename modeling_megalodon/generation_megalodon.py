"""The Megalodon language model: `MegalodonForCausalLM`."""

from typing import Any, Unpack

import torch
from torch import nn
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from luna_mega.modeling_common.generation import StateGenerationMixin
from luna_mega.modeling_common.heads import GenericForCausalLM
from luna_mega.modeling_common.label_checks import check_next_labels
from luna_mega.modeling_common.outputs import CausalLMOutputWithPast
from luna_mega.modeling_megalodon.cache_megalodon import MegalodonCache
from luna_mega.modeling_megalodon.configuration_megalodon import MegalodonConfig
from luna_mega.modeling_megalodon.modeling_megalodon import MegalodonPreTrainedModel


class MegalodonForCausalLM(GenericForCausalLM, StateGenerationMixin, MegalodonPreTrainedModel):
    """Megalodon with a language-modeling head. Generation uses constant memory, because attention is in chunks."""

    _tied_weights_keys = {"lm_head.weight": "megalodon.embed_tokens.weight"}
    output_class = CausalLMOutputWithPast

    def make_head(self, config: MegalodonConfig) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.scores, bias=False)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary. Raises `NotImplementedError` if `output_size` differs from `vocab_size`."""
        if self.config.scores != self.config.vocab_size:
            raise NotImplementedError(
                f"a vocabulary of {self.config.vocab_size} tokens with output_size={self.config.output_size} scores "
                "cannot be resized, as the token of each score is not known; build a model with the new sizes"
            )
        return super().resize_token_embeddings(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        past_key_values: MegalodonCache | None = None,
        use_cache: bool | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Predict the next tokens from the inputs of `MegalodonModel.forward`.

        `labels` `[B, T]` are token ids, usually `input_ids`; the loss shifts them and ignores -100. The keyword
        argument `shift_labels` `[B, T]` replaces them: the token that follows each position, including the last.
        `logits` are `[B, T, output_size]`, restricted to the last `logits_to_keep` positions or to the positions in
        `logits_to_keep` if it is a tensor.

        Raises:
            ValueError: As in `MegalodonModel.forward`, and if labels do not match the positions of `logits_to_keep`.
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


__all__ = ["MegalodonForCausalLM"]
