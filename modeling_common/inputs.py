"""Inputs of a forward pass: `prepare` checks the arguments and returns `Inputs`, and `embed` returns embeddings."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from luna_mega.kernels.for_models import COMPILED, mode, tracing_error
from luna_mega.modeling_common.arguments import (
    check_cached_weights,
    check_input,
    check_options,
    check_padding_free,
    check_position_ids,
    check_source,
    check_token_types,
    check_tokens,
)
from luna_mega.modeling_common.base import BodyMixin
from luna_mega.modeling_common.cache import StateCache, begin_cache, split_cache
from luna_mega.modeling_common.layout import NO_PADDING, Layout, PaddedLayout, close_gaps
from luna_mega.modeling_common.masks import can_look, clean, drop_if_full, find_mask, find_target_mask, to_bool_mask
from luna_mega.modeling_common.padding_free import VARLEN_OPTIONS, find_padding_free, unpad


class ValueEmbeddings(nn.Module):
    """Linear embedding of real numbers, `[B, T]` or with C channels `[B, T, C]`, to `[B, T, d]` (pixels, samples)."""

    def __init__(self, hidden_size: int, num_channels: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, *([num_channels] if num_channels > 1 else [])))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values.to(self.weight.dtype)
        if self.weight.dim() == 2:
            return nn.functional.linear(values, self.weight, self.bias)
        return torch.addcmul(self.bias, values if values.dim() == 3 else values[..., None], self.weight)


class Inputs(NamedTuple):
    """Arguments of a forward pass after all checks. Nothing is embedded yet.

    Args:
        given: token ids or values `[B, T]`, values `[B, T, C]`, embeddings `[B, T, d]` or images `[B, C, H, W]`.
        mask: `[B, T]` bool of the batch, True = keep; None = all.
        layout: the positions of the tokens.
        model_cache: the cache to read and to update, or None.
        cache, cross_cache: the caches of self-attention and cross-attention in `model_cache`, or None.
        seen: the number of positions in the cache.
        output_weights: whether attention weights are computed, see `returns_weights`.
        output_states: whether the hidden states of all layers are returned.
        position_ids: `[B or 1, T]` of the batch, or None.
        encoder_hidden_states: `[B, S, d]`, or None.
        encoder_layout: the positions of the tokens of `encoder_hidden_states`.
        token_type_ids: `[B, T]` of the batch; None = all 0.
        embedded: whether `given` are embeddings.
    """

    given: torch.Tensor
    mask: torch.Tensor | None
    layout: Layout
    model_cache: Cache | None
    cache: StateCache | None
    cross_cache: StateCache | None
    seen: int
    output_weights: bool
    output_states: bool
    position_ids: torch.Tensor | None
    encoder_hidden_states: torch.Tensor | None = None
    encoder_layout: Layout = NO_PADDING
    token_type_ids: torch.Tensor | None = None
    embedded: bool = False


def prepare(
    model: BodyMixin,
    *,
    options: Mapping[str, Any],
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    input_values: torch.Tensor | None = None,
    pixel_values: torch.Tensor | None = None,
    grid: tuple[int, int] | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    model_cache: Cache | None = None,
    use_cache: bool | None = None,
) -> Inputs:
    """Return the inputs of a forward pass of `model`, a model without a head.

    The attributes of `BodyMixin` specify which arguments of `forward` are supported. `options` are the `kwargs` of
    `forward`, and `grid` is the number of rows and columns of image patches.

    Raises:
        ValueError: The arguments do not fit together or are not supported by the model, see `arguments.py`.
        RuntimeError: The model is being traced by `torch.jit.trace`.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise tracing_error()
    config = model.config
    model.check_built()
    cache = cross_cache = None
    requests_cache = model_cache is not None or bool(use_cache)
    if requests_cache or (use_cache is None and config.is_decoder):
        model_cache = begin_cache(model, model_cache, use_cache)
        cache, cross_cache = split_cache(model_cache)
    seen = 0 if cache is None else cache.get_seq_length()
    if options:
        check_options(model, options, attention_mask)
    output_states = bool(options.get("output_hidden_states", config.output_hidden_states))
    output_weights = returns_weights(model, options, seen)

    inputs = {"input_ids": input_ids, "input_values": input_values, "pixel_values": pixel_values}
    given: Any = inputs_embeds
    for tensor in inputs.values():
        given = tensor if given is None else given
    mask = attention_mask if attention_mask is None or not seen else mask_of_new(attention_mask, given, seen)
    check_input(model, mask, inputs | {"inputs_embeds": inputs_embeds}, grid)
    if mask is not None:
        mask = to_bool_mask("attention_mask", mask, drop_full=True)
    elif input_ids is not None:
        find = find_target_mask if model.reads_target and not seen else find_mask
        mask = drop_if_full(find(input_ids, config))
    if cache is not None:
        cache.check(config, given)
    shape = (given.shape[0], given.shape[1] if grid is None else grid[0] * grid[1])
    if token_type_ids is not None:
        token_type_ids = read_token_types(model, token_type_ids, shape, mask)
    if position_ids is not None:
        check_position_ids(model, position_ids, shape, attention_mask, cache)
        position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids

    padding_free = None
    if position_ids is not None or not VARLEN_OPTIONS.isdisjoint(options):
        boundaries = position_ids if attention_mask is None else None
        if model.packs and options.get("cu_seq_lens_q") is not None:
            boundaries = None  # positions of a Luna may also restart within a sequence
        padding_free = find_padding_free(shape, mask, boundaries, options)
    if padding_free is not None:
        check_padding_free(model, padding_free, requests_cache, output_weights, output_states)
        model_cache = cache = None  # discards the cache that a decoder creates by default
    elif config.unpad_inputs and model_cache is None and not config.add_cross_attention:
        padding_free = None if output_weights or output_states else unpad(mask)
    layout: Layout = padding_free or (close_gaps(mask, cache) if model.closes_gaps else PaddedLayout(mask))

    source, encoder_layout = encoder_hidden_states, NO_PADDING
    if config.add_cross_attention or source is not None or encoder_attention_mask is not None:
        check_source(model, source, encoder_attention_mask, given.shape[0], cross_cache)
        source, encoder_layout = read_source(model, source, encoder_attention_mask, cross_cache)
    return Inputs(
        given, mask, layout, model_cache, cache, cross_cache, seen, output_weights, output_states, position_ids,
        encoder_hidden_states=source, encoder_layout=encoder_layout, token_type_ids=token_type_ids,
        embedded=inputs_embeds is not None,
    )  # fmt: skip


def returns_weights(model: BodyMixin, options: Mapping[str, Any], past_length: int) -> bool:
    """Return whether attention weights are computed, by request or with "eager"; with a filled cache only in Luna."""
    requested = any(options.get(name, getattr(model.config, name, False)) for name in model.weight_options)
    if past_length and not model.packs:
        check_cached_weights(requested)
        return False
    return requested or model.config._attn_implementation == "eager"


def mask_of_new(mask: torch.Tensor, inputs: torch.Tensor | None, past_length: int) -> torch.Tensor:
    """Return the columns of new positions in a mask `[B, T]` that may also cover all `past_length` cached positions."""
    if mask.dim() != 2 or inputs is None or inputs.dim() < 2:
        return mask  # `check_input` raises the error
    # In an exported program, `past_length` is 1 for any filled cache.
    return mask[:, -inputs.shape[1] :] if mode() >= COMPILED or mask.shape[1] == past_length + inputs.shape[1] else mask


def read_source(
    model: BodyMixin, states: torch.Tensor | None, attention_mask: torch.Tensor | None, cache: StateCache | None
) -> tuple[torch.Tensor | None, PaddedLayout]:
    """Return the encoder's output in its layout, or None if the cache contains the output, and the layout."""
    mask = to_bool_mask("encoder_attention_mask", attention_mask, drop_full=True)
    if states is None or (cache is not None and cache.layers[0].is_initialized):
        return None, PaddedLayout(mask)
    layout = close_gaps(mask) if model.closes_gaps else PaddedLayout(mask)
    return layout.gather(clean(states, mask)), layout


def read_token_types(
    model: BodyMixin, token_type_ids: torch.Tensor, shape: tuple[int, int], mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Return `token_type_ids` `[B, T]` with 0 at positions that the bool mask drops; None = no type embeddings."""
    check_token_types(model, token_type_ids, shape, mask)
    if not model.token_types:
        return None
    return token_type_ids if mask is None else token_type_ids.masked_fill(~mask, 0)


def embed(model: BodyMixin, inputs: Inputs) -> torch.Tensor:
    """Return embeddings `[B, T, d]` of tokens, values or images in the layout of `inputs`."""
    tensor = inputs.given
    module: Any = model.get_input_embeddings()
    if inputs.mask is not None and tensor.is_floating_point():
        tensor = module.clean(tensor, inputs.mask) if tensor.dim() == 4 else clean(tensor, inputs.mask)
    if inputs.embedded:
        return inputs.layout.gather(tensor)
    pad, count = model.config.pad_token_id, model.config.vocab_size
    if inputs.mask is not None and pad is not None and not 0 <= pad < count and not tensor.is_floating_point():
        tensor = tensor.masked_fill(~inputs.mask, 0)
    try:
        embedded: torch.Tensor = inputs.layout.gather(module(tensor))
    except IndexError:  # only on a CPU: checking before would make a GPU wait
        check_tokens(tensor, count)
        raise
    if inputs.layout.mask is None or tensor.is_floating_point() or not embedded.requires_grad:
        return embedded
    # A loss may depend on states at padding, but has no gradient for the embeddings of padding.
    return torch.where(inputs.layout.mask[..., None], embedded, embedded.detach())


def scatter_states(inputs: Inputs, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the states after the last layer as `[B, T, d]` of the batch, with zeros in rows without a token.

    Without zeros, results for a row without a token would depend on dropped inputs and on the other rows. Rows that
    continue a cache keep their states, because they had tokens in earlier calls.
    """
    states, counts = inputs.layout.scatter(hidden_states), inputs.layout.counts()
    if inputs.layout.mask is None or counts is None or inputs.seen:
        return states
    if can_look(counts) and counts.all():
        return states
    return states.masked_fill((counts == 0)[..., None], 0.0)
