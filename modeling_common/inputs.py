"""The way into a model: `read_batch` turns the arguments of a `forward` into a `Batch`, or refuses them.

What it must know of a model stands in an `InputSpec`; it calls nothing of the model but the module that embeds.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.modeling_common.cache import StateCache, begin_cache, split_cache
from luna_mega.modeling_common.layout import DENSE, RAGGED_OPTIONS, TokenLayout, align, find_layout, lay_dense
from luna_mega.modeling_common.masks import can_look, clean, drop_if_full, find_mask, is_program, is_sound, read_mask
from luna_mega.modeling_common.pooling import without_first
from luna_mega.modeling_common.sequence_parts import SharedParts

# The name of the input by `config.input_type`.
INPUT_NAMES = {"tokens": "input_ids", "values": "input_values", "patches": "pixel_values"}
# Keyword arguments that every model takes beside those of its own.
COMMON_OPTIONS = RAGGED_OPTIONS | {"num_items_in_batch", "output_hidden_states", "output_attentions"}


class ValueEmbeddings(nn.Module):
    """A real number x becomes x * weight + bias, `[B, T]` to `[B, T, d]` (pixels, audio samples)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, values[..., None].to(self.weight.dtype), self.weight)


class InputSpec(NamedTuple):
    """A description of a model for `read_batch`.

    Args:
        config: the configuration, of one side.
        width: width of `inputs_embeds`.
        cache_class, seq2seq_cache_class: the classes of its caches, without and with an encoder.
        training: whether the model trains.
        checkpointing: whether layers run again in the backward pass.
        ranks: the number of ranks that the heads or columns of a layer are spread over.
        options: keyword arguments that the model takes beside those of every model.
        weights: those of them that ask for attention weights.
        counts_positions: whether the model uses positions; else they only tell ragged sequences apart.
        weights_from_cache: whether attention to a filled cache has weights to return.
        packs: whether the model has a packed sequence P.
        chunk: positions of an attention chunk, which parts must not cut; None = attention to all.
        horizon: the distance behind which a moving average forgets; None = never.
        counts_padding: whether norms count padding.
        aligns: whether layers need the positions that a mask keeps next to each other, as moving averages do.
    """

    config: PreTrainedConfig
    width: int
    cache_class: type[StateCache]
    seq2seq_cache_class: type[Cache]
    training: bool
    checkpointing: bool
    ranks: int = 1
    options: frozenset[str] = frozenset()
    weights: tuple[str, ...] = ("output_attentions",)
    counts_positions: bool = False
    weights_from_cache: bool = True
    packs: bool = False
    chunk: int | None = None
    horizon: int | None = None
    counts_padding: bool = False
    aligns: bool = False

    def is_asked(self, name: str, options: dict[str, Any]) -> bool:
        """Return the value of an option such as `output_attentions`, whose default is in the configuration."""
        return bool(options.get(name, getattr(self.config, name, False)))


class Batch(NamedTuple):
    """The inputs of a forward as embeddings and layers take them.

    Args:
        embeddings: `[B, T, d]`, or `[1, total, d]` of a ragged batch, without positions.
        mask: `[B, T]` bool of the batch as it came, True = keep; None = all.
        layout: where the tokens are.
        past: the cache to read and to fill, or None.
        target, source: its parts for the positions so far and for the encoder's output, or None.
        output_weights: whether attention runs step by step, which has weights to return.
        output_states: whether the states of every layer are to be returned.
        position_ids: `[B or 1, T]` or `[1, total]`, the position of every token, of a model that uses them.
        token_type_ids: as `embeddings`, or None.
        grid: rows and columns of patches of pictures that have another size than the model's.
        packed: P for every layer (None with a filled cache) and the bool mask of its rows; None = it is learned.
        context: `[B, M, d]`, the output of an encoder, or None.
        context_layout: where its tokens are.
    """

    embeddings: torch.Tensor
    mask: torch.Tensor | None
    layout: TokenLayout
    past: Cache | None
    target: StateCache | None
    source: StateCache | None
    output_weights: bool
    output_states: bool
    position_ids: torch.Tensor | None = None
    token_type_ids: torch.Tensor | None = None
    grid: tuple[int, int] | None = None
    packed: tuple[list[torch.Tensor | None], torch.Tensor | None] | None = None
    context: torch.Tensor | None = None
    context_layout: TokenLayout = DENSE


def read_batch(
    spec: InputSpec,
    embed: nn.Module,
    *,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    input_values: torch.Tensor | None = None,
    pixel_values: torch.Tensor | None = None,
    interpolate: bool = False,
    position_ids: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    packed_states: torch.Tensor | None = None,
    packed_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
    use_cache: bool | None = None,
    options: dict[str, Any],
    cp_group: "dist.ProcessGroup | None" = None,
) -> Batch:
    """Return the batch that the arguments of a `forward` are.

    Args:
        spec: the model.
        embed: its embedding of tokens, values or patches.
        options: further keyword arguments of the `forward`; the other arguments are described there.

    Raises:
        ValueError: arguments do not fit together or to the model; the message has the numbers and the way out.
    """
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
    inputs |= {"input_values": input_values, "pixel_values": pixel_values}
    device = next((x.device for x in inputs.values() if x is not None), embed_device(embed))
    with refuse_together(cp_group, device):
        if cp_group is not None:
            if position_ids is not None:
                raise ValueError("cp_group counts positions over all ranks: leave position_ids out")
            if past_key_values is None and use_cache is None:
                use_cache = False  # where a decoder would begin a cache by default
        check_options(spec, options, token_type_ids)
        past = begin_cache(spec, past_key_values, use_cache)
        batch = _embed(spec, embed, inputs, interpolate, past, options)
        if position_ids is not None:
            position_ids = check_positions(position_ids, *batch.embeddings.shape[:2])
        restarts = _find_restarts(spec, position_ids, attention_mask, batch.target, options)
        batch = _lay_out(spec, batch, restarts, options, past_key_values is not None or bool(use_cache))
        if cp_group is not None:
            _check_shared(spec, batch)
    if cp_group is not None:
        batch = _share(spec, batch, cp_group)
    elif spec.aligns and not batch.layout.is_ragged():
        batch = batch._replace(layout=lay_dense(batch.mask, batch.target))
    batch = batch._replace(embeddings=batch.layout.gather(batch.embeddings))
    if token_type_ids is not None:
        batch = batch._replace(token_type_ids=batch.layout.gather(token_type_ids))
    if spec.counts_positions:
        batch = batch._replace(position_ids=_number_positions(spec, position_ids, batch))
    if spec.packs:
        batch = batch._replace(packed=_read_packed(spec, packed_states, packed_mask, batch))
    return _read_context(spec, encoder_hidden_states, encoder_attention_mask, batch)


def embed_device(embed: nn.Module) -> torch.device:
    """Return the device of an embedding, for arguments without a tensor."""
    return next(embed.parameters()).device


@contextmanager
def _tell_others(group: "dist.ProcessGroup", device: torch.device) -> Iterator[None]:
    try:
        yield
    except Exception:
        with suppress(ValueError):
            ContextShard.of(group, 0, device, batch=0)
        raise


def refuse_together(group: "dist.ProcessGroup | None", device: torch.device) -> AbstractContextManager[None]:
    """Return a context that tells the other ranks of a group when the checks inside refuse this rank's inputs.

    They learn it from the `ContextShard.of` with their batch size that follows the block, and raise an error as well.
    """
    return nullcontext() if group is None else _tell_others(group, device)


def check_options(spec: InputSpec, options: dict[str, Any], token_type_ids: torch.Tensor | None) -> None:
    """Refuse keyword arguments that the model does not have."""
    if unknown := options.keys() - COMMON_OPTIONS - spec.options:
        family = spec.config.model_type.capitalize()
        raise ValueError(f"{family} models take no {', '.join(sorted(unknown))}; leave the argument out")
    if token_type_ids is not None and not spec.config.add_token_type_embeddings:
        raise ValueError("this model has add_token_type_embeddings=False: leave token_type_ids out")


def check_inputs(
    spec: InputSpec,
    input_ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    input_values: torch.Tensor | None,
) -> None:
    """Refuse what is not exactly one kind of input `[B, T]` or `[B, T, d]`, at least one token, and its mask."""
    name = INPUT_NAMES[spec.config.input_type]
    others: dict[str, torch.Tensor | None] = {"input_ids": input_ids, "input_values": input_values}
    inputs = others.pop(name, None)
    given, both = inputs if inputs_embeds is None else inputs_embeds, inputs is not None and inputs_embeds is not None
    if given is None or both or any(other is not None for other in others.values()):
        raise ValueError(
            f"this model has input_type={spec.config.input_type!r}: give exactly one of {name} and inputs_embeds"
        )
    width = [] if inputs_embeds is None else [spec.width]
    if given.dim() < 2 or list(given.shape[2:]) != width:
        raise ValueError(
            f"this model takes {name} [B, T] or inputs_embeds [B, T, {spec.width}], got the shape {list(given.shape)}"
        )
    batch, length = given.shape[0], given.shape[1]
    if batch == 0 or length == 0:
        raise ValueError(f"the batch is empty: {batch} sequences of length {length}")
    if mask is not None and mask.shape != (batch, length):
        raise ValueError(f"attention_mask must have the shape [{batch}, {length}] of the input, got {list(mask.shape)}")


def _embed(
    spec: InputSpec,
    embed: Any,
    inputs: dict[str, torch.Tensor | None],
    interpolate: bool,
    past: Cache | None,
    options: dict[str, Any],
) -> Batch:
    """Return a dense batch: embeddings, mask, cache, the grid of pictures, and which outputs are asked for."""
    target, source = split_cache(past)
    grid, pixel_values = None, inputs.pop("pixel_values")
    if pixel_values is not None:
        inputs["inputs_embeds"], grid = _embed_pictures(spec, embed, pixel_values, interpolate, **inputs)
    embeddings, mask = _embed_tokens(spec, embed, target, **inputs)
    if target is not None:
        target.check(spec.config, embeddings.shape[0], spec.ranks)
    weights, states = _wants_weights(spec, target, options), spec.is_asked("output_hidden_states", options)
    return Batch(embeddings, mask, DENSE, past, target, source, weights, states, grid=grid)


def _embed_pictures(
    spec: InputSpec,
    embed: Any,
    pixel_values: torch.Tensor,
    interpolate: bool,
    attention_mask: torch.Tensor | None,
    **others: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the embeddings `[B, T, d]` of patches and their grid; `others`: the inputs of other kinds."""
    if spec.config.input_type != "patches" or any(x is not None for x in others.values()):
        raise ValueError(
            f"this model has input_type={spec.config.input_type!r}: give exactly one of "
            f"{INPUT_NAMES[spec.config.input_type]} and inputs_embeds"
        )
    grid = embed.find_grid(pixel_values, interpolate)
    mask = drop_if_full(read_mask("attention_mask", attention_mask))
    if mask is not None and mask.shape == (len(pixel_values), grid[0] * grid[1]):
        pixel_values = embed.clean(pixel_values, mask)
    return embed(pixel_values), grid


def _embed_tokens(
    spec: InputSpec,
    embed: Any,
    target: StateCache | None,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    input_values: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return embeddings `[B, T, d]` and the bool mask `[B, T]` (None = all).

    NaN and infinities that the mask drops go out of vectors, values and patches, and do not reach what is kept. With
    a filled cache an `attention_mask` may cover all positions so far.
    """
    mask, given = attention_mask, next((x for x in (inputs_embeds, input_ids, input_values) if x is not None), None)
    seen = 0 if target is None else target.get_seq_length()
    if mask is not None and seen and given is not None and given.dim() > 1 and mask.dim() == 2:
        length = given.shape[1]
        if is_program() or mask.shape[1] == seen + length:  # in an exported program `seen` is a flag
            mask = mask[:, -length:]
    mask = read_mask("attention_mask", mask)
    check_inputs(spec, input_ids, mask, inputs_embeds, input_values)
    mask = drop_if_full(mask)
    if inputs_embeds is not None:
        return clean(inputs_embeds, mask), mask
    if input_values is not None:
        return embed(clean(input_values, mask)), mask
    assert input_ids is not None  # the checks leave nothing else
    if attention_mask is None:
        mask = drop_if_full(find_mask(input_ids, spec.config))
    try:
        return embed(input_ids), mask
    except IndexError as error:  # on a CPU; a GPU cannot say it without waiting
        raise ValueError(
            f"input_ids has numbers from {input_ids.min()} to {input_ids.max()}, and the vocabulary of this model "
            f"{spec.config.vocab_size} tokens: the tokenizer belongs to another model"
        ) from error


def _wants_weights(spec: InputSpec, target: StateCache | None, options: dict[str, Any]) -> bool:
    """Return whether attention runs step by step, which has weights to return."""
    asked = any(spec.is_asked(name, options) for name in spec.weights)
    filled = target is not None and target.get_seq_length() > 0
    if spec.weights_from_cache or not filled:
        return asked or spec.config._attn_implementation == "eager"
    if asked and not torch.compiler.is_exporting():
        raise ValueError("output_attentions=True goes with a new cache only; pass use_cache=False for the weights")
    return False


def check_positions(position_ids: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Return `position_ids` as `[B or 1, T]`; refuse what is not that, or are no integers."""
    dtype = getattr(position_ids, "dtype", None)
    if dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"position_ids must be a tensor of integers, got {type(position_ids).__name__} of {dtype}")
    rows = position_ids[None] if position_ids.dim() == 1 else position_ids
    if rows.shape != (batch, length) and rows.shape != (1, length):
        raise ValueError(
            f"position_ids must have the shape [{batch}, {length}] of the input, got {list(position_ids.shape)}"
        )
    return rows


def _find_restarts(
    spec: InputSpec,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    target: StateCache | None,
    options: dict[str, Any],
) -> torch.Tensor | None:
    """Return the positions where they tell ragged sequences apart, which nothing else does."""
    bounds = options.get("cu_seq_lens_q") is not None
    if attention_mask is not None and bounds:
        raise ValueError("attention_mask with cu_seq_lens_q: ragged sequences have no padding, leave one out")
    if position_ids is None or spec.counts_positions:
        return None if attention_mask is not None or bounds else position_ids
    if attention_mask is None:
        return position_ids
    if not _follow_mask(position_ids, attention_mask, target):
        raise ValueError(
            f"{spec.config.model_type.capitalize()} models take position_ids of ragged sequences only, which have no "
            "attention_mask: leave one out, or give the positions that the mask has, attention_mask.cumsum(1) - 1"
        )
    return None


def _follow_mask(position_ids: torch.Tensor, mask: torch.Tensor, target: StateCache | None) -> bool:
    """Return whether positions `[B or 1, T]` count the tokens that the mask keeps, or whether looking has a cost.

    With a filled cache the mask may cover the T positions, or these and all before them.
    """
    if not (can_look(position_ids) and can_look(mask)):
        return True
    length, kept = position_ids.shape[1], mask.bool()
    counted = kept.cumsum(dim=1) - 1
    if target is not None and target.get_seq_length() and mask.shape[1] == length:
        counted = counted + target.layers[0].position[:, None]
    return not bool(((counted[:, -length:] != position_ids) & kept[:, -length:]).any())


def _lay_out(
    spec: InputSpec, batch: Batch, restarts: torch.Tensor | None, options: dict[str, Any], asks_cache: bool
) -> Batch:
    """Return the batch with its layout; a ragged one has no cache."""
    unpads = spec.config.unpad_inputs and batch.past is None
    unpads = unpads and not (batch.output_weights or batch.output_states or spec.config.add_cross_attention)
    shape = (batch.embeddings.shape[0], batch.embeddings.shape[1])
    layout = find_layout(shape, batch.mask, restarts, options, unpads)
    if layout.has_rows():
        return batch._replace(layout=layout)
    _check_ragged(spec, batch, layout, asks_cache)
    return batch._replace(layout=layout, past=None, target=None, source=None)  # a decoder begins one by default


def _check_ragged(spec: InputSpec, batch: Batch, layout: TokenLayout, asks_cache: bool) -> None:
    """Raise `ValueError` for arguments that are not supported with a padding-free batch."""
    if asks_cache:
        raise ValueError("a ragged batch has no cache: leave past_key_values out and pass use_cache=False")
    if spec.config.add_cross_attention:
        raise ValueError("a decoder with add_cross_attention=True takes no ragged batch: pad it")
    if batch.output_weights:
        raise ValueError(
            "a ragged batch has no attention weights to return: pass output_attentions=False and load the model "
            "with attn_implementation='sdpa'"
        )
    rows, length = batch.embeddings.shape[:2]
    dropped = 0 if layout.places is None else rows * length - len(layout.places)
    if batch.output_states and (rows > 1 or dropped):
        raise ValueError(
            "`output_hidden_states` requires a padding-free batch of one row without padding, got "
            + (f"{rows} rows" if rows > 1 else f"{dropped} positions of padding")
            + "; remove the padding, or pad the sequences as separate rows"
        )
    if spec.config.input_type == "patches":
        raise ValueError("pictures are not laid end to end: leave position_ids and cu_seq_lens_q out")


def _check_shared(spec: InputSpec, batch: Batch) -> None:
    """Refuse what sequences that ranks share do not have."""
    if batch.past is not None:
        raise ValueError(
            "cp_group goes without a cache: leave past_key_values out, pass use_cache=False, and generate without "
            "cp_group"
        )
    if batch.output_weights:
        raise ValueError(
            "cp_group has no attention weights to return: pass output_attentions=False and load the model with "
            "attn_implementation='sdpa'"
        )
    if batch.layout.is_ragged() or spec.config.unpad_inputs:
        raise ValueError(
            "cp_group takes one sequence a row: pad the batch in place of laying it end to end, and set "
            "unpad_inputs=False in the configuration"
        )


def _share(spec: InputSpec, batch: Batch, group: "dist.ProcessGroup") -> Batch:
    """Return the batch of this rank, whose layout knows the parts of the others; all ranks call this."""
    rows, length = batch.embeddings.shape[:2]
    device = batch.embeddings.device
    parts = SharedParts.count(ContextShard.of(group, length, device, batch=rows), batch.mask, rows, device)
    _check_parts(spec, parts)
    layout = batch.layout._replace(parts=parts)
    if spec.aligns and batch.mask is not None:
        columns, back, mask = align(batch.mask)
        layout = layout._replace(mask=mask, columns=columns, back=back)
    return batch._replace(layout=layout)


def _check_parts(spec: InputSpec, parts: SharedParts) -> None:
    """Raise `ValueError` on every rank for what sequences that ranks share do not have, and for a chunk that is cut."""
    if spec.config.input_type == "patches":
        raise ValueError("cp_group does not share pictures: leave it out")
    if spec.config.add_cross_attention and not spec.packs:
        raise ValueError("a decoder with add_cross_attention=True takes no cp_group: leave it out")
    lengths = parts.shard.lengths
    if spec.horizon is not None and spec.horizon < sum(lengths):
        raise ValueError(
            f"with cp_group an average never forgets, and truncation={spec.horizon} is below the length "
            f"{sum(lengths)}: set truncation=None in the configuration, or leave cp_group out"
        )
    sizes = torch.tensor(lengths, device=parts.begins.device)[:, None]
    kept = sizes if parts.kept is None else parts.kept
    borders = kept.cumsum(dim=0)  # in positions of the sequences
    if spec.counts_padding and ((kept < sizes) & (borders < borders[-1])).any():
        raise ValueError(
            "padded_batch_statistics=True with cp_group counts padding only after the sequences; pad on the right"
        )
    if spec.chunk is not None and (cut := (borders % spec.chunk != 0) & (borders < borders[-1])).any():
        raise ValueError(
            f"a context-parallel shard ends after {borders[cut][0]} tokens of a sequence, inside an attention chunk of "
            f"{spec.chunk}; pad on the right only and use shard_sequence(batch, group, multiple={spec.chunk})"
        )


def _number_positions(spec: InputSpec, position_ids: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    """Return the position of every token, `[B or 1, T]`, or `[1, total]` of a ragged batch.

    A position counts the tokens before it that the mask keeps, so that neither side nor amount of padding matters.
    """
    embeddings, layout, target = batch.embeddings, batch.layout, batch.target
    table = spec.config.max_position_embeddings
    if position_ids is None:
        numbered = layout.positions(embeddings)
        if target is not None and target.get_seq_length():
            numbered = numbered + target.layers[0].tensors["count"][:, None]
    elif layout.is_ragged():
        numbered = layout.gather(position_ids.expand(layout.shape))
    else:  # nobody reads positions of padding, which may be anything
        numbered = position_ids if layout.mask is None else position_ids.masked_fill(~layout.mask, 0)
    learned, length = spec.config.position_embedding_type == "learned", layout.sizes(embeddings)[1]
    length += 0 if batch.past is None else batch.past.get_seq_length()
    if learned and length > table:
        # With a cache the length counts padding, which has no positions.
        if batch.past is None or (length := int(numbered.max()) + 1) > table:
            raise ValueError(
                f"sequences of length {length} exceed the {table} learned positions of the model; truncate the "
                "input or train with a larger max_position_embeddings (max_target_positions of a decoder)"
            )
    if position_ids is not None and can_look(numbered):
        first, last = (x.item() for x in numbered.aminmax())
        if first < 0 or (learned and last >= table):
            raise ValueError(
                f"position_ids go from {first} to {last}: the first token of a sequence has position 0, and of learned "
                f"positions the model has {table} (max_position_embeddings)"
            )
    return numbered


def _read_packed(
    spec: InputSpec, states: torch.Tensor | None, mask: torch.Tensor | None, batch: Batch
) -> tuple[list[torch.Tensor | None], torch.Tensor | None] | None:
    """Return P for every layer, None with a filled cache, and the bool mask of its rows; None = P is learned."""
    layers = spec.config.num_hidden_layers
    if batch.target is not None and batch.target.get_seq_length():
        kept = batch.target.layers[0].tensors
        _check_packed(states, mask, (batch.embeddings.shape[0], kept["key_mean"].shape[3], batch.embeddings.shape[2]))
        return [None] * layers, kept.get("pack_mask")
    if batch.target is not None:
        for layer in batch.target.layers:
            layer.learned = states is None
    if states is None:
        if mask is not None:
            raise ValueError("packed_mask is the mask of packed_states: give both, or neither")
        if spec.config.add_cross_attention:
            raise ValueError("a decoder with add_cross_attention=True needs packed_states, the P of its encoder")
        return None
    _check_packed(states, mask, (batch.layout.sizes(batch.embeddings)[0], "rows", batch.embeddings.shape[2]))
    mask = drop_if_full(read_mask("packed_mask", mask))
    if mask is not None:  # rows that are not in use may be anything, and go on through the layers
        states = states.masked_fill(~mask[..., None] & ~is_sound(states), 0.0)
    return [states] * layers, mask


def _check_packed(states: torch.Tensor | None, mask: torch.Tensor | None, shape: tuple[int, int | str, int]) -> None:
    """Raise `ValueError` unless `packed_states` and its mask have this shape; any number of rows if it has a name."""
    batch, rows, width = shape
    if states is not None:
        given = list(states.shape)
        if len(given) != 3 or given[::2] != [batch, width] or rows not in ("rows", given[1]):
            raise ValueError(f"`packed_states` must have the shape [{batch}, {rows}, {width}], got {given}")
        rows = given[1]
    if mask is not None and tuple(mask.shape) != (batch, rows):
        raise ValueError(f"`packed_mask` must have the shape [{batch}, {rows}] of P, got {list(mask.shape)}")


def _read_context(
    spec: InputSpec,
    states: torch.Tensor | None,
    mask: torch.Tensor | None,
    batch: Batch,
) -> Batch:
    """Return the batch with an encoder's output, or without where a cache has it already."""
    if not spec.config.add_cross_attention:
        if states is not None or mask is not None:
            raise ValueError("encoder_hidden_states need a decoder with add_cross_attention=True; leave them out")
        return batch
    source = batch.source if batch.source is not None and batch.source.layers[0].is_initialized else None
    if states is None and source is None:
        raise ValueError("a decoder with add_cross_attention=True needs encoder_hidden_states [B, S, d]")
    rows, width = batch.embeddings.shape[0], spec.config.hidden_size
    if states is not None and (states.dim() != 3 or states.shape[::2] != (rows, width) or states.shape[1] == 0):
        raise ValueError(
            f"encoder_hidden_states must have the shape [{rows}, S, {width}], S at least 1, got {list(states.shape)}"
        )
    if source is not None:
        source.check_source(spec.config, rows, None if states is None else states.shape[1], spec.ranks)
    length = states.shape[1] if states is not None else 0 if source is None else source.get_seq_length()
    if mask is not None and (states is not None or not spec.packs) and mask.shape != (rows, length):
        raise ValueError(f"encoder_attention_mask must have the shape {[rows, length]}, got {list(mask.shape)}")
    mask = drop_if_full(read_mask("encoder_attention_mask", mask))
    layout = TokenLayout(mask)
    if source is None and states is not None:
        states = clean(states, mask)
        if spec.aligns:
            layout = lay_dense(mask)
            states = layout.gather(states)
        layout = layout._replace(parts=batch.layout.parts.of_others(states))
    return batch._replace(context=states, context_layout=layout)


def read_sequences(
    spec: InputSpec,
    name: str,
    attention_mask: torch.Tensor | None,
    inputs: dict[str, torch.Tensor | None],
    options: dict[str, Any],
    drop_first_token: bool,
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]:
    """Return the bool mask and the inputs of a head that gives every row one label; `name`: of the class of the head.

    With `drop_first_token` they are those without the first token of each row. What reads the inputs again, the model
    without a head, is called with the results.

    Raises:
        ValueError: as `read_batch`; sequences that are laid end to end, as a row gets one label.
    """
    given = next((x for x in inputs.values() if x is not None), None)
    group = options.get("cp_group")
    with refuse_together(group, torch.device("cpu") if given is None else given.device):
        mask = read_mask("attention_mask", attention_mask)
        check_inputs(spec, mask=mask, **inputs)
        positions = options.get("position_ids") if mask is None else None
        shape = (0, 0) if given is None else (given.shape[0], given.shape[1])
        if find_layout(shape, None, positions, options, unpad=False).is_ragged():
            raise ValueError(f"{name} needs one sequence a row: pad the batch, do not lay it end to end")
        if drop_first_token and group is not None:
            raise ValueError(
                "cp_group does not drop first tokens: leave them out of the inputs, and set drop_first_token=False"
            )
    if mask is None and inputs["input_ids"] is not None:
        mask = find_mask(inputs["input_ids"], spec.config)
    if drop_first_token:
        inputs = {key: without_first(value, mask) for key, value in inputs.items()}
        mask = without_first(mask, mask)
    return mask, inputs
