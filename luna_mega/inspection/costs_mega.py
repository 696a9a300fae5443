"""FLOPs and memory of a Mega model, by formulas that `luna-mega info` prints."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from luna_mega import (
    MegaConfig,
    MegaForCausalLM,
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
    "adaptive_softmax_cutoffs",
    "max_positions",
)
_HEADS_FOR_EVERY_TOKEN = (MegaForCausalLM, MegaForMaskedLM, MegaForTokenClassification, MegaForQuestionAnswering)
# Numbers that a norm keeps for the backward pass beside the layer norm's, in units of d.
_OF_NORM = {"scalenorm": 1.0, "rmsnorm": 1.0, "batchnorm": 2.5, "syncbatchnorm": 2.5}
FORMULAS = {
    "FLOPs/token": "2 for each multiply-add; d width, v value width, z shared width, h dimensions of the moving "
    "average, f feed-forward width, c keys of a query (n, or the chunk). Per layer: projections 2 d (3v + z + 2d), "
    "besides that of the embedding (of an adaptive one the first band's); attention 2 c (z + v); moving average 6 h d "
    "for each direction, counted as the recurrence, whichever way it is computed; feed-forward 4 d f. Head: 2 for each "
    "weight, for every token (language models; an adaptive softmax scores all words) or once a sequence. Norms, "
    "softmax and activations are not counted. A training step takes about three times as many.",
    "inference": "n max(7d + 5v + 4z, 4d + 2f) numbers, in chunks with padding at least 6n (d + v + z); at least "
    "n (V + 2d) with a masked-LM head, n (V + d) with a causal one, n (2V + d) with an adaptive softmax. Attention "
    "works in blocks of some MB, which are not counted.",
    "training": "In each layer n ((11 + 3m + 2k) d + (6 + b) v + 5z + (2 + a) f + 6) numbers, in chunks with padding "
    "2 n v more, and for the kernels of the moving average, once a batch, about r (K + h (2K / i + i + 17)), with r = "
    "d for each direction, K = min(n, truncation) and i = 16 up to K = 256, else 64; from 4096 positions on, without "
    "truncation, r (64 + 240 h); in the embeddings n ((1 + m) d + 3), in a masked-LM head n ((1 + 2m) d + 2V), in a "
    "causal one n ((1 + m) d + 2V), in an adaptive softmax n ((1 + m) d + W), where W is the size of the first band "
    "and the number of tails, and each word of a tail adds its size; m, b, a = 1 with dropout, hidden dropout and "
    "the feed-forward layer's dropout, k = 1 (scale, RMS) or 2.5 (batch norm). Attention weights are computed again in "
    "the backward pass, not kept. Dropout masks are counted as numbers; on a GPU they are bytes.",
    "cache": "of a decoder that generates: in each layer d h + c (z + v) with c = n or, in chunks, at most one less "
    "than the chunk; with a truncation t also d (h + t).",
    "with Adam": "weight, gradient and two moments for each parameter.",
}


def flops_per_token(model: PreTrainedModel, length: int) -> dict[str, float]:
    """FLOPs of a forward pass over one sequence of `length` positions, divided by `length`; see `FORMULAS`."""
    config = model.config
    width, values, shared = config.hidden_size, config.intermediate_size, config.shared_representation_size
    layers = config.num_hidden_layers
    found = {
        "projections": layers * 2 * width * (3 * values + shared + 2 * width) + _embedding_flops(config),
        "attention": layers * 2 * _keys(config, length) * (shared + values),
        "moving_average": layers * 6 * config.ema_projection_size * _rows(config),
        "feed_forward": layers * 4 * width * config.nffn_hidden_size * config.use_normalized_ffn,
        "head": sum(_head_flops(model, length)) / length,
    }
    return found | {"total": sum(found.values())}


def _embedding_flops(config: MegaConfig) -> int:
    projected = config.adaptive_input_cutoffs is not None or config.embedding_size != config.hidden_size
    return 2 * config.embedding_size * config.hidden_size * (projected and config.input_type == "tokens")


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
    if getattr(model.config, "adaptive_softmax_cutoffs", None) and isinstance(model, MegaForCausalLM):
        yield 2 * length * _adaptive_weights(model)
    towers = 2 if isinstance(model, MegaForSequencePairClassification) else 1
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or any(
            part in name for part in ("layers.", "embedding_layer.", "lm_head.")
        ):
            continue
        every_token = isinstance(model, _HEADS_FOR_EVERY_TOKEN)
        yield 2 * (length if every_token else 1 / towers) * module.in_features * module.out_features


def _adaptive_weights(model: MegaForCausalLM) -> int:
    """Weights that an adaptive softmax multiplies by, its own and the tied ones."""
    embedding, softmax = model.get_input_embeddings(), model.lm_head
    tied = [embedding.words] * softmax.tied + ([embedding.projections[1:]] if softmax.projections is None else [])
    return sum(parameter.numel() for part in (softmax, *tied) for parameter in part.parameters())


def inference_activations(model: PreTrainedModel, length: int) -> int:
    """Numbers alive at the peak of a forward pass without gradient, for one sequence; see `FORMULAS`."""
    config = model.config
    width, values, shared = config.hidden_size, config.intermediate_size, config.shared_representation_size
    attention = 7 * width + 5 * values + 4 * shared
    if config.use_chunking:
        attention = max(attention, 6 * (width + values + shared))
    peak = max(attention, (4 * width + 2 * config.nffn_hidden_size) * config.use_normalized_ffn)
    if isinstance(model, MegaForMaskedLM):
        peak = max(peak, config.vocab_size + 2 * width)
    elif isinstance(model, MegaForCausalLM):
        peak = max(peak, (1 if config.adaptive_softmax_cutoffs is None else 2) * config.vocab_size + width)
    return length * peak


def cache_numbers(model: PreTrainedModel, length: int) -> int:
    """Numbers that a decoder remembers of `length` positions of one sequence; see `FORMULAS`."""
    config = model.config
    window = length if config.attention_chunk is None else min(length, config.attention_chunk - 1)
    of_layer = window * (config.shared_representation_size + config.intermediate_size)
    of_layer += config.hidden_size * config.ema_projection_size
    if config.truncation is not None:
        of_layer += config.hidden_size * (config.ema_projection_size + config.truncation)
    return config.num_hidden_layers * of_layer


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
    elif isinstance(model, MegaForCausalLM):
        cutoffs = config.adaptive_softmax_cutoffs
        scores = 2 * config.vocab_size if cutoffs is None else cutoffs[0] + len(cutoffs)
        kept += length * ((1 + masks) * width + scores)
    return round(kept)


def _kernels(config: MegaConfig, length: int) -> float:
    """What does not depend on the number of sequences: kernels of the moving average, of one layer."""
    truncated = config.truncation is not None and config.truncation < length
    if length >= MANY_POSITIONS and not truncated:
        return _rows(config) * (CHUNK + 240 * config.ema_projection_size)
    kernel = config.truncation if truncated else length
    inner = 16 if kernel <= 256 else 64
    return _rows(config) * (kernel + config.ema_projection_size * (2 * kernel / inner + inner + 17))
