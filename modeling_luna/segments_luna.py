"""Encode documents of any length with constant memory: P is passed from segment to segment (section 6)."""

from collections.abc import Iterator

import torch

from luna_mega.modeling_common.masks import find_mask, to_bool_mask
from luna_mega.modeling_luna.modeling_luna import LunaModel, LunaModelOutput


def read_segments(
    model: LunaModel,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor | None = None,
    *,
    segment_length: int,
    gradient_segments: int | None = None,
    packed_states: torch.Tensor | None = None,
) -> Iterator[LunaModelOutput]:
    """Encode B documents segment by segment; each segment starts from the P after the previous one.

    Positions restart at 0 in each segment, so that `max_position_embeddings` can be as low as `segment_length`. Only P
    is passed on. If the outputs are discarded, memory is independent of the length of the documents.

    Args:
        model: an encoder with `dynamic_projection_length=False`, so that each segment uses all rows of P.
        input_ids: `[B, T]` token ids.
        attention_mask: `[B, T]`, 1 = keep, with padding only on the right; None = all tokens except `pad_token_id`. P
            of a document does not change after its end.
        segment_length: tokens per segment; the last one can be shorter.
        gradient_segments: detach P from the graph before each segment whose index is a multiple of this; None = never.
        packed_states: `[B, l, d]`, initial P, for example from an earlier part of the documents; None = the parameter.

    Yields:
        The output of each segment. `packed_last_hidden_state` of the last one represents the document.

    Raises:
        ValueError: If the model is a decoder or has a dynamic length of P, a length is below 1, or padding precedes a
            token.
    """
    if model.config.is_decoder or model.config.dynamic_projection_length:
        raise ValueError("`read_segments` requires an encoder with dynamic_projection_length=False")
    for name, value in (("segment_length", segment_length), ("gradient_segments", gradient_segments)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    mask = to_bool_mask("attention_mask", attention_mask)
    if mask is None:
        mask = find_mask(input_ids, model.config)
    if mask is None:
        mask = torch.ones_like(input_ids, dtype=torch.bool)
    if (~mask[:, :-1] & mask[:, 1:]).any():
        raise ValueError("`attention_mask` has padding before a token; pad on the right (padding_side='right')")
    for index, start in enumerate(range(0, input_ids.shape[1], segment_length)):
        if packed_states is not None and gradient_segments is not None and index % gradient_segments == 0:
            packed_states = packed_states.detach()
        segment = slice(start, start + segment_length)
        output = model(input_ids[:, segment], mask[:, segment], packed_states=packed_states)
        packed_states = output.packed_last_hidden_state
        yield output


__all__ = ["read_segments"]
