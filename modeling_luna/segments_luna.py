"""A document of any length at constant memory: P runs through its segments (section 6 names it as future work)."""

from collections.abc import Iterator

import torch

from luna_mega.modeling_common.masks import read_mask
from luna_mega.modeling_luna.modeling_luna import LunaModel, LunaModelOutput


def read_segments(
    model: LunaModel,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor | None = None,
    *,
    segment_length: int,
    gradient_segments: int | None = None,
    packed_states: torch.FloatTensor | None = None,
) -> Iterator[LunaModelOutput]:
    """Read B documents segment by segment; every segment starts from the P that the one before left.

    Positions start anew in every segment, so that learned ones need not be more than `segment_length`. Nothing of a
    segment but P outlives it: the memory of a loop that drops the outputs does not grow with the document.

    Args:
        model: an encoder with `dynamic_projection_length=False`: all rows of P are in use from the first segment on.
        input_ids: `[B, T]` tokens.
        attention_mask: `[B, T]`, 1 = keep, with padding on the right only; None = all that are not `pad_token_id`. A
            document that has ended keeps its P, whatever its batch mates go on with.
        segment_length: tokens a segment; the last may be shorter.
        gradient_segments: P is cut from the graph before every segment whose index is a multiple of this, so that a
            loss of segment i reaches back to the last of these; None = never.
        packed_states: `[B, l, d]`, the P to begin with, such as the last one of an earlier part; None = learned.

    Yields:
        The output of each segment; `packed_last_hidden_state` of the last one is the memory of the document.

    Raises:
        ValueError: a decoder, a P of dynamic length, lengths below 1, or padding before a token.
    """
    if model.config.is_decoder or model.config.dynamic_projection_length:
        raise ValueError("reading in segments needs an encoder with dynamic_projection_length=False")
    for name, value in (("segment_length", segment_length), ("gradient_segments", gradient_segments)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    mask = read_mask("attention_mask", attention_mask)
    if mask is None:
        mask = input_ids != model.config.pad_token_id
    if (~mask[:, :-1] & mask[:, 1:]).any():
        raise ValueError("documents are read from the left: put the padding behind them (padding_side='right')")
    for index, start in enumerate(range(0, input_ids.shape[1], segment_length)):
        if packed_states is not None and gradient_segments is not None and index % gradient_segments == 0:
            packed_states = packed_states.detach()
        segment = slice(start, start + segment_length)
        output = model(input_ids[:, segment], mask[:, segment], packed_states=packed_states)
        packed_states = output.packed_last_hidden_state
        yield output


__all__ = ["read_segments"]
