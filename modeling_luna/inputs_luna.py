"""Inputs that only Luna has: positions of tokens, and the packed sequence P of a caller or a cache."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.kernels.support import forbid_capture, in_program
from luna_mega.modeling_common.base import BodyMixin
from luna_mega.modeling_common.inputs import Inputs
from luna_mega.modeling_common.layout import Layout
from luna_mega.modeling_common.masks import can_look, is_sound, read_mask
from luna_mega.modeling_common.outputs import selected_hidden_states


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return the sinusoids of positions `[...]`, `[..., width]` in float32: sines, then cosines, as in fairseq."""
    half = width // 2
    index = torch.arange(half, device=positions.device, dtype=torch.float32)
    angle = positions[..., None].float() * torch.exp(index * (-math.log(10000.0) / (half - 1)))
    return nn.functional.pad(torch.cat([angle.sin(), angle.cos()], dim=-1), (0, width % 2))


def number_positions(config: PreTrainedConfig, inputs: Inputs) -> torch.Tensor:
    """Return the position of every token in the layout, `[B or 1, T]`: the number of kept tokens before it."""
    layout, given, longest = inputs.layout, inputs.given, config.longest_input
    learned, extension = config.position_embedding_type == "learned", config.position_extension
    length = layout.sizes(given)[1] + inputs.seen if learned else 0
    if inputs.position_ids is not None:
        positions = layout.gather(inputs.position_ids.expand(given.shape[:2]))
        # Positions of padding have no effect and may be invalid.
        positions = positions if layout.mask is None else positions.masked_fill(~layout.mask, 0)
    else:
        positions = layout.positions(given)
        if inputs.cache is not None and inputs.seen:
            positions = positions + inputs.cache.layers[0].tensors["count"][:, None]
    # Padding has no positions. Programs contain no branch on values.
    if longest is not None and length > longest and (inputs.past_key_values is not None or not in_program()):
        forbid_capture(positions, f"{length} positions of a model that has learned {longest}", "shorten the input")
        if inputs.position_ids is None and not inputs.seen:
            counts = layout.counts()
            length = length if counts is None else min(length, int(counts.max()))
        else:
            length = min(length, int(positions.max()) + 1)
    if inputs.position_ids is not None or (longest is not None and length > longest):
        check_positions(config, inputs.position_ids, positions, length)
    if extension is not None and (in_program() or length > config.num_learned_positions):
        positions = extend_positions(positions, layout, length, config)
    return positions


def check_positions(
    config: PreTrainedConfig, position_ids: torch.Tensor | None, positions: torch.Tensor, length: int
) -> None:
    """Raise `ValueError` for a sequence that is too long, and on a CPU for `position_ids` without a learned position.

    `length` is the length of the longest sequence, or 0 if positions are not learned.
    """
    longest = config.longest_input
    if longest is not None and length > longest:
        if config.position_table_size is not None:
            raise ValueError(
                f"the sequence length {length} exceeds the `max_position_embeddings` {longest} of the model; truncate "
                "the input, or set a larger value in the configuration"
            )
        raise ValueError(
            f"the sequence length {length} exceeds the {longest} learned positions of the model; truncate the input "
            "or train with a larger `max_position_embeddings` (`max_target_positions` of a decoder), or set "
            "`position_extension` of an encoder"
        )
    if position_ids is not None and can_look(positions):
        first, last = (x.item() for x in positions.aminmax())
        table = config.num_learned_positions
        limit = table if config.position_extension is None else max(table, length)
        if first < 0 or (config.position_embedding_type == "learned" and last >= limit):
            raise ValueError(
                f"`position_ids` are from {first} to {last}; they must be at least 0, and less than the {limit} "
                "learned positions (`max_position_embeddings`)"
            )


def extend_positions(positions: torch.Tensor, layout: Layout, length: int, config: PreTrainedConfig) -> torch.Tensor:
    """Return positions `[B or 1, T]` within the table: integers for "wrap", real numbers for "interpolate".

    `length` is the length of sequences without dropped tokens.
    """
    last = config.num_learned_positions - 1
    if config.position_extension == "wrap":
        return torch.where(positions <= last, positions, 1 + (positions - 1) % last)
    count = layout.counts()
    if count is None:
        count = positions.new_full((1, 1), length)
    else:
        count = layout.spread(count, positions.shape[1])[..., 0]
    # By the length of the sequence itself, so that padding moves no position.
    return (positions * (last / (count - 1).clamp(min=1)).clamp(max=1.0)).clamp(max=last)


def interpolate(table: nn.Embedding, places: torch.Tensor, offset: int) -> torch.Tensor:
    """Return position embeddings at real numbers `[B or 1, T]`, `[B or 1, T, d]`; exact at integers."""
    low = places.long().clamp(max=table.num_embeddings - offset - 2)
    weight = (places - low)[..., None].to(table.weight.dtype)
    return torch.lerp(table(low + offset), table(low + offset + 1), weight)


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


def rows_in_use(
    model: BodyMixin,
    inputs: Inputs,
    packed_states: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
    options: Mapping[str, Any],
) -> Packed:
    """Return the absent P of every layer and the mask of the rows that a sequence of n tokens uses, `[B, L]`.

    Raises:
        ValueError: an argument is for the packed sequence P.
    """
    config = model.config
    given = {"packed_states": packed_states is not None, "packed_mask": packed_mask is not None}
    name = "output_packed_attentions"
    given[name] = options.get(name, getattr(config, name, False))
    if names := [name for name, value in given.items() if value]:
        raise ValueError(
            f"`{names[0]}` is not supported with pack_method='importance', which has no packed sequence P; omit it"
        )
    (batch, length), count = inputs.layout.sizes(inputs.given), inputs.layout.counts()
    if count is None:
        count = inputs.given.new_full((batch, 1), length, dtype=torch.long)
    rows = config.projection_length if in_program() else min(config.projection_length, length)
    return [None] * config.num_hidden_layers, torch.arange(rows, device=count.device) < count
