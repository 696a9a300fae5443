# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The local start (`initialization="local"`): before any training every head of Luna reads a neighbor of each token.

A token reads others through P by two attentions, and neither has anything to learn from before the other works. The
local start sets both: rows of P stand for stretches of the sequence, a row packs the tokens of its stretch, and a token
unpacks the row of the place that is the offset of the head away. It takes positions that begin as sinusoids, and the
identity, in one projection rotated, on top of the random weights. Nothing of it is fixed in training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

SINUSOIDAL_BASE = 10000.0  # of position_embedding_type="sinusoidal"
CAUSAL_BASE = 8.0  # causal weights are linear in the scores, so that only high frequencies tell neighbors apart


@dataclass(frozen=True)
class LocalStart:
    """The options of the local start, `initialization_options` of the configuration.

    Args:
        length: positions that the rows of P are spread over; None = `max_position_embeddings`. Tokens behind them have
            no row near them, and of shorter sequences the last rows are not near any token.
        base: learned positions begin with frequencies from 1 to 1 / base; None = `length`, of a decoder alone 8.
        strength: score, before the softmax, that the identity gives a token at its own position.
        offsets: which neighbor each head reads, relative to the token; further heads begin again with the first.
            Causal attention takes those of them that are not above 0.
        mask_token_id: the token that stands for masked ones in masked language modeling: the queries of tokens begin
            blind to its embedding, so that masked tokens do not look for one another. Encoders of tokens only.
    """

    length: int | None = None
    base: float | int | None = None
    strength: float | int = 6.0
    offsets: Sequence[int] = (-1, 1, -2, 2, -3, 3, 0, 4)
    mask_token_id: int | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LocalStart":
        """Return the options of a configuration, complete.

        Raises:
            ValueError: options and configuration do not fit; the message has the values.
        """
        options, names = config.initialization_options or {}, [field.name for field in fields(cls)]
        if unknown := options.keys() - set(names):
            raise ValueError(f"initialization_options has no {', '.join(sorted(unknown))}, only {', '.join(names)}")
        start = cls(**options)
        _check_model(config)
        _check_options(start, config)
        if start.length is None:
            start = replace(start, length=config.max_position_embeddings)
        if start.base is None:
            base = CAUSAL_BASE if config.learns_causal_projection else max(start.length, 2)
            learned = config.position_embedding_type == "learned"
            start = replace(start, base=base if learned else SINUSOIDAL_BASE)
        return start

    @property
    def causal_offsets(self) -> list[int]:
        return [offset for offset in self.offsets if offset <= 0]


def check_initialization(config: PreTrainedConfig):
    """Refuse a configuration whose initialization does not fit the model or has options that it does not take."""
    if config.initialization == "local":
        LocalStart.of(config)
    elif config.initialization_options is not None:
        raise ValueError(f"initialization={config.initialization!r} has no initialization_options: leave them out")


def _check_model(config):
    types = {config.position_embedding_type}
    if config.is_encoder_decoder:
        types.add(config.decoder_position_embedding_type or config.position_embedding_type)
    if "none" in types or len(types) > 1:
        raise ValueError(
            "initialization='local' needs positions, of one type in encoder and decoder, got position_embedding_type "
            f"{' and '.join(map(repr, sorted(types)))}"
        )
    if not (config.embedding_norm or config.pre_norm or config.scale_embedding):
        raise ValueError(
            "initialization='local' needs states of about unit size before the first attention: one of embedding_norm, "
            "pre_norm and scale_embedding must be True"
        )
    if config.embedding_size != config.hidden_size:
        raise ValueError(
            f"initialization='local' does not support embedding_size={config.embedding_size} with hidden_size="
            f"{config.hidden_size}; omit one of them"
        )
    for field in ("num_attention_heads", "num_pack_attention_heads"):
        if (size := config.hidden_size // getattr(config, field)) % 2:
            raise ValueError(
                f"initialization='local' needs heads of even size, got {size} (hidden_size {config.hidden_size}, "
                f"{field} {getattr(config, field)})"
            )


def _check_options(start, config):
    def refuse(name: str, needs: str):
        raise ValueError(f"initialization_options: {name} must be {needs}, got {getattr(start, name)!r}")

    learned = config.position_embedding_type == "learned"
    if start.length is not None:
        limit = config.max_position_embeddings if learned else math.inf
        if type(start.length) is not int or not 1 <= start.length <= limit:
            refuse("length", f"a whole number from 1 to {limit}" + " (max_position_embeddings)" * learned)
    if start.base is not None and not learned:
        refuse("base", "left out with sinusoidal positions, which have their own")
    if start.base is not None and not 1.0 < start.base < math.inf:
        refuse("base", "a number above 1")
    if not 0.0 <= start.strength < math.inf:
        refuse("strength", "a number of at least 0")
    if not start.offsets or any(type(offset) is not int for offset in start.offsets):
        refuse("offsets", "at least one whole number")
    if config.is_decoder and not start.causal_offsets:
        refuse("offsets", "not all above 0, because a decoder does not see later tokens")
    if (token := start.mask_token_id) is not None:
        if config.input_type != "tokens" or config.is_decoder:
            refuse("mask_token_id", "left out: it is for encoders of tokens")
        if type(token) is not int or not 0 <= token < config.vocab_size:
            refuse("mask_token_id", f"a token from 0 to {config.vocab_size - 1}")


def decoder_options(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the options for the decoder of an encoder-decoder: the same frequencies, no P of its own, no masks."""
    options = dict(config.initialization_options or {})
    for name in ("length", "mask_token_id"):
        options.pop(name, None)
    if config.position_embedding_type == "learned":
        options["base"] = LocalStart.of(config).base
    return options


def frequency_order(count: int) -> list[int]:
    """Return 0 ... count - 1 by their bits read backwards: every stretch of these has numbers from the whole range.

    Heads are stretches of the width, of one size or another, and all get high and low frequencies.
    """
    return sorted(range(count), key=lambda index: f"{index:032b}"[::-1])


def frequencies(width: int, base: float) -> torch.Tensor:
    """Return the frequencies from 1 to 1 / base, `[width / 2]`, in the order of `frequency_order`."""
    count = width // 2
    order = torch.tensor(frequency_order(count), dtype=torch.float32)
    return torch.exp(order * (-math.log(base) / max(count - 1, 1)))


def paired_sinusoids(positions: torch.Tensor, width: int, base: float) -> torch.Tensor:
    """Return the sinusoids of positions `[T]`, `[T, width]`: of each of the `frequencies` the sine, then the cosine."""
    angle = positions[:, None].float() * frequencies(width, base)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def rotation(width: int, base: float, heads: int, offsets: Sequence[int]) -> torch.Tensor:
    """Return `[width, width]`, which takes `paired_sinusoids` of i to those of i + offsets[h] where head h is."""
    by_head = torch.tensor([offsets[head % len(offsets)] for head in range(heads)], dtype=torch.float32)
    angle = by_head.repeat_interleave(width // heads // 2) * frequencies(width, base)
    sin, cos = angle.sin(), angle.cos()
    matrix = torch.diag(cos.repeat_interleave(2))
    first = torch.arange(0, width, 2)
    matrix[first, first + 1], matrix[first + 1, first] = sin, -sin
    return matrix


def pairing(config: PreTrainedConfig) -> torch.Tensor:
    """Return `[d, d]`, which takes positions as tokens have them to `paired_sinusoids`.

    Sinusoidal positions are sines, then cosines; learned ones begin in pairs.
    """
    width = config.hidden_size
    identity = torch.eye(width, dtype=torch.float32)
    if config.position_embedding_type == "learned":
        return identity
    order = torch.tensor(frequency_order(width // 2))
    return identity[torch.stack([order, order + width // 2], dim=-1).flatten()]


def is_loaded(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "_is_hf_initialized", False)


def start_embeddings(embeddings: nn.Module, config: PreTrainedConfig, size: float):
    """Begin learned positions as sinusoids of standard deviation `size`, and rows of P as means of the positions.

    The row r of l is the mean of its share of the positions, those from r length / l to (r + 1) length / l.
    """
    start, first = LocalStart.of(config), config.position_offset
    if config.position_embedding_type == "learned" and not is_loaded(table := embeddings.position_embeddings.weight):
        positions = torch.arange(config.max_position_embeddings)
        values = math.sqrt(2) * size * paired_sinusoids(positions, config.hidden_size, start.base)
        table[first:] = values.to(table)
    if embeddings.has_projection and not is_loaded(packed := embeddings.packed_embeddings):
        rows = torch.arange(config.projection_length, device=packed.device)
        positions = embeddings.positions(torch.arange(start.length, device=packed.device)).float()
        values = nn.functional.adaptive_avg_pool1d(positions.t(), len(rows)).t()
        if config.position_embedding_type == "sinusoidal":  # those that `LunaEmbeddings.packed` adds to every row
            values = values - embeddings.positions(rows - first)
        init.copy_(packed, values / embeddings.scale)


def start_attention(attention: nn.Module, config: PreTrainedConfig, causal: bool = False):
    """Add to the random weights of the projections what makes them find positions.

    Positions reach keys and the query of P in pairs, the query of the tokens also rotated by the offset of each head.
    Packed context has the pairs already where one projection makes both it and its keys.
    """
    paired = causal or config.pack_method == "importance"  # keys are projections of states, and not of packed context
    start, width = LocalStart.of(config), config.hidden_size
    heads = config.num_attention_heads
    pack_heads = heads if causal else config.num_pack_attention_heads
    pairs, identity = pairing(config), torch.eye(width, dtype=torch.float32)
    turn = rotation(width, start.base, heads, start.causal_offsets if causal else start.offsets)
    # In a state of unit size half is position: K / 2 pairs of length 1 score strength = gain K / 2 / sqrt(K).
    gain, pack_gain = (2 * start.strength / math.sqrt(width // count) for count in (heads, pack_heads))
    added = {
        "pack_query": pack_gain * pairs, "pack_key_value": pairs, "pack_key": pairs, "pack_value": identity,
        "query": gain * turn @ pairs, "key_value": pairs if paired else identity, "key": pairs, "value": identity,
    }  # fmt: skip
    for name, matrix in added.items():
        if hasattr(attention, name) and not is_loaded(weight := getattr(attention, name).weight):
            weight.add_(matrix.to(weight))


def blind(weight: torch.Tensor, embedding: torch.Tensor):
    """Take the direction of an embedding `[d]` out of what a projection `[d', d]` reads, in place."""
    direction = nn.functional.normalize(embedding.float(), dim=0)
    weight.sub_(torch.outer(weight.float() @ direction, direction).to(weight))


def blind_queries(model: nn.Module, config: PreTrainedConfig):
    """Take the embedding of the mask token out of the queries of tokens.

    All masked tokens have it. Queries that begin with the identity score it as they score a place, so that a masked
    token would read the other masked ones, which tell it nothing, and the more of them the longer the input is.
    """
    if (token := LocalStart.of(config).mask_token_id) is None:
        return
    for layer in model.encoder.layers:
        if not is_loaded(weight := layer.attention.query.weight):
            blind(weight, model.embeddings.word_embeddings.weight[token])
