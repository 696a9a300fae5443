"""Inputs of both models: embeddings of real values, and one set of checks for every kind of input."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers.cache_utils import Cache

from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.modeling_common.base import INPUT_NAMES
from luna_mega.modeling_common.cache import begin_cache
from luna_mega.modeling_common.context_parallel import refuse_together
from luna_mega.modeling_common.layout import RAGGED_OPTIONS, TokenLayout, drop_if_full, find_layout


class ValueEmbeddings(nn.Module):
    """A real number x becomes x * weight + bias, `[B, T]` to `[B, T, d]` (pixels, audio samples)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, values[..., None].to(self.weight.dtype), self.weight)


class CheckedInputs(NamedTuple):
    """The inputs of a forward as layers take them.

    Args:
        embeddings: `[B, T, d]`, or `[1, total, d]` of a ragged batch, without positions.
        mask: `[B, T]` bool of the batch as it came, True = keep; None = all.
        layout: where the tokens are.
        past: the cache to read and to fill, or None.
        output_weights: whether attention runs step by step, which has weights to return.
    """

    embeddings: torch.Tensor
    mask: torch.Tensor | None
    layout: TokenLayout
    past: Cache | None
    output_weights: bool


class InputsMixin:
    """The checked inputs of `LunaModel` and `MegaModel`.

    Every method raises `ValueError` with the numbers where arguments do not fit, and returns them as layers take them.
    """

    forward_options = RAGGED_OPTIONS | {"num_items_in_batch", "output_hidden_states", "output_attentions"}

    def read_inputs(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.FloatTensor | None,
        input_values: torch.FloatTensor | None,
        position_ids: torch.LongTensor | None,
        past_key_values: Cache | None,
        use_cache: bool | None,
        options: dict[str, Any],
        cp_group: "dist.ProcessGroup | None" = None,
    ) -> CheckedInputs:
        """Return the checked inputs for the arguments of a forward."""
        arguments = (input_ids, attention_mask, inputs_embeds, input_values, position_ids)
        if cp_group is None:
            return self._read_whole(*arguments, past_key_values, use_cache, options)
        device = next((x.device for x in arguments if x is not None), self.device)
        with refuse_together(cp_group, device):
            if past_key_values is None and use_cache is None:
                use_cache = False  # what a decoder would begin by default
            inputs = self._read_whole(*arguments, past_key_values, use_cache, options)
            self._check_shared(inputs, position_ids)
        batch, length = inputs.embeddings.shape[:2]
        shard = ContextShard.of(cp_group, length, device, batch=batch)
        return inputs._replace(layout=inputs.layout.share(shard, batch, device))

    def _read_whole(
        self, input_ids, attention_mask, inputs_embeds, input_values, position_ids, past_key_values, use_cache, options
    ):
        self.check_options(options)
        past = begin_cache(self, past_key_values, use_cache)
        embeddings, mask = self.embed(input_ids, attention_mask, inputs_embeds, input_values, past)
        self.check_cache(past, embeddings.shape[0], options)
        weights = self.wants_weights(past, options)
        if attention_mask is not None and options.get("cu_seq_lens_q") is not None:
            raise ValueError("attention_mask with cu_seq_lens_q: ragged sequences have no padding, leave one out")
        states, crosses = self.is_asked("output_hidden_states", options), self.config.add_cross_attention
        unpads = self.config.unpad_inputs and past is None and not (weights or states or crosses)
        restarts = self.find_restarts(position_ids, attention_mask, options)
        layout = find_layout(embeddings.shape[:2], mask, restarts, options, unpads)
        if layout.is_ragged() and not unpads:
            self._check_ragged(embeddings.shape[0], past_key_values is not None or use_cache, weights, states)
            past = None  # what a decoder would have begun by default
        return CheckedInputs(layout.gather(embeddings), mask, layout, past, weights)

    def _check_ragged(self, batch, cache, weights, states):
        """Refuse what ragged batches do not have."""
        if cache:
            raise ValueError("a ragged batch has no cache: leave past_key_values out and pass use_cache=False")
        if self.config.add_cross_attention:
            raise ValueError("a decoder with add_cross_attention=True takes no ragged batch: pad it")
        if weights:
            raise ValueError(
                "a ragged batch has no attention weights to return: pass output_attentions=False and load the model "
                "with attn_implementation='sdpa'"
            )
        if states and batch > 1:
            raise ValueError(f"output_hidden_states=True takes a ragged batch of one row, not one of {batch}")

    def _check_shared(self, inputs, position_ids):
        """Refuse what sequences that ranks share do not have."""
        if inputs.past is not None:
            raise ValueError(
                "cp_group goes without a cache: leave past_key_values out, pass use_cache=False, and generate without "
                "cp_group"
            )
        if inputs.output_weights:
            raise ValueError(
                "cp_group has no attention weights to return: pass output_attentions=False and load the model with "
                "attn_implementation='sdpa'"
            )
        if position_ids is not None:
            raise ValueError("cp_group counts positions over all ranks: leave position_ids out")
        if inputs.layout.is_ragged() or self.config.unpad_inputs:
            raise ValueError(
                "cp_group takes one sequence a row: pad the batch in place of laying it end to end, and set "
                "unpad_inputs=False in the configuration"
            )

    def wants_weights(self, past: Cache | None, options: dict[str, Any]) -> bool:
        """Return whether attention runs step by step, which has weights to return."""
        return self.is_asked("output_attentions", options) or self.config._attn_implementation == "eager"

    def check_options(self, options: dict[str, Any]):
        """Refuse keyword arguments that the model does not have."""
        if unknown := options.keys() - self.forward_options:
            family = self.config.model_type.capitalize()
            raise ValueError(f"{family} models take no {', '.join(sorted(unknown))}; leave the argument out")

    def is_asked(self, name: str, options: dict[str, Any]) -> bool:
        """Return the value of an argument such as `output_attentions`, whose default is in the configuration."""
        return options.get(name, getattr(self.config, name, False))

    def check_inputs(
        self,
        input_ids: torch.LongTensor | None,
        mask: torch.Tensor | None,
        inputs_embeds: torch.FloatTensor | None,
        input_values: torch.FloatTensor | None,
    ):
        """Refuse what is not exactly one kind of input `[B, T]` or `[B, T, d]`, at least one token, and its mask."""
        name, others = INPUT_NAMES[self.config.input_type], {"input_ids": input_ids, "input_values": input_values}
        inputs = others.pop(name, None)
        if any(other is not None for other in others.values()) or (inputs is None) == (inputs_embeds is None):
            raise ValueError(
                f"this model has input_type={self.config.input_type!r}: give exactly one of {name} and inputs_embeds"
            )
        given, width = (inputs, []) if inputs_embeds is None else (inputs_embeds, [self.embedding_width])
        if given.dim() < 2 or list(given.shape[2:]) != width:
            raise ValueError(
                f"this model takes {name} [B, T] or inputs_embeds [B, T, {self.embedding_width}], got the shape "
                f"{list(given.shape)}"
            )
        batch, length = given.shape[:2]
        if batch == 0 or length == 0:
            raise ValueError(f"the batch is empty: {batch} sequences of length {length}")
        if mask is not None and mask.shape != (batch, length):
            raise ValueError(
                f"attention_mask must have the shape [{batch}, {length}] of the input, got {list(mask.shape)}"
            )

    def embed(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        inputs_embeds: torch.FloatTensor | None,
        input_values: torch.FloatTensor | None,
        past=None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return embeddings `[B, T, d]` and the bool mask `[B, T]`, None = all.

        With a filled cache an `attention_mask` may be that of all positions so far.
        """
        mask, given = attention_mask, next((x for x in (inputs_embeds, input_ids, input_values) if x is not None), None)
        if mask is not None and past is not None and past.get_seq_length() and given is not None and given.dim() > 1:
            mask = mask[:, -given.shape[1] :]
        mask = None if mask is None else mask.bool()
        self.check_inputs(input_ids, mask, inputs_embeds, input_values)
        if inputs_embeds is None:
            try:
                inputs_embeds = self.get_input_embeddings()(given)
            except IndexError as error:  # on a CPU; a GPU cannot say it without waiting
                raise ValueError(
                    f"input_ids has numbers from {given.min()} to {given.max()}, and the vocabulary of this model "
                    f"{self.config.vocab_size} tokens: the tokenizer is of another model"
                ) from error
            if mask is None and self.config.input_type == "tokens":
                mask = input_ids != self.config.pad_token_id
        return inputs_embeds, drop_if_full(mask)
