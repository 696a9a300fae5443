"""Random inputs of a model."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.hub.folder import stacks

_LENGTH = 32  # longer than the states of a moving average, for models without a fixed number of rows or a chunk


def make_inputs(
    model: PreTrainedModel,
    lengths: Sequence[int],
    side: str = "right",
    gaps: bool = False,
    processor: Any = None,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return a random batch with the arguments of `forward` that a tokenizer or processor provides.

    These are token ids, values or images, masks, token types (as of pairs of texts), the second sequences of pairs, two
    options for multiple choice, and the target of an encoder-decoder, or for a decoder without its encoder the states
    of a source. Second sequences, targets and sources have about half of the lengths, in reversed order.

    Args:
        model: Model of this package.
        lengths: Numbers of tokens of the sequences.
        side: Side of the padding, "right" or "left".
        gaps: Drop tokens within the sequences by the mask.
        processor: Tokenizer or processor. If its `model_input_names` do not contain `token_type_ids`, the batch
            contains them only if the model has several types, and its `pad_token_id` replaces the model's.
        seed: Seed of the random numbers.
    """
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    if config.input_type == "patches":
        shape = (len(lengths), config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    halves = [(length + 1) // 2 for length in reversed(lengths)]
    sides = {"": (config, lengths)}
    if config.is_encoder_decoder:
        sides = {"": (config.encoder_config, lengths), "decoder_": (config.decoder_config, halves)}
    elif accepts(model, "pair_attention_mask"):
        sides["pair_"] = (config, [halves[-1], *halves[:-1]])
    inputs = {}
    for prefix, (stack, counts) in sides.items():
        if type(model).__name__.endswith("ForMultipleChoice"):
            counts = torch.tensor([counts, [(count + 1) // 2 for count in counts]]).T.contiguous()
        mask = _mask(torch.as_tensor(counts), side, gaps)
        if stack.input_type == "values":
            channels = [stack.num_channels] if stack.num_channels > 1 else []
            values = torch.randn((*mask.shape, *channels), generator=generator)
            inputs[f"{prefix}input_values"] = values.masked_fill(~mask.view(*mask.shape, *(1 for _ in channels)), 0.0)
        else:
            inputs[f"{prefix}input_ids"] = _ids(stack, mask, processor, generator)
        inputs[f"{prefix}attention_mask"] = mask.long()
    if accepts(model, "token_type_ids"):
        types = config.type_vocab_size if getattr(config, "add_token_type_embeddings", True) else 0
        if types > 1 or "token_type_ids" in getattr(processor, "model_input_names", ()):
            position, count = mask.cumsum(-1) - 1, mask.sum(-1, keepdim=True)
            inputs["token_type_ids"] = (position * max(types, 1) // count.clamp(min=1)).masked_fill(~mask, 0)
    if config.add_cross_attention and not config.is_encoder_decoder:
        mask = _mask(torch.tensor(halves), side, gaps)
        states = torch.randn(*mask.shape, config.hidden_size, generator=generator)
        inputs |= {"encoder_hidden_states": states, "encoder_attention_mask": mask.long()}
        if accepts(model, "packed_states"):
            shape = (len(lengths), config.projection_length, config.hidden_size)
            inputs["packed_states"] = torch.randn(shape, generator=generator)
    return inputs


def borders(config: PreTrainedConfig) -> list[int]:
    """Return the lengths from which a model computes in another way: rows of P, a chunk, a window of statistics."""
    found = set()
    for stack in stacks(config).values():
        length = stack.projection_length if stack.model_type == "luna" else stack.attention_chunk
        found |= {length or _LENGTH, (length or 1) * (6 if getattr(stack, "windowed_statistics", False) else 1)}
    return sorted(found - {1}) or [_LENGTH]


def length_limit(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence that all position tables of a model support; None if there are none."""
    limits = [stack.longest_input for stack in stacks(config).values()]
    limits += [
        stack.cross_positions
        for stack in stacks(config).values()
        if stack.add_cross_attention and getattr(stack, "relative_positional_bias", None) == "simple"
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def accepts(model: PreTrainedModel, name: str) -> bool:
    """Return whether `forward` has an argument with this name."""
    return name in inspect.signature(model.forward).parameters


def _mask(lengths: torch.Tensor, side: str, gaps: bool) -> torch.Tensor:
    """Return the bool mask `[..., T]` of sequences with the lengths `[...]`."""
    lengths = lengths[..., None]
    columns = torch.arange(int(lengths.max()))
    mask = columns < lengths
    if gaps:  # every fourth token, but not the first or the last one
        mask &= (columns % 4 != 2) | (columns == lengths - 1)
    return mask.flip(-1) if side == "left" else mask


def _ids(config: Any, mask: torch.Tensor, processor: Any, generator: torch.Generator) -> torch.Tensor:
    """Return token ids for a mask; together they contain as many different tokens as possible."""
    pad = getattr(processor, "pad_token_id", None)
    pad = config.pad_token_id if pad is None else pad
    ids = torch.arange(config.vocab_size)
    ids = ids[~torch.isin(ids, torch.tensor([i for i in (pad, config.pad_token_id) if i is not None]))]
    rounds = [torch.randperm(len(ids), generator=generator) for _ in range(-(-mask.numel() // len(ids)))]
    return ids[torch.cat(rounds)[: mask.numel()].view(mask.shape)].masked_fill(~mask, pad or 0)
