"""FLOPs and memory of a Mega model, by formulas that `luna-mega info` prints."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from luna_mega import (
    MegaConfig,
    MegaForMaskedLM,
    MegaForQuestionAnswering,
    MegaForSequencePairClassification,
    MegaForTokenClassification,
)
from luna_mega.kernels.damped_ema.torch_backend import CHUNK, MANY_POSITIONS

FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "shared_representation_size",
    "ema_projection_size",
    "nffn_hidden_size",
    "attention_activation",
    "attention_chunk",
    "relative_positional_bias",
    "normalization_type",
    "ema_shift",
    "truncation",
    "input_type",
    "vocab_size",
    "max_positions",
)
_HEADS_FOR_EVERY_TOKEN = (MegaForMaskedLM, MegaForTokenClassification, MegaForQuestionAnswering)
# Numbers that a norm keeps for the backward pass beside the layer norm's, in units of d.
_OF_NORM = {"scalenorm": 1.0, "rmsnorm": 1.0, "batchnorm": 2.5, "syncbatchnorm": 2.5}
FORMULAS = {
    "FLOPs/token": "2 for each multiply-add; d width, v value width, z shared width, h dimensions of the moving "
    "average, f feed-forward width, c keys of a query (n, or the chunk). Per layer: projections 2 d (3v + z + 2d); "
    "attention 2 c (z + v); moving average 6 h d for each direction, counted as the recurrence, whichever way it is "
    "computed; feed-forward 4 d f. Head: 2 for each weight, for every token (masked LM) or once a sequence. Norms, "
    "softmax and activations are not counted. A training step takes about three times as many.",
    "inference": "n max(7d + 5v + 2z, 4d + 2f) numbers, in chunks n (v + z) more; with a masked-LM head at least n (V "
    "+ 2d). Attention works in blocks of some MB, which are not counted.",
    "training": "In each layer n ((11 + 3m + 2k) d + (6 + b) v + 5z + (2 + a) f + 6) numbers, in chunks 2 n v more, "
    "and for the kernels of the moving average, once a batch, about r (K + h (2K / i + i + 17)), with r = d for each "
    "direction, K = min(n, truncation) and i = 16 up to K = 256, else 64; from 4096 positions on, without truncation, "
    "r (64 + 240 h); in the embeddings n ((1 + m) d + 3), in a masked-LM head n ((1 + 2m) d + 2V); m, b, a = 1 with "
    "dropout, hidden dropout and the feed-forward layer's dropout, k = 1 (scale, RMS) or 2.5 (batch norm). Attention "
    "weights are computed again in the backward pass, not kept. Dropout masks are counted as numbers; on a GPU they "
    "are bytes.",
    "with Adam": "weight, gradient and two moments for each parameter.",
}


def flops_per_token(model: PreTrainedModel, length: int) -> dict[str, float]:
    """FLOPs of a forward pass over one sequence of `length` positions, divided by `length`; see `FORMULAS`."""
    config = model.config
    width, values, shared = config.hidden_size, config.intermediate_size, config.shared_representation_size
    layers = config.num_hidden_layers
    found = {
        "projections": layers * 2 * width * (3 * values + shared + 2 * width),
        "attention": layers * 2 * _keys(config, length) * (shared + values),
        "moving_average": layers * 6 * config.ema_projection_size * _rows(config),
        "feed_forward": layers * 4 * width * config.nffn_hidden_size * config.use_normalized_ffn,
        "head": sum(_head_flops(model, length)) / length,
    }
    return found | {"total": sum(found.values())}


def _keys(config: MegaConfig, length: int) -> float:
    """Keys that a query sees, on average: the last chunk may be short."""
    chunk = min(config.attention_chunk or length, length)
    rest = length % chunk
    return ((length - rest) * chunk + rest**2) / length


def _rows(config: MegaConfig) -> int:
    """Channels of the moving average, of both directions."""
    return config.hidden_size * (2 if config.bidirectional else 1)


def _head_flops(model: PreTrainedModel, length: int) -> Iterator[float]:
    """Of every linear layer of the head, for one sequence (half a pair)."""
    towers = 2 if isinstance(model, MegaForSequencePairClassification) else 1
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or "layers." in name:
            continue
        every_token = isinstance(model, _HEADS_FOR_EVERY_TOKEN)
        yield 2 * (length if every_token else 1 / towers) * module.in_features * module.out_features


def inference_activations(model: PreTrainedModel, length: int) -> int:
    """Numbers alive at the peak of a forward pass without gradient, for one sequence; see `FORMULAS`."""
    config = model.config
    width, values, shared = config.hidden_size, config.intermediate_size, config.shared_representation_size
    attention = 7 * width + 5 * values + 2 * shared + (values + shared) * config.use_chunking
    peak = max(attention, (4 * width + 2 * config.nffn_hidden_size) * config.use_normalized_ffn)
    if isinstance(model, MegaForMaskedLM):
        peak = max(peak, config.vocab_size + 2 * width)
    return length * peak


def training_activations(model: PreTrainedModel, length: int) -> int:
    """Numbers kept for the backward pass, for one sequence, without checkpointing; see `FORMULAS`."""
    config = model.config
    width, values, ffn = config.hidden_size, config.intermediate_size, config.use_normalized_ffn
    masks, norm = config.dropout_prob > 0, _OF_NORM.get(config.normalization_type, 0.0)
    of_token = (9 + 2 * masks + norm) * width + 5 * config.shared_representation_size + 4
    of_token += (6 + (config.hidden_dropout_prob > 0) + 2 * config.use_chunking) * values
    if ffn:
        of_token += (2 + masks + norm) * width + 2
        of_token += (2 + (config.nffn_activation_dropout_prob > 0)) * config.nffn_hidden_size
    kept = config.num_hidden_layers * (length * of_token + _kernels(config, length)) + length * (
        (1 + masks) * width + 3
    )
    if isinstance(model, MegaForMaskedLM):
        kept += length * ((1 + 2 * masks) * width + 2 * config.vocab_size)
    return round(kept)


def _kernels(config: MegaConfig, length: int) -> float:
    """What does not depend on the number of sequences: kernels of the moving average, of one layer."""
    truncated = config.truncation is not None and config.truncation < length
    if length >= MANY_POSITIONS and not truncated:
        return _rows(config) * (CHUNK + 240 * config.ema_projection_size)
    kernel = config.truncation if truncated else length
    inner = 16 if kernel <= 256 else 64
    return _rows(config) * (kernel + config.ema_projection_size * (2 * kernel / inner + inner + 17))
