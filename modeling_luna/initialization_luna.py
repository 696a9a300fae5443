"""Local initialization (`initialization="local"`): before training, every head of Luna attends to a neighbor.

A token reads other tokens through pack and unpack attention, and neither learns before the other works. The local
initialization sets both: each row of P packs the tokens of one segment of the sequence, and a token unpacks the row at
its position plus the offset of the head. Positions are initialized to sinusoids, and the identity, rotated in one
projection, is added to the random weights. All weights remain trainable.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, cast

import torch
from torch import nn
from transformers import initialization as init

SINUSOIDAL_BASE = 10000.0  # base of position_embedding_type="sinusoidal"
CAUSAL_BASE = 8.0  # causal weights are linear in the scores, so that only high frequencies separate neighbors


@dataclass(frozen=True)
class LocalStart:
    """Options of the local initialization, `initialization_options` of the configuration.

    Args:
        length: number of positions that the rows of P divide into segments; None = `max_position_embeddings`.
        base: initial frequencies of learned positions are from 1 to 1 / base; None = `length`, or 8 for a decoder
            without cross-attention.
        strength: attention score of a token for its own position, before the softmax.
        offsets: position relative to the token that each head attends to, repeated for further heads. Causal attention
            uses those up to 0.
        mask_token_id: token of masked language modeling, whose embedding is removed from the queries, so that masked
            tokens do not attend to each other. Only for encoders of tokens.
    """

    length: int | None = None
    base: float | int | None = None
    strength: float | int = 6.0
    offsets: Sequence[int] = (-1, 1, -2, 2, -3, 3, 0, 4)
    mask_token_id: int | None = None

    @classmethod
    def of(cls, config: Any) -> "LocalStart":
        """Return the options of a configuration, including defaults; raise `ValueError` if they do not fit it."""
        options, names = config.initialization_options or {}, [field.name for field in fields(cls)]
        if unknown := options.keys() - set(names):
            raise ValueError(f"initialization_options has no {', '.join(sorted(unknown))}, only {', '.join(names)}")
        start = cls(**options)
        _check_model(config)
        _check_options(start, config)
        if start.length is None:
            start = replace(start, length=config.max_position_embeddings)
        if start.base is None:
            base = CAUSAL_BASE if config.learns_causal_projection else max(start.length or 1, 2)
            learned = config.position_embedding_type == "learned"
            start = replace(start, base=base if learned else SINUSOIDAL_BASE)
        return start

    @property
    def causal_offsets(self) -> list[int]:
        """The offsets of causal attention."""
        return [offset for offset in self.offsets if offset <= 0]


def check_initialization(config: Any) -> None:
    """Raise `ValueError` for an initialization that does not fit the model, and for unknown options."""
    if config.initialization == "local":
        LocalStart.of(config)
    elif config.initialization_options is not None:
        raise ValueError(f"initialization={config.initialization!r} has no initialization_options; omit them")


def _check_model(config: Any) -> None:
    types = {config.position_embedding_type}
    if config.is_encoder_decoder:
        types.add(config.decoder_position_embedding_type or config.position_embedding_type)
    if "none" in types or len(types) > 1:
        raise ValueError(
            "initialization='local' requires positions of one type in encoder and decoder, got position_embedding_type "
            f"{' and '.join(map(repr, sorted(types)))}"
        )
    if not (config.embedding_norm or config.pre_norm or config.scale_embedding):
        raise ValueError(
            "initialization='local' requires states of about unit size before the first attention; set embedding_norm, "
            "pre_norm or scale_embedding to True"
        )
    if config.embedding_size != config.hidden_size:
        raise ValueError(
            f"initialization='local' does not support embedding_size={config.embedding_size} with hidden_size="
            f"{config.hidden_size}; omit one of them"
        )
    for field in ("num_attention_heads", "num_pack_attention_heads"):
        if (size := config.hidden_size // getattr(config, field)) % 2:
            raise ValueError(
                f"initialization='local' requires heads of even size, got {size} (hidden_size {config.hidden_size}, "
                f"{field} {getattr(config, field)})"
            )


def _check_options(start: LocalStart, config: Any) -> None:
    def fail(name: str, expected: str) -> NoReturn:
        raise ValueError(f"initialization_options: {name} must be {expected}, got {getattr(start, name)!r}")

    learned = config.position_embedding_type == "learned"
    if start.length is not None:
        limit = config.max_position_embeddings if learned else math.inf
        if type(start.length) is not int or not 1 <= start.length <= limit:
            fail("length", f"an integer from 1 to {limit}" + " (max_position_embeddings)" * learned)
    if start.base is not None and not learned:
        fail("base", "omitted with sinusoidal positions, which have a fixed base")
    if start.base is not None and not 1.0 < start.base < math.inf:
        fail("base", "a number above 1")
    if not 0.0 <= start.strength < math.inf:
        fail("strength", "a number of at least 0")
    if not start.offsets or any(type(offset) is not int for offset in start.offsets):
        fail("offsets", "at least one integer")
    if config.is_decoder and not start.causal_offsets:
        fail("offsets", "partly 0 or less, because a decoder does not attend to later tokens")
    if (token := start.mask_token_id) is not None:
        if config.input_type != "tokens" or config.is_decoder:
            fail("mask_token_id", "omitted unless the model is an encoder of tokens")
        if type(token) is not int or not 0 <= token < config.vocab_size:
            fail("mask_token_id", f"a token from 0 to {config.vocab_size - 1}")


def decoder_options(config: Any) -> dict[str, Any]:
    """Return the options for the decoder of an encoder-decoder, which has the same frequencies."""
    options = dict(config.initialization_options or {})
    for name in ("length", "mask_token_id"):
        options.pop(name, None)
    if config.position_embedding_type == "learned":
        options["base"] = LocalStart.of(config).base
    return options


def frequency_order(count: int) -> list[int]:
    """Return 0 ... count - 1 sorted by their reversed bits, so that every head has high and low frequencies."""
    return sorted(range(count), key=lambda index: f"{index:032b}"[::-1])


def frequencies(width: int, base: float) -> torch.Tensor:
    """Return the frequencies from 1 to 1 / base, `[width / 2]`, in the order of `frequency_order`."""
    count = width // 2
    order = torch.tensor(frequency_order(count), dtype=torch.float32)
    return torch.exp(order * (-math.log(base) / max(count - 1, 1)))


def paired_sinusoids(positions: torch.Tensor, width: int, base: float) -> torch.Tensor:
    """Return the sine and cosine of positions `[T]` for each of the `frequencies`, `[T, width]`."""
    angle = positions[:, None].float() * frequencies(width, base)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def rotation(width: int, base: float, heads: int, offsets: Sequence[int]) -> torch.Tensor:
    """Return `[width, width]`, which maps `paired_sinusoids` of i to the sinusoids of i + offsets[h] in each head h."""
    by_head = torch.tensor([offsets[head % len(offsets)] for head in range(heads)], dtype=torch.float32)
    angle = by_head.repeat_interleave(width // heads // 2) * frequencies(width, base)
    sin, cos = angle.sin(), angle.cos()
    matrix = torch.diag(cos.repeat_interleave(2))
    first = torch.arange(0, width, 2)
    matrix[first, first + 1], matrix[first + 1, first] = sin, -sin
    return matrix


def pairing(config: Any) -> torch.Tensor:
    """Return `[d, d]`, which maps the position embeddings of tokens to `paired_sinusoids`.

    Sinusoidal positions are sines, then cosines. Learned ones are initialized in pairs.
    """
    width = config.hidden_size
    identity = torch.eye(width, dtype=torch.float32)
    if config.position_embedding_type == "learned":
        return identity
    order = torch.tensor(frequency_order(width // 2))
    return identity[torch.stack([order, order + width // 2], dim=-1).flatten()]


def is_loaded(parameter: torch.Tensor) -> bool:
    """Return whether the parameter has been loaded from a checkpoint."""
    return getattr(parameter, "_is_hf_initialized", False)


def start_embeddings(embeddings: Any, config: Any, size: float) -> None:
    """Initialize learned positions to sinusoids of standard deviation `size`, and each row of P to a mean of positions.

    Row r of l is the mean of the positions from r length / l to (r + 1) length / l.
    """
    start, first = LocalStart.of(config), config.position_offset
    if config.position_embedding_type == "learned" and not is_loaded(table := embeddings.position_embeddings.weight):
        positions = torch.arange(config.max_position_embeddings)
        values = math.sqrt(2) * size * paired_sinusoids(positions, config.hidden_size, cast(float, start.base))
        table[first:] = values.to(table)
    if embeddings.has_projection and not is_loaded(packed := embeddings.packed_embeddings):
        rows = torch.arange(config.projection_length, device=packed.device)
        positions = embeddings.positions(torch.arange(cast(int, start.length), device=packed.device)).float()
        values = nn.functional.adaptive_avg_pool1d(positions.t(), len(rows)).t()
        if config.position_embedding_type == "sinusoidal":  # `LunaEmbeddings.packed` adds them
            values = values - embeddings.positions(rows - first)
        init.copy_(packed, values / embeddings.scale)


def start_attention(attention: nn.Module, config: Any, causal: bool) -> None:
    """Add matrices that compare positions to the random weights of the projections.

    Keys and the query of P contain positions in pairs. The query of the tokens is also rotated by the offset of each
    head. If keys and values are tied, the packed context contains the pairs already.
    """
    paired = causal  # keys are projections of states, and not of packed context
    start, width = LocalStart.of(config), config.hidden_size
    heads = config.num_attention_heads
    pack_heads = heads if causal else config.num_pack_attention_heads
    pairs, identity = pairing(config), torch.eye(width, dtype=torch.float32)
    turn = rotation(width, cast(float, start.base), heads, start.causal_offsets if causal else start.offsets)
    # Positions are half of a state of unit size: K / 2 pairs of length 1 have the score gain K / 2 / sqrt(K).
    gain, pack_gain = (2 * start.strength / math.sqrt(width // count) for count in (heads, pack_heads))
    added = {
        "pack_query": pack_gain * pairs, "pack_key_value": pairs, "pack_key": pairs, "pack_value": identity,
        "query": gain * turn @ pairs, "key_value": pairs if paired else identity, "key": pairs, "value": identity,
    }  # fmt: skip
    for name, matrix in added.items():
        if hasattr(attention, name) and not is_loaded(weight := getattr(attention, name).weight):
            weight.add_(matrix.to(weight))


def blind(weight: torch.Tensor, embedding: torch.Tensor) -> None:
    """Remove the direction of an embedding `[d]` from the inputs of a projection `[d', d]`, in place."""
    direction = nn.functional.normalize(embedding.float(), dim=0)
    weight.sub_(torch.outer(weight.float() @ direction, direction).to(weight))


def blind_queries(model: Any, config: Any) -> None:
    """Remove the embedding of the mask token from the queries of tokens.

    Otherwise a masked token would attend to the other masked tokens, which contain no information.
    """
    if (token := LocalStart.of(config).mask_token_id) is None:
        return
    for layer in model.encoder.layers:
        if not is_loaded(weight := layer.attention.query.weight):
            blind(weight, model.embeddings.word_embeddings.weight[token])
