"""Checks of the arguments of a forward pass. All of them run before the first embedding."""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from luna_mega.kernels.support import in_program, is_exporting
from luna_mega.modeling_common.cache import StateCache
from luna_mega.modeling_common.masks import can_look, can_read, read_mask
from luna_mega.modeling_common.padding_free import VARLEN_OPTIONS, PaddingFreeLayout

# Argument with the input of a model, by `config.input_type`.
INPUT_NAMES = {"tokens": "input_ids", "values": "input_values", "patches": "pixel_values"}
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


def validate(
    model: Any,
    given: dict[str, torch.Tensor | None],
    grid: tuple[int, int] | None,
    attention_mask: torch.Tensor | None,
    cache: StateCache | None,
    seen: int,
    options: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Return the input, its bool mask `[B, T]`, and whether attention returns its weights.

    For the arguments, see `read`; `given` are the inputs by name, and `seen` is the number of positions in the cache.
    """
    config = model.config
    if unknown := {*options} - COMMON_OPTIONS - model.own_options:
        family = config.model_type.capitalize()
        raise ValueError(f"{family} models do not support {', '.join(sorted(unknown))}; omit the argument")
    if attention_mask is not None:
        if options.get("cu_seq_lens_q") is not None:
            raise ValueError("`attention_mask` is not supported with `cu_seq_lens_q`; pass only one of them")
        value = next((x for x in given.values() if x is not None), None)
        if seen and value is not None and value.dim() > 1 and attention_mask.dim() == 2:
            length = value.shape[1]
            # The mask may cover all positions. In an exported program `seen` is a flag.
            if in_program() or attention_mask.shape[1] == seen + length:
                attention_mask = attention_mask[:, -length:]
    mask = read_mask("attention_mask", attention_mask)
    checked = check_inputs(model, mask, given, grid)
    if cache is not None:
        cache.check(config, checked, model.ranks)
    requested = any(options.get(name, getattr(config, name, False)) for name in model.weight_options)
    if not seen or model.returns_cached_weights:
        return checked, mask, requested or config._attn_implementation == "eager"
    if requested and not is_exporting():
        raise ValueError("`output_attentions=True` requires a new cache; pass `use_cache=False` for the weights")
    return checked, mask, False


def check_inputs(
    model: Any,
    mask: torch.Tensor | None,
    inputs: dict[str, torch.Tensor | None],
    grid: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return the only input; raise `ValueError` for several, for an empty one, or for a mask of another shape.

    Images have been checked by `PatchEmbeddings.find_grid`, which returns `grid`.
    """
    kind = model.config.input_type
    name = INPUT_NAMES[kind]
    inputs_embeds, found = inputs.get("inputs_embeds"), [x for x in inputs.values() if x is not None]
    given = inputs_embeds if inputs.get(name) is None else inputs[name]
    if given is None or len(found) > 1:
        raise ValueError(f"this model has input_type={kind!r}; pass exactly one of {name} and inputs_embeds")
    shape = (given.shape[0], grid[0] * grid[1]) if grid is not None else tuple(given.shape[:2])
    width = [] if given is not inputs_embeds else [model.input_width]
    if grid is None and (given.dim() < 2 or list(given.shape[2:]) != width):
        raise ValueError(
            f"`{name}` must have the shape [B, T], or inputs_embeds [B, T, {model.input_width}], got "
            f"{list(given.shape)}"
        )
    if 0 in shape:
        raise ValueError(f"the batch is empty: {shape[0]} sequences of length {shape[1]}; pass at least one token")
    if mask is not None and mask.shape != shape:
        raise ValueError(f"attention_mask must have the shape {list(shape)} of the input, got {list(mask.shape)}")
    return given


def check_tokens(given: torch.Tensor, vocab_size: int) -> None:
    """Raise `ValueError` for token ids `[B, T]` outside the vocabulary."""
    if given.dim() == 2 and not given.is_floating_point():
        first, last = (x.item() for x in given.aminmax())
        if first < 0 or last >= vocab_size:
            raise ValueError(
                f"`input_ids` are from {first} to {last}, but the vocabulary of this model has {vocab_size} tokens; "
                "use the tokenizer of this model"
            )


def read_token_types(
    model: Any, token_type_ids: torch.Tensor, shape: tuple[int, int], mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Return `token_type_ids` `[B, T]` with 0 at positions that the bool mask drops; None = no type embeddings.

    The values are read if that is free, on other devices only for the first batch of a model.

    Raises:
        ValueError: The shape is another one, or a value is not a type of the model. A model without type embeddings
            only supports 0, which tokenizers of BERT return for single texts.
    """
    if token_type_ids.shape != shape:
        raise ValueError(
            f"`token_type_ids` must have the shape {list(shape)} of the input, got {list(token_type_ids.shape)}"
        )
    if mask is not None:
        token_type_ids = token_type_ids.masked_fill(~mask, 0)
    if can_look(token_type_ids) or (not model.has_read_types and can_read(token_type_ids)):
        first, last = (x.item() for x in token_type_ids.aminmax())
        if first < 0 or last >= max(model.token_types, 1):
            reason = (
                f"; they must be at least 0, and less than the `type_vocab_size` {model.token_types} of the model"
                if model.token_types
                else ", but the model has no type embeddings; omit them, or create the model with them (Luna: "
                "`type_vocab_size=2`, Mega: `add_token_type_embeddings=True`)"
            )
            raise ValueError(f"`token_type_ids` are from {first} to {last}{reason}")
        model.has_read_types = True
    return token_type_ids if model.token_types else None


def find_boundaries(
    model: Any,
    position_ids: torch.Tensor,
    shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    cache: StateCache | None,
    options: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `position_ids` as `[B or 1, T]`, and again if they may mark sequence boundaries, else None."""
    dtype = getattr(position_ids, "dtype", None)
    if dtype not in _INTEGERS:
        raise ValueError(f"position_ids must be a tensor of integers, got {type(position_ids).__name__} of {dtype}")
    rows = position_ids[None] if position_ids.dim() == 1 else position_ids
    if rows.shape != shape and rows.shape != (1, shape[1]):
        raise ValueError(f"position_ids must have the shape {list(shape)} of the input, got {list(position_ids.shape)}")
    if model.uses_positions:
        return rows, None if attention_mask is not None or options.get("cu_seq_lens_q") is not None else rows
    if attention_mask is None:
        return rows, rows
    if not _follow_mask(rows, attention_mask, cache):
        raise ValueError(
            f"`position_ids` differ from the positions of `attention_mask`, and {model.config.model_type.capitalize()} "
            "models have no other positions; omit them, or omit the mask of a padding-free batch"
        )
    return rows, None


def _follow_mask(position_ids: torch.Tensor, mask: torch.Tensor, cache: StateCache | None) -> bool:
    """Return whether positions `[B or 1, T]` count the tokens that the mask keeps; True if reading values is not free.

    With a filled cache the mask may cover the T positions, or these and all positions before them.
    """
    if not (can_look(position_ids) and can_look(mask)):
        return True
    length, kept = position_ids.shape[1], mask.bool()
    counted = kept.cumsum(dim=1) - 1
    if cache is not None and cache.get_seq_length() and mask.shape[1] == length:
        counted = counted + cache.layers[0].position[:, None]
    return not bool(((counted[:, -length:] != position_ids) & kept[:, -length:]).any())


def check_padding_free(model: Any, inputs: Any, layout: PaddingFreeLayout, requests_cache: bool) -> None:
    """Raise `ValueError` for arguments that padding-free batches do not support."""
    if requests_cache:
        raise ValueError("a padding-free batch has no cache; omit `past_key_values` and pass `use_cache=False`")
    if model.config.add_cross_attention:
        raise ValueError("a decoder with `add_cross_attention=True` does not support padding-free batches; pad them")
    if inputs.output_weights:
        raise ValueError(
            "a padding-free batch has no attention weights to return; pass `output_attentions=False` and load the "
            "model with `attn_implementation='sdpa'`"
        )
    rows, length = layout.shape
    dropped = 0 if layout.places is None else rows * length - len(layout.places)
    if inputs.output_states and (rows > 1 or dropped):
        raise ValueError(
            "`output_hidden_states` requires a padding-free batch of one row without padding, got "
            + (f"{rows} rows" if rows > 1 else f"{dropped} positions of padding")
            + "; remove the padding, or pad the sequences as separate rows"
        )
    if model.config.input_type == "patches":
        raise ValueError("images do not support padding-free batches; omit `position_ids` and `cu_seq_lens_q`")


def check_source(model: Any, inputs: Any, states: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
    """Return whether the cache contains the encoder's output; raise `ValueError` for one that does not fit."""
    config = model.config
    if not config.add_cross_attention:
        raise ValueError("encoder_hidden_states require a decoder with add_cross_attention=True; omit them")
    cached = inputs.cross_cache is not None and inputs.cross_cache.layers[0].is_initialized
    if states is None and not cached:
        raise ValueError("a decoder with add_cross_attention=True needs encoder_hidden_states [B, S, d]")
    rows, width = inputs.given.shape[0], config.hidden_size
    if states is not None and (states.dim() != 3 or states.shape[::2] != (rows, width) or states.shape[1] == 0):
        raise ValueError(
            f"encoder_hidden_states must have the shape [{rows}, S, {width}], S at least 1, got {list(states.shape)}"
        )
    if cached:
        inputs.cross_cache.check_source(config, rows, None if states is None else states.shape[1], model.ranks)
    length = states.shape[1] if states is not None else inputs.cross_cache.get_seq_length()
    if mask is not None and (states is not None or not model.packs) and mask.shape != (rows, length):
        raise ValueError(f"encoder_attention_mask must have the shape {[rows, length]}, got {list(mask.shape)}")
    return cached
