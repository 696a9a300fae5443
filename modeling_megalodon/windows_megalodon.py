"""Statistics of only the last chunks (`windowed_statistics`), as in the inference of the published code."""

from collections.abc import Mapping
from typing import Any

import torch

from luna_mega.modeling_common.inputs import Inputs
from luna_mega.modeling_common.layout import NO_PADDING, PaddedLayout
from luna_mega.modeling_common.masks import can_read

# Chunks of each part of a prompt; chunks after which the statistics restart; and chunks that they include then.
PIECE, LONG, WINDOW = 2, 8, 6


def windowed_inputs(model: Any, inputs: Inputs, options: Mapping[str, Any]) -> Inputs | None:
    """Return the inputs of a call whose sequences are so long that statistics restart; None for other calls.

    Raises:
        ValueError: Such a call has padding or a filled cache, or requests states or weights of layers.
    """
    config, layout, length, seen = model.config, inputs.layout, inputs.given.shape[1], inputs.seen
    if length == 1 or seen + layout.sizes(inputs.given)[1] <= LONG * config.chunk_size:
        return None
    if isinstance(layout, PaddedLayout) and layout.mask is not None and can_read(layout.mask) and layout.mask.all():
        layout = NO_PADDING  # `generate` passes masks of ones, which are only read on a CPU
        inputs = inputs._replace(mask=None, layout=layout)
    if not isinstance(layout, PaddedLayout) or layout.mask is not None:
        raise ValueError(
            f"windowed_statistics=True does not support padding or padding-free batches after {LONG} "
            f"chunks of {config.chunk_size} positions; pass sequences of one length, or set it to False"
        )
    if seen or inputs.output_states or options.get("output_attentions", config.output_attentions):
        raise ValueError(
            f"windowed_statistics=True requires the first {seen + length} positions, more than {LONG} chunks of "
            f"{config.chunk_size}, in one call, and returns no states or weights of layers; omit "
            "`prefill_chunk_size`, `output_hidden_states` and `output_attentions`, or set it to False"
        )
    return inputs


def run_in_windows(model: Any, states: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return the results `[B, T, d]` of all layers; the cache is updated in place."""
    chunk, length = model.config.chunk_size, states.shape[1]
    cache = model.cache_class(model.config) if inputs.cache is None else inputs.cache
    complete = (length - 1) // chunk * chunk
    ends = [*range(PIECE * chunk, complete, PIECE * chunk), complete, length]
    outputs, start = [], 0
    for end in ends:
        outputs.append(model.run_layers(states[:, start:end], inputs, cache))
        start = end
        if LONG * chunk <= end < length:
            window = model.cache_class(model.config)
            model.run_layers(states[:, end - WINDOW * chunk : end], inputs, window)
            for layer, other in zip(cache.layers, window.layers, strict=True):
                for norm in ("norm", "final"):
                    if (statistics := other.statistics(norm)) is not None:
                        layer.store_statistics(norm, statistics)
    return torch.cat(outputs, 1)
