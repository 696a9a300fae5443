"""Output classes of transformers in which the cache has both names, see `with_cache_alias`."""

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import modeling_outputs
from transformers.generation import utils as generation
from transformers.utils import output_capturing
from transformers.utils.generic import ModelOutput

from luna_mega.compat import SELECTS_HIDDEN_STATES, with_cache_alias

if TYPE_CHECKING:
    from transformers.modeling_outputs import (
        BaseModelOutputWithPast as BaseModelOutputWithPast,
        BaseModelOutputWithPoolingAndCrossAttentions as BaseModelOutputWithPoolingAndCrossAttentions,
        CausalLMOutputWithCrossAttentions as CausalLMOutputWithCrossAttentions,
        CausalLMOutputWithPast as CausalLMOutputWithPast,
        Seq2SeqLMOutput as Seq2SeqLMOutput,
        Seq2SeqModelOutput as Seq2SeqModelOutput,
    )
else:
    BaseModelOutputWithPast = with_cache_alias(modeling_outputs.BaseModelOutputWithPast, __name__)
    BaseModelOutputWithPoolingAndCrossAttentions = with_cache_alias(
        modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions, __name__
    )
    CausalLMOutputWithCrossAttentions = with_cache_alias(modeling_outputs.CausalLMOutputWithCrossAttentions, __name__)
    CausalLMOutputWithPast = with_cache_alias(modeling_outputs.CausalLMOutputWithPast, __name__)
    Seq2SeqLMOutput = with_cache_alias(modeling_outputs.Seq2SeqLMOutput, __name__)
    Seq2SeqModelOutput = with_cache_alias(modeling_outputs.Seq2SeqModelOutput, __name__)

GenerateDecoderOnlyOutput = with_cache_alias(generation.GenerateDecoderOnlyOutput, __name__)
GenerateEncoderDecoderOutput = with_cache_alias(generation.GenerateEncoderDecoderOutput, __name__)
GenerateBeamDecoderOnlyOutput = with_cache_alias(generation.GenerateBeamDecoderOnlyOutput, __name__)
GenerateBeamEncoderDecoderOutput = with_cache_alias(generation.GenerateBeamEncoderDecoderOutput, __name__)


class BodyOutput(Protocol):
    """Fields that the outputs of all models without a head have."""

    last_hidden_state: torch.Tensor

    def items(self) -> Any: ...


def generated(output: ModelOutput) -> ModelOutput:
    """Return an output of `generate` with both names of its cache."""
    output_class = globals().get(type(output).__name__)
    return output if output_class is None else output_class(**output)  # None: of `custom_generate`


def selected_hidden_states(selection: bool | int | list[int] | None) -> list[int] | None:
    """Return the indices that `output_hidden_states` selects, or None if all hidden states are returned."""
    return output_capturing.selected_hidden_states(selection) if SELECTS_HIDDEN_STATES else None
