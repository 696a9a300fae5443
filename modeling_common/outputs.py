"""Fields that the outputs of the models have in common."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.modeling_outputs import Seq2SeqModelOutput


class BodyOutput(Protocol):
    """Fields that the outputs of all models without a head have."""

    last_hidden_state: torch.Tensor
    attention_mask: torch.Tensor | None

    def items(self) -> Any: ...


@dataclass
class MaskedOutput:
    """The mask that a model without a head applies, for heads, poolings and decoders.

    Args:
        attention_mask: `[B, T]` bool, True = a kept position; None = all.
    """

    attention_mask: torch.Tensor | None = None


@dataclass
class MaskedSeq2SeqOutput(Seq2SeqModelOutput):
    """`Seq2SeqModelOutput` with the mask of the target.

    Args:
        decoder_attention_mask: `[B, T]` bool, True = a kept position; None = all.
    """

    decoder_attention_mask: torch.Tensor | None = None
