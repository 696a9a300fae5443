"""Outputs of decoders, whose cache has two names, and the fields that the outputs of the models have in common."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)

__all__ = [
    "CACHE",
    "BaseModelOutputWithPast",
    "BaseModelOutputWithPastAndCrossAttentions",
    "BaseModelOutputWithPoolingAndCrossAttentions",
    "BodyOutput",
    "CausalLMOutputWithCrossAttentions",
    "CausalLMOutputWithPast",
    "Seq2SeqLMOutput",
    "Seq2SeqModelOutput",
    "cache_field",
    "kept_positions",
]

# Name of the cache in outputs and in the arguments of `generate`: transformers renamed `past_key_values` in 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def cache_field(cache: Any) -> dict[str, Any]:
    """Return the cache as a keyword argument for the constructor of an output."""
    return {CACHE: cache}


class BodyOutput(Protocol):
    """Fields that the outputs of all models without a head have."""

    last_hidden_state: torch.Tensor
    attention_mask: torch.Tensor | None  # `[B, T]`, 1 = a kept position; None = all

    def items(self) -> Any: ...


def kept_positions(outputs: BodyOutput) -> torch.Tensor | None:
    """Return the bool mask `[B, T]` of the positions that the model kept, True = keep; None = all."""
    return None if outputs.attention_mask is None else outputs.attention_mask.bool()


class _WithCache:
    """Base of outputs whose field is `past_key_values`: `cache` is another name of it, as later versions have both."""

    @property
    def cache(self) -> Any:
        return self.past_key_values  # type: ignore[attr-defined]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_name_of(key))  # type: ignore[misc]

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(_name_of(key))  # type: ignore[misc, no-any-return]

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_name_of(key), default)  # type: ignore[misc]


def _name_of(key: Any) -> Any:
    return CACHE if key == "cache" else key


if CACHE != "cache":
    _RENAMED = (
        BaseModelOutputWithPast,
        BaseModelOutputWithPastAndCrossAttentions,
        BaseModelOutputWithPoolingAndCrossAttentions,
        CausalLMOutputWithCrossAttentions,
        CausalLMOutputWithPast,
        Seq2SeqLMOutput,
        Seq2SeqModelOutput,
    )
    for _class in _RENAMED:
        _subclass = type(_class.__name__, (_WithCache, _class), {"__module__": __name__, "__doc__": _class.__doc__})
        globals()[_class.__name__] = dataclass(_subclass)
