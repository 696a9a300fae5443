"""Statistics of the last chunks alone, `windowed_statistics`, as the inference of the published code has them."""

from collections.abc import Callable

import torch

from luna_mega.modeling_common.inputs import Batch
from luna_mega.modeling_megalodon.cache_megalodon import MegalodonCache
from luna_mega.modeling_megalodon.configuration_megalodon import MegalodonConfig

# Chunks in one piece of a prompt; from how many on the statistics begin anew, and of how many they then are.
PIECE, LONG, WINDOW = 2, 8, 6


def needs_windows(config: MegalodonConfig, batch: Batch, training: bool, records: bool) -> bool:
    """Return whether a call reaches so far that statistics begin anew.

    `records`: states or weights of the layers are asked for.

    Raises:
        ValueError: such a call has padding, goes on from a cache, is spread over ranks or asks for states.
    """
    length = batch.embeddings.shape[1]
    if training or not config.windowed_statistics or length == 1:
        return False
    seen = 0 if batch.target is None else batch.target.get_seq_length()
    longest = batch.layout.sizes(batch.embeddings)[1]
    if seen + longest <= LONG * config.chunk_size:
        return False
    layout = batch.layout
    if layout.is_ragged() or layout.mask is not None or not layout.parts.is_whole():
        raise ValueError(
            f"windowed_statistics=True has no padding, no ragged batches and no cp_group beyond {LONG} chunks of "
            f"{config.chunk_size} positions: pass sequences of one length, or set it to False"
        )
    if seen or records:
        raise ValueError(
            f"windowed_statistics=True takes the first {seen + length} positions, more than {LONG} chunks of "
            f"{config.chunk_size}, in one call, and returns no states or weights of layers: leave prefill_chunk_size, "
            "output_hidden_states and output_attentions out, or set it to False"
        )
    return True


def run_in_windows(
    config: MegalodonConfig,
    states: torch.Tensor,
    past: MegalodonCache | None,
    run: Callable[[torch.Tensor, MegalodonCache], torch.Tensor],
) -> torch.Tensor:
    """Return the results `[B, T, d]` of `run`, which goes through all layers, and bring `past` up to date."""
    chunk, length = config.chunk_size, states.shape[1]
    past = MegalodonCache(config) if past is None else past
    whole = (length - 1) // chunk * chunk
    ends = [*range(PIECE * chunk, whole, PIECE * chunk), whole, length]
    outputs, start = [], 0
    for end in ends:
        outputs.append(run(states[:, start:end], past))
        start = end
        if LONG * chunk <= end < length:
            window = MegalodonCache(config)
            run(states[:, end - WINDOW * chunk : end], window)
            for layer, other in zip(past.layers, window.layers, strict=True):
                for norm in ("norm", "final"):
                    if (statistics := other.statistics(norm)) is not None:
                        layer.store_statistics(norm, statistics)
    return torch.cat(outputs, 1)
