"""A packed sequence P from the caller or a cache, which replaces the learned P, and the recorded P of layers."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.modeling_common.inputs import Inputs
from luna_mega.modeling_common.masks import is_sound, read_mask
from luna_mega.modeling_common.outputs import selected_hidden_states

PackedStates = list[torch.Tensor | None]  # of each layer
Packed = tuple[PackedStates, torch.Tensor | None]


def read_packed(
    config: PreTrainedConfig, inputs: Inputs, states: torch.Tensor | None, mask: torch.Tensor | None
) -> Packed | None:
    """Return P for every layer, None with a filled cache, and the bool mask of its rows; None = P is learned."""
    layers, width, cache = config.num_hidden_layers, config.hidden_size, inputs.cache
    if cache is not None and inputs.seen:
        kept = cache.layers[0].tensors
        _check(states, mask, (inputs.given.shape[0], kept["key_mean"].shape[3], width))
        return [None] * layers, kept.get("pack_mask")
    if cache is not None:
        for layer in cache.layers:
            layer.learned = states is None
    if states is None:
        if mask is not None:
            raise ValueError("`packed_states` is missing; pass it with its `packed_mask`, or neither")
        if config.add_cross_attention:
            raise ValueError("`packed_states` is missing; a decoder with `add_cross_attention=True` requires it")
        return None
    _check(states, mask, (inputs.layout.sizes(inputs.given)[0], "rows", width))
    mask = read_mask("packed_mask", mask, drop_full=True)
    if mask is not None:  # unused rows may contain NaN, and pass through the layers
        states = states.masked_fill(~mask[..., None] & ~is_sound(states), 0.0)
    return [states] * layers, mask


def _check(states: torch.Tensor | None, mask: torch.Tensor | None, shape: tuple[int, int | str, int]) -> None:
    """Raise `ValueError` unless `packed_states` and its mask have this shape.

    If the number of rows in `shape` is a name, any number is accepted.
    """
    batch, rows, width = shape
    if states is not None:
        given = list(states.shape)
        if len(given) != 3 or given[::2] != [batch, width] or rows not in ("rows", given[1]):
            raise ValueError(f"`packed_states` must have the shape [{batch}, {rows}, {width}], got {given}")
        rows = given[1]
    if mask is not None and tuple(mask.shape) != (batch, rows):
        raise ValueError(f"`packed_mask` must have the shape [{batch}, {rows}] of P, got {list(mask.shape)}")


def select_layers(packed: list[torch.Tensor], options: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """Return P of the layers that `output_hidden_states` selects, and None for the others, as transformers does."""
    selected = selected_hidden_states(options.get("output_hidden_states"))
    count = len(packed)
    kept = set(range(count)) if selected is None else {index % count for index in selected if -count <= index < count}
    states = tuple(states if index in kept else None for index, states in enumerate(packed))
    return states[1:] if packed[0] is None else states
