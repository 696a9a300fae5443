"""Positions of tokens: their numbers, sinusoids, and positions of texts that are longer than the table."""

import math

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.kernels.support import forbid_capture, in_program
from luna_mega.modeling_common.inputs import Inputs
from luna_mega.modeling_common.layout import Layout
from luna_mega.modeling_common.masks import can_look


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
    if inputs.position_ids is not None and can_look(positions):
        first, last = (x.item() for x in positions.aminmax())
        table = config.num_learned_positions
        limit = table if extension is None else max(table, length)
        if first < 0 or (learned and last >= limit):
            raise ValueError(
                f"`position_ids` are from {first} to {last}; they must be at least 0, and less than the {limit} "
                "learned positions (`max_position_embeddings`)"
            )
    if extension is not None and (in_program() or length > config.num_learned_positions):
        positions = extend_positions(positions, layout, length, config)
    return positions


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
