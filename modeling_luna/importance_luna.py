"""The position-aware pack (`pack_method="importance"`)."""

from collections.abc import Mapping
from typing import Any

import torch

from luna_mega.kernels.api import assign_rows, segment_pack
from luna_mega.kernels.support import in_program, upcast, without_autocast
from luna_mega.modeling_common.inputs import Inputs
from luna_mega.modeling_common.layout import Layout
from luna_mega.modeling_luna.packed_luna import Packed


def pack_by_importance(
    states: torch.Tensor, salience: torch.Tensor, layout: Layout, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return at most `most` packed rows `[B, L, d]` of states `[B, T, d]`, their entropy and mask, `[B, L]` each."""
    rows = most if in_program() else min(most, layout.sizes(states)[1])
    with without_autocast(states.device.type):
        score = upcast(states) @ upcast(salience)
    mask, options = layout.mask, layout.varlen_options()
    return segment_pack(states, score, assign_rows(score, mask, rows, **options), mask, rows, **options)


def rows_in_use(
    model: Any,
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
