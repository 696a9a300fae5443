"""FLOPs and memory of Luna layers for one sequence; `FORMULAS` describes them."""

from torch import nn
from transformers import PreTrainedModel

from luna_mega import LunaConfig

FORMULAS = {
    "FLOPs/token": "2 for each multiply-add; d width, f intermediate size, L = min(l, n) rows of P, r = L / n. Per "
    "layer: projections (6 + 4r) d^2, untied (8 + 6r) d^2; attention 8 L d; feed-forward 4 d f. In a decoder: "
    "projections (8 + 2r) d^2, untied (10 + 2r) d^2; causal attention 10 L d, counted as the recurrence in any "
    "implementation; cross-attention as an encoder's projections and attention. With pack_method='importance' and h "
    "heads: projections (4 + 2r) d^2, untied (4 + 4r) d^2; pack 4d; attention 4 L (d + h). Head: 2 for each weight, "
    "for every token (language models, tokens, spans) or once per sequence. Norms, softmax and activations are not "
    "counted. A training step takes about three times the FLOPs. Source and target of an encoder-decoder have n "
    "positions each.",
    "inference": "n max(4d + 2f, 6d) + 5 L d numbers, of a decoder of N layers n max(4d + 2f, 7d) + (N + 3) L d; "
    "untied keys and values add d to 6d or 7d, pre-norm adds n d; with pack_method='importance' n max(4d + 2f, 7d) + "
    "3 L d; with a masked-LM head at least n (V + 2d), with a causal one n (V + d). A decoder with an encoder adds "
    "the n d of its output. Causal attention uses blocks of some MB, which are not counted.",
    "training": "In each layer n ((7 + 2m + u) d + (2 + a) f + h + 4) + L ((5 + m + u) d + h + 2) numbers, in the "
    "embeddings (n + L) ((1 + m) d + 2), after the last layer with pre-norm (n + L) (d + 2), in a masked-LM head n "
    "(4d + 2 + 2V); m, a = 1 with dropout and activation dropout, u = 1 with untied keys and values. In a decoder, "
    "which does not embed P, each layer has n ((8 + 2m + u) d + (2 + a) f + 6), with a separate P L ((3 + m) d + 2), "
    "with cross-attention n ((5 + m + u) d + h + 2) + L ((6 + m + u) d + h + 2) and n d once; its head n (d + 2V). "
    "With pack_method='importance', which does not embed P, each layer has n ((7 + 2m) d + (2 + a) f + 3h + 8) + L "
    "((2 + u) d + (1 + u) h + 3). Fused kernels do not store attention weights; attention dropout on a CPU adds about "
    "7 h n L per layer. Dropout masks are counted as numbers; on a GPU they are bytes.",
    "cache": "generation with a decoder: in each layer 3 L d for any n; with cross-attention L d more, untied 2 L d.",
    "with Adam": "weight, gradient and two moments for each parameter.",
}
_POOLER_OF_ROWS = ("pooler.dense", "pooler.attention.k_proj", "pooler.attention.v_proj")


def _rows(config: LunaConfig, length: int) -> int:
    dynamic = config.dynamic_projection_length
    return min(config.projection_length, length) if dynamic else config.projection_length


def flops_per_token(config: LunaConfig, length: int) -> dict[str, float]:
    """Return the FLOPs of each part of all layers, for one of `length` positions."""
    width, rows, layers = config.hidden_size, _rows(config, length), config.num_hidden_layers
    ratio, tied = rows / length, config.tie_key_value
    projections = (6 + 4 * ratio if tied else 8 + 6 * ratio) * width**2
    attention = 8 * rows * width
    counts = {"projections": projections, "attention": attention}
    if config.pack_method == "importance":
        counts = {"projections": (4 + (2 if tied else 4) * ratio) * width**2, "pack": 4 * width}
        counts["attention"] = 4 * rows * (width + config.num_attention_heads)
    if config.is_decoder:
        counts = {"projections": ((8 if tied else 10) + 2 * ratio) * width**2, "attention": 10 * rows * width}
    if config.add_cross_attention:
        counts["cross_attention"] = projections + attention
    counts["feed_forward"] = 4 * width * config.intermediate_size
    return {part: layers * flops for part, flops in counts.items()}


def head_flops(model: PreTrainedModel, length: int) -> dict[str, float]:
    """Return the FLOPs of a pooler's linear layers, some of which work on every row of P."""
    rows, counts = _rows(model.config, length), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("pooler."):
            times = rows if name in _POOLER_OF_ROWS else 1
            counts[name] = 2 * times * module.in_features * module.out_features
            if name == "pooler.attention.out_proj":
                counts[name] += 4 * rows * module.in_features
    return counts


def inference_activations(config: LunaConfig, length: int) -> int:
    """Return the numbers alive at the peak of the stack."""
    width, ffn = config.hidden_size, config.intermediate_size
    attention = 6 + config.is_decoder + (not config.tie_key_value)
    of_token = max(4 * width + 2 * ffn, attention * width) + config.pre_norm * width
    of_row = (config.num_hidden_layers + 3 if config.is_decoder else 5) * width
    if config.pack_method == "importance":
        of_token, of_row = max(4 * width + 2 * ffn, 7 * width) + config.pre_norm * width, 3 * width
    return length * of_token + _rows(config, length) * of_row


def training_activations(config: LunaConfig, length: int) -> int:
    """Return the numbers of embeddings and layers that are kept for the backward pass."""
    width, heads, rows = config.hidden_size, config.num_attention_heads, _rows(config, length)
    masks, untied = config.dropout > 0, not config.tie_key_value
    of_ffn = (2 + (config.activation_dropout > 0)) * config.intermediate_size
    of_token = (7 + 2 * masks + untied) * width + of_ffn + heads + 4
    of_row = (5 + masks + untied) * width + heads + 2
    embedded, once = length + rows, 0
    if config.pack_method == "importance":
        embedded = length
        of_token = (7 + 2 * masks) * width + of_ffn + 3 * heads + 8
        of_row = (2 + untied) * width + (1 + untied) * heads + 3
    if config.is_decoder:
        embedded, of_token = length, (8 + 2 * masks + untied) * width + of_ffn + 6
        if config.add_cross_attention:
            of_token += (5 + masks + untied) * width + heads + 2
            of_row += width
            once = length * width
        else:
            of_row = (3 + masks) * width + 2
    once += embedded * ((1 + masks + config.pre_norm) * width + 2 + 2 * config.pre_norm)
    return config.num_hidden_layers * (length * of_token + rows * of_row) + once


def language_model_activations(config: LunaConfig, kind: str) -> int:
    """Return the numbers per token that a language-modeling head stores for the backward pass."""
    return (
        3 * config.embedding_size + config.hidden_size + 2 if kind == "MaskedLM" else config.hidden_size
    ) + 2 * config.vocab_size


def cache_numbers(config: LunaConfig, length: int) -> int:
    """Return how many numbers a decoder's cache contains: the projected P, two sums and the packed source."""
    tensors = 3 + (config.add_cross_attention and (1 if config.tie_key_value else 2))
    return config.num_hidden_layers * tensors * _rows(config, length) * config.hidden_size
