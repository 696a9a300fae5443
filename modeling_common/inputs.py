"""Inputs of a forward pass: `prepare` checks and reads the arguments, and `embed` is the first computation."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from luna_mega.modeling_common.cache import StateCache, begin_cache, split_cache
from luna_mega.modeling_common.layout import DENSE, DenseLayout, Layout, close_gaps
from luna_mega.modeling_common.masks import can_look, clean, drop_if_full, find_mask, read_mask
from luna_mega.modeling_common.padding_free import VARLEN_OPTIONS, find_padding_free, unpad
from luna_mega.modeling_common.pooling import without_first
from luna_mega.modeling_common.validation import (
    check_inputs,
    check_padding_free,
    check_source,
    check_tokens,
    find_boundaries,
    read_token_types,
    validate,
)


class ValueEmbeddings(nn.Module):
    """Embedding x * weight + bias of real numbers x, from `[B, T]` to `[B, T, d]` (pixels, audio samples)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, values[..., None].to(self.weight.dtype), self.weight)


class Inputs(NamedTuple):
    """Arguments of a forward pass after all checks. Nothing is embedded yet.

    Args:
        given: token ids or values `[B, T]`, embeddings `[B, T, d]` or images `[B, C, H, W]`.
        mask: `[B, T]` bool of the batch, True = keep; None = all.
        layout: the positions of the tokens.
        past_key_values: the cache to read and to update, or None.
        cache, cross_cache: its parts for the positions so far and for the encoder's output, or None.
        seen: the number of positions in the cache.
        output_weights: whether attention is computed in steps that return its weights.
        output_states: whether the hidden states of all layers are returned.
        position_ids: `[B or 1, T]` of the batch, or None.
        encoder_hidden_states: `[B, S, d]`, or None.
        encoder_layout: the positions of its tokens.
        token_type_ids: `[B, T]` of the batch; None = all 0.
    """

    given: torch.Tensor
    mask: torch.Tensor | None
    layout: Layout
    past_key_values: Cache | None
    cache: StateCache | None
    cross_cache: StateCache | None
    seen: int
    output_weights: bool
    output_states: bool
    position_ids: torch.Tensor | None
    encoder_hidden_states: torch.Tensor | None = None
    encoder_layout: Layout = DENSE
    token_type_ids: torch.Tensor | None = None


def prepare(
    model: Any,
    *,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> Inputs:
    """Return the inputs of a forward pass of `model`, a model without a head.

    Args:
        model: model whose attributes specify the supported inputs, see `BodyMixin`.
        encoder_hidden_states: `[B, S, d]`, output of an encoder, or None.
        encoder_attention_mask: `[B, S]`, 1 = keep; None = all.
        arguments: further arguments of `forward`, its keyword arguments as `options`, and as `grid` the rows and
            columns of patches of images.

    Raises:
        ValueError: The arguments do not fit together or are not supported by the model.
    """
    inputs = read(model, **arguments)
    if model.config.add_cross_attention or encoder_hidden_states is not None or encoder_attention_mask is not None:
        inputs = _read_source(model, inputs, encoder_hidden_states, encoder_attention_mask)
    return inputs


def read(
    model: Any,
    *,
    options: Mapping[str, Any],
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
    use_cache: bool | None = None,
    grid: tuple[int, int] | None = None,
    **values: torch.Tensor | None,
) -> Inputs:
    """Return the inputs without the output of an encoder, after all checks."""
    updated = cache = cross_cache = None
    if past_key_values is not None or use_cache or (use_cache is None and model.config.is_decoder):
        updated = begin_cache(model, past_key_values, use_cache)
        cache, cross_cache = split_cache(updated)
    seen = 0 if cache is None else cache.get_seq_length()
    given, mask, output_weights = validate(model, values, grid, attention_mask, cache, seen, options)
    shape = (given.shape[0], given.shape[1] if grid is None else grid[0] * grid[1])
    if mask is not None:
        mask = drop_if_full(mask)
    elif given.dim() == 2 and not given.is_floating_point():
        mask = drop_if_full(find_mask(given, model.config))
    if token_type_ids is not None:
        token_type_ids = read_token_types(model, token_type_ids, shape, mask)
    output_states = bool(options.get("output_hidden_states", model.config.output_hidden_states))
    requested = (output_weights, output_states)
    inputs = Inputs(
        given, mask, DENSE, updated, cache, cross_cache, seen, *requested, None, token_type_ids=token_type_ids
    )
    boundaries = None
    if position_ids is not None:
        position_ids, boundaries = find_boundaries(model, position_ids, shape, attention_mask, cache, options)
        inputs = inputs._replace(position_ids=position_ids)
    declared = boundaries is not None or not VARLEN_OPTIONS.isdisjoint(options)
    if declared and (layout := find_padding_free(shape, mask, boundaries, options)) is not None:
        check_padding_free(model, inputs, layout, past_key_values is not None or bool(use_cache))
        return inputs._replace(layout=layout, past_key_values=None, cache=None, cross_cache=None)
    unpads = model.config.unpad_inputs and updated is None and not (output_weights or output_states)
    if unpads and not model.config.add_cross_attention and (layout := unpad(mask)) is not None:
        return inputs._replace(layout=layout)
    return inputs._replace(layout=close_gaps(mask, cache) if model.closes_gaps else DenseLayout(mask))


def _read_source(
    model: Any, inputs: Inputs, states: torch.Tensor | None, attention_mask: torch.Tensor | None
) -> Inputs:
    """Return the inputs with the output of an encoder, unless the cache contains it already."""
    cached = check_source(model, inputs, states, attention_mask)
    mask = drop_if_full(read_mask("encoder_attention_mask", attention_mask))
    layout: Layout = DenseLayout(mask)
    if states is not None and not cached:
        states = clean(states, mask)
        layout = close_gaps(mask) if model.closes_gaps else layout
        states = layout.gather(states)
    return inputs._replace(encoder_hidden_states=states, encoder_layout=layout)


def embed(model: Any, inputs: Inputs) -> torch.Tensor:
    """Return embeddings `[B, T, d]` of tokens, values or images in the layout of `inputs`."""
    given, module = inputs.given, model.get_input_embeddings()
    if inputs.mask is not None and given.is_floating_point():
        given = module.clean(given, inputs.mask) if given.dim() == 4 else clean(given, inputs.mask)
    if given.dim() == 3:
        return inputs.layout.gather(given)
    try:
        return inputs.layout.gather(module(given))
    except IndexError:  # only on a CPU: a GPU would have to wait
        check_tokens(given, model.config.vocab_size)
        raise


def scatter_states(inputs: Inputs, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the states after the last layer as `[B, T, d]` of the batch, with zeros in rows without a token.

    Otherwise results for such a row would depend on dropped inputs and on the other rows. Rows that continue a cache
    have tokens in earlier calls.
    """
    states, counts = inputs.layout.scatter(hidden_states), inputs.layout.counts()
    if inputs.layout.mask is None or counts is None or inputs.seen:
        return states
    if can_look(counts) and counts.all():
        return states
    return states.masked_fill((counts == 0)[..., None], 0.0)


def read_sequences(
    model: Any,
    name: str,
    attention_mask: torch.Tensor | None,
    inputs: dict[str, torch.Tensor | None],
    options: Mapping[str, Any],
    drop_first_token: bool,
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]:
    """Return the bool mask and the inputs of a head with one result per row; `name` is the class of the head.

    With `drop_first_token` the first token of each row is removed. The results are arguments of `model`, the model
    without a head.

    Raises:
        ValueError: As `prepare`; and if the batch is padding-free.
    """
    mask = read_mask("attention_mask", attention_mask)
    given = check_inputs(model, mask, inputs)
    shape = (given.shape[0], given.shape[1])
    positions = options.get("position_ids") if mask is None else None
    if find_padding_free(shape, None, positions, options) is not None:
        raise ValueError(f"{name} does not support padding-free batches; pad the batch")
    if mask is None and inputs["input_ids"] is not None:
        mask = find_mask(inputs["input_ids"], model.config)
    if drop_first_token:
        if (types := options.get("token_type_ids")) is not None:
            inputs = inputs | {"token_type_ids": read_token_types(model, types, shape, mask)}
        inputs = {key: without_first(value, mask) for key, value in inputs.items()}
        mask = without_first(mask, mask)
    return mask, inputs
