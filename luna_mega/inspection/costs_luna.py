"""FLOPs and memory of a Luna model, by formulas that `luna-mega info` prints."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from luna_mega import (
    LunaConfig,
    LunaForMaskedLM,
    LunaForQuestionAnswering,
    LunaForSequencePairClassification,
    LunaForTokenClassification,
)

FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "projection_length",
    "tie_key_value",
    "share_layers",
    "input_type",
    "vocab_size",
    "position_embedding_type",
    "max_position_embeddings",
)
_HEADS_FOR_EVERY_TOKEN = (LunaForMaskedLM, LunaForTokenClassification, LunaForQuestionAnswering)
FORMULAS = {
    "FLOPs/token": "2 for each multiply-add; d width, f intermediate size, L = min(l, n) rows of P, r = L / n. Per "
    "layer: projections (6 + 4r) d^2, untied (8 + 6r) d^2; attention 8 L d; feed-forward 4 d f. Head: 2 for each "
    "weight, for every token (masked LM) or once a sequence. Norms, softmax and activations are not counted. A "
    "training step takes about three times as many.",
    "inference": "n max(5d + 2f, 7d) + 5 L d numbers; with a masked-LM head at least n (V + 2d).",
    "training": "In each layer n ((7 + 2m + u) d + (2 + a) f + h + 4) + L ((5 + m + u) d + h + 2) numbers, in the "
    "embeddings (n + L) ((1 + m) d + 2), in a masked-LM head n (4d + 2 + 2V); m, a = 1 with dropout and activation "
    "dropout, u = 1 with untied keys and values. Fused kernels do not store attention weights; attention dropout on a "
    "CPU adds about 7 h n L a layer. Dropout masks are counted as numbers; on a GPU they are bytes.",
    "with Adam": "weight, gradient and two moments for each parameter.",
}


def flops_per_token(model: PreTrainedModel, length: int) -> dict[str, float]:
    """FLOPs of a forward pass over one sequence of `length` positions, divided by `length`.

    With width d, intermediate size f, L = min(l, n) rows of P and r = L / n, every layer has 2 FLOPs for each
    multiply-add of

    - projections: query, output and context key/value d^2 each for a token; pack query and packed key/value d^2 each
      for a row of P; one more for keys and values that are not tied. (6 + 4r) d^2, or (8 + 6r) d^2;
    - attention: scores and weighted sum, L d each, for pack and for unpack: 8 L d;
    - feed-forward: 4 d f.

    A head has 2 for each of its weights, for every token (masked LM, tokens, spans) or once a sequence. Norms, softmax
    and activations are not counted; a training step takes about three times as many.
    """
    config = model.config
    width, rows = config.hidden_size, _rows(config, length)
    ratio = rows / length
    of_token, of_row = (6, 4) if config.tie_key_value else (8, 6)
    layers = config.num_hidden_layers
    found = {
        "projections": layers * (of_token + of_row * ratio) * width**2,
        "attention": layers * 8 * rows * width,
        "feed_forward": layers * 4 * width * config.intermediate_size,
        "head": sum(_head_flops(model, length, rows)) / length,
    }
    return found | {"total": sum(found.values())}


def _rows(config: LunaConfig, length: int) -> int:
    return min(config.projection_length, length) if config.dynamic_projection_length else config.projection_length


def _head_flops(model: PreTrainedModel, length: int, rows: int) -> Iterator[float]:
    """Of every linear layer of the head, for one sequence (half a pair)."""
    of_row = ("pooler.dense", "pooler.attention.k_proj", "pooler.attention.v_proj")
    towers = 2 if isinstance(model, LunaForSequencePairClassification) else 1
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name.split(".")[0] in ("luna", "embeddings", "encoder"):
            continue
        times = length if isinstance(model, _HEADS_FOR_EVERY_TOKEN) else 1 / towers
        if name.startswith("pooler."):
            times = rows if name in of_row else 1
        yield 2 * times * module.in_features * module.out_features
        if name == "pooler.attention.out_proj":
            yield 4 * rows * module.in_features


def inference_activations(model: PreTrainedModel, length: int) -> int:
    """Numbers alive at the peak of a forward pass without gradient, for one sequence; see `FORMULAS`."""
    config = model.config
    width, ffn = config.hidden_size, config.intermediate_size
    peak = length * max(5 * width + 2 * ffn, 7 * width) + 5 * _rows(config, length) * width
    if isinstance(model, LunaForMaskedLM):
        return max(peak, length * (config.vocab_size + 2 * width))
    return peak


def training_activations(model: PreTrainedModel, length: int) -> int:
    """Numbers kept for the backward pass, for one sequence, without checkpointing; see `FORMULAS`."""
    config = model.config
    width, heads, rows = config.hidden_size, config.num_attention_heads, _rows(config, length)
    masks, ffn_masks, untied = config.dropout > 0, config.activation_dropout > 0, not config.tie_key_value
    of_token = (7 + 2 * masks + untied) * width + (2 + ffn_masks) * config.intermediate_size + heads + 4
    of_row = (5 + masks + untied) * width + heads + 2
    kept = config.num_hidden_layers * (length * of_token + rows * of_row)
    kept += (length + rows) * ((1 + masks) * width + 2)
    if isinstance(model, LunaForMaskedLM):
        kept += length * (4 * width + 2 + 2 * config.vocab_size)
    return kept
