"""Check the arguments of a forward pass before the first embedding. The checks only raise errors."""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from luna_mega.kernels.for_models import EXPORTED, mode
from luna_mega.modeling_common.base import INPUT_NAMES, BodyMixin
from luna_mega.modeling_common.cache import StateCache
from luna_mega.modeling_common.masks import can_look, can_read
from luna_mega.modeling_common.padding_free import VARLEN_OPTIONS, PaddingFreeLayout

# Keyword arguments that every model accepts.
COMMON_OPTIONS = VARLEN_OPTIONS | {"num_items_in_batch", "output_hidden_states", "output_attentions"}


class ModelKwargs(TypedDict, total=False):
    """Keyword arguments of the models in addition to the parameters of their `forward`."""

    num_items_in_batch: torch.Tensor | int | None
    output_hidden_states: bool | None
    output_attentions: bool | None
    output_packed_attentions: bool | None
    return_dict: bool | None
    cu_seq_lens_q: torch.Tensor | None
    cu_seq_lens_k: torch.Tensor | None
    max_length_q: int | None
    max_length_k: int | None
    seq_idx: torch.Tensor | None


class HeadKwargs(ModelKwargs, total=False):
    """Keyword arguments of the models with a head."""

    shift_labels: torch.Tensor | None


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_options(model: BodyMixin, options: Mapping[str, Any], attention_mask: torch.Tensor | None) -> None:
    """Raise `ValueError` for unknown keyword arguments, and for `attention_mask` with `cu_seq_lens_q`."""
    if unknown := {*options} - COMMON_OPTIONS - model.own_options:
        family = model.config.model_type.capitalize()
        raise ValueError(f"{family} models do not support {', '.join(sorted(unknown))}; omit the argument")
    if attention_mask is not None and options.get("cu_seq_lens_q") is not None:
        raise ValueError("`attention_mask` is not supported with `cu_seq_lens_q`; pass only one of them")


def check_cached_weights(requested: bool) -> None:
    """Raise `ValueError` if attention weights are requested with a filled cache, which has no earlier weights."""
    if requested and mode() != EXPORTED:
        raise ValueError("`output_attentions=True` requires a new cache; pass `use_cache=False` for the weights")


def check_input(
    model: BodyMixin,
    mask: torch.Tensor | None,
    inputs: Mapping[str, torch.Tensor | None],
    grid: tuple[int, int] | None = None,
) -> None:
    """Raise `ValueError` unless exactly one of the inputs is given, not empty, and has the shape of the mask.

    `grid` is the result of `PatchEmbeddings.find_grid`, which checks the shape of images; None for other inputs.
    """
    kind = model.config.input_type
    name, tensors = INPUT_NAMES[kind], [x for x in inputs.values() if x is not None]
    main_input, embeds = inputs.get(name), inputs.get("inputs_embeds")
    if len(tensors) != 1 or (main_input is None and embeds is None):
        raise ValueError(f"this model has input_type={kind!r}; pass exactly one of {name} and inputs_embeds")
    shape = list(tensors[0].shape)
    channels = model.config.num_channels if kind == "values" else 1
    widths: list[list[int]] = [[channels]] if channels > 1 else [[], [1]] if kind == "values" else [[]]
    if grid is None and (len(shape) < 2 or shape[2:] not in (widths if embeds is None else [[model.input_width]])):
        form = "[B, T]" if channels == 1 else f"[B, T, {channels}]"
        raise ValueError(
            f"`{name}` must have the shape {form}, or inputs_embeds [B, T, {model.input_width}], got {shape}"
        )
    rows, length = shape[0], shape[1] if grid is None else grid[0] * grid[1]
    if 0 in (rows, length):
        raise ValueError(f"the batch is empty: {rows} sequences of length {length}; pass at least one token")
    if mask is not None and mask.shape != (rows, length):
        raise ValueError(f"attention_mask must have the shape {[rows, length]} of the input, got {list(mask.shape)}")


def check_tokens(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Raise `ValueError` for token ids `[B, T]` outside the vocabulary."""
    if input_ids.dim() == 2 and not input_ids.is_floating_point():
        first, last = (x.item() for x in input_ids.aminmax())
        if first < 0 or last >= vocab_size:
            raise ValueError(
                f"`input_ids` are from {first} to {last}, but the vocabulary of this model has {vocab_size} tokens; "
                "use the tokenizer of this model"
            )


def check_token_types(
    model: BodyMixin, token_type_ids: torch.Tensor, shape: tuple[int, int], mask: torch.Tensor | None
) -> None:
    """Raise `ValueError` unless `token_type_ids` have this shape, and at positions of the bool mask a valid type.

    A model without type embeddings only supports 0, which tokenizers of BERT return for single texts. Values on a CPU
    are always read. On other devices reading synchronizes, so only those of the first batch are read.
    """
    if token_type_ids.shape != shape:
        raise ValueError(
            f"`token_type_ids` must have the shape {list(shape)} of the input, got {list(token_type_ids.shape)}"
        )
    if can_look(token_type_ids) or (not model.has_read_types and can_read(token_type_ids)):
        kept = token_type_ids if mask is None else token_type_ids.masked_fill(~mask, 0)
        first, last = (x.item() for x in kept.aminmax())
        if first < 0 or last >= max(model.token_types, 1):
            reason = (
                f"; they must be at least 0, and less than the `type_vocab_size` {model.token_types} of the model"
                if model.token_types
                else ", but the model has no type embeddings; omit them, or create the model with them (Luna: "
                "`type_vocab_size=2`, Mega: `add_token_type_embeddings=True`)"
            )
            raise ValueError(f"`token_type_ids` are from {first} to {last}{reason}")
        model.has_read_types = True


def check_position_ids(
    model: BodyMixin,
    position_ids: torch.Tensor,
    shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    cache: StateCache | None,
) -> None:
    """Raise `ValueError` unless `position_ids` are integers `[B or 1, T]` or `[T]` that match `attention_mask`."""
    dtype = getattr(position_ids, "dtype", None)
    if dtype not in _INTEGERS:
        raise ValueError(f"position_ids must be a tensor of integers, got {type(position_ids).__name__} of {dtype}")
    if position_ids.shape not in (shape, (1, shape[1]), (shape[1],)):
        raise ValueError(f"position_ids must have the shape {list(shape)} of the input, got {list(position_ids.shape)}")
    if attention_mask is None or model.packs:
        return  # Luna embeds any positions
    if not _follow_mask(position_ids, attention_mask, cache):
        raise ValueError(
            f"`position_ids` differ from the positions of `attention_mask`, and {model.config.model_type.capitalize()} "
            "models have no other positions; omit them, or omit the mask of a padding-free batch"
        )


def _follow_mask(position_ids: torch.Tensor, mask: torch.Tensor, cache: StateCache | None) -> bool:
    """Return whether positions `[..., T]` count the unmasked tokens; True if reading values would synchronize.

    With a filled cache, the mask may cover only the T positions, or also all positions before them.
    """
    if not (can_look(position_ids) and can_look(mask)):
        return True
    length, kept = position_ids.shape[-1], mask.bool()
    positions = kept.cumsum(dim=1) - 1
    if cache is not None and cache.get_seq_length() and mask.shape[1] == length:
        positions = positions + cache.layers[0].position[:, None]
    return not bool(((positions[:, -length:] != position_ids) & kept[:, -length:]).any())


def check_padding_free(
    model: BodyMixin, layout: PaddingFreeLayout, requests_cache: bool, output_weights: bool, output_states: bool
) -> None:
    """Raise `ValueError` for arguments that padding-free batches do not support."""
    if requests_cache:
        raise ValueError("a padding-free batch has no cache; omit `cache` and pass `use_cache=False`")
    if model.config.add_cross_attention:
        raise ValueError("a decoder with `add_cross_attention=True` does not support padding-free batches; pad them")
    if output_weights:
        raise ValueError(
            "a padding-free batch has no attention weights to return; pass `output_attentions=False` and load the "
            "model with `attn_implementation='sdpa'`"
        )
    rows, length = layout.shape
    padding = 0 if layout.places is None else rows * length - len(layout.places)
    if output_states and (rows > 1 or padding):
        raise ValueError(
            "`output_hidden_states` requires a padding-free batch of one row without padding, got "
            + (f"{rows} rows" if rows > 1 else f"{padding} positions of padding")
            + "; remove the padding, or pad the sequences as separate rows"
        )
    if model.config.input_type == "patches":
        raise ValueError("images do not support padding-free batches; omit `position_ids` and `cu_seq_lens_q`")


def check_source(
    model: BodyMixin, states: torch.Tensor | None, mask: torch.Tensor | None, rows: int, cross_cache: StateCache | None
) -> None:
    """Raise `ValueError` for an encoder's output or mask that does not fit; a filled cache replaces the output."""
    config = model.config
    if not config.add_cross_attention:
        raise ValueError("encoder_hidden_states require a decoder with add_cross_attention=True; omit them")
    cached = cross_cache if cross_cache is not None and cross_cache.layers[0].is_initialized else None
    if states is None and cached is None:
        raise ValueError("a decoder with add_cross_attention=True needs encoder_hidden_states [B, S, d]")
    length, width = None if states is None else states.shape[1], config.hidden_size
    if states is not None and (states.dim() != 3 or states.shape[::2] != (rows, width) or length == 0):
        raise ValueError(
            f"encoder_hidden_states must have the shape [{rows}, S, {width}], S at least 1, got {list(states.shape)}"
        )
    if cached is not None:
        cached.check_sizes(config, rows)
        source_length = cached.get_seq_length()
        if length not in (None, source_length) and not model.packs and mode() != EXPORTED:
            raise ValueError(f"`cache` has another source, of length {source_length}, not {length}; pass a new cache")
        length = source_length if length is None else length
    if mask is not None and (states is not None or not model.packs) and mask.shape != (rows, length):
        raise ValueError(f"encoder_attention_mask must have the shape {[rows, length]}, got {list(mask.shape)}")
