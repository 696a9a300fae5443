"""FLOPs and memory of Mega layers for one sequence; `FORMULAS` describes them."""

import math

from transformers import PreTrainedModel

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.kernels.moving_average.torch_backend import CHUNK, MANY_POSITIONS

# Numbers that a norm stores for the backward pass in addition to layer norm's, in units of d.
_OF_NORM = {"scalenorm": 1.0, "rmsnorm": 1.0, "batchnorm": 2.5, "syncbatchnorm": 2.5}
FORMULAS = {
    "FLOPs/token": "2 for each multiply-add; d width, v value width, z shared width, h dimensions of the moving "
    "average, f feed-forward width, c keys of a query (n, or the chunk). Per layer: projections 2 d (3v + z + 2d), in "
    "the embedding 2 e d for a width e (with an adaptive embedding, the width of the first band), or 2 C p^2 d for "
    "patches of p x p pixels in C colors; output projection 2 d^2; attention 2 c (z + v); moving average 6 h d for "
    "each direction, counted as the recurrence in any implementation; cross-attention 4 d (2d + z) + 2 n (z + d); "
    "feed-forward 4 d f. Head: 2 for each weight, for every token (language models; an adaptive softmax scores all "
    "words) or once per sequence. Norms, softmax and activations are not counted. A training step takes about three "
    "times the FLOPs. Source and target of an encoder-decoder have n positions each.",
    "inference": "n max(6d + 5v + 4z, 3d + 2f) numbers; at least n (V + 2d) with a masked-LM head, n (V + d) with a "
    "causal one, n (2V + d) with an adaptive softmax. A decoder with an encoder adds the n d of its output. Attention "
    "uses blocks of some MB, which are not counted.",
    "training": "In each layer n ((11 + 3m + 2k) d + (6 + b) v + 5z + (2 + a) f + 6) numbers, and for the kernels of "
    "the moving average, once per batch, about r (K + h (K / i + i + 3)), with r = d for each direction, K = min(n, "
    "truncation) and i = 16 up to K = 256, else 64; from 4096 positions on, without truncation, r (64 + 218 h). In "
    "the embeddings n ((1 + m) d + 3), with patches additionally n C p^2, in an output projection 2 n d, in a "
    "masked-LM head n ((1 + 2m) d + 2V), in a causal one n ((1 + m) d + 2V), in the head of an encoder-decoder n (d + "
    "2V), in an adaptive softmax n ((1 + m) d + W); W is the size of the first band plus the number of tails, and "
    "each word of a tail adds the size of the tail. Each cross-attention has n ((12 + m + k + b) d + 3z + 3), and n d "
    "once. m, b, a = 1 with dropout, hidden dropout and dropout of the feed-forward layer, k = 1 (scale, RMS) or 2.5 "
    "(batch norm). The attention scores, n c numbers in each layer, are stored if c is at most 2 v, and the scores of "
    "cross-attention, n^2, if n is at most 2 d; otherwise they are recomputed in the backward pass. Dropout masks are "
    "counted as numbers; on a GPU they are bytes.",
    "cache": "generation with a decoder: in each layer d h + c (z + v) with c = n (up to 2 n after decoding steps, "
    "because the buffer doubles) or the chunk; with a truncation t also d (h + t), with cross-attention n (z + d).",
    "with Adam": "weight, gradient and two moments for each parameter.",
}


def flops_per_token(config: MegaConfig, length: int) -> dict[str, float]:
    """Return the FLOPs of each part of all layers, for one of `length` positions."""
    width, values, shared = config.hidden_size, config.intermediate_size, config.shared_representation_size
    layers = config.num_hidden_layers
    counts = {
        "projections": layers * 2 * width * (3 * values + shared + 2 * width)
        + _embedding_flops(config)
        + 2 * width**2 * config.output_projection,
        "attention": layers * 2 * pairs(config.attention_chunk, length) / length * (shared + values),
        "moving_average": layers * 6 * config.ema_projection_size * _rows(config),
        "feed_forward": layers * 4 * width * config.nffn_hidden_size * config.use_normalized_ffn,
    }
    if config.add_cross_attention:
        counts["cross_attention"] = layers * (4 * width * (2 * width + shared) + 2 * length * (shared + width))
    return counts


def _embedding_flops(config: MegaConfig) -> int:
    if config.input_type == "patches":
        return 2 * config.num_channels * config.patch_size**2 * config.hidden_size
    projected = config.adaptive_input_cutoffs is not None or config.embedding_size != config.hidden_size
    return 2 * config.embedding_size * config.hidden_size * (projected and config.input_type == "tokens")


def pairs(chunk: int | None, length: int, longest: float = math.inf) -> int:
    """Return the pairs of query and key in all chunks of at most `longest` positions; the last one may be short."""
    chunk = min(chunk or length, length)
    chunks = ((length // chunk, chunk), (1, length % chunk))
    return sum(count * keys**2 for count, keys in chunks if keys <= longest)


def _kept_scores(config: MegaConfig, length: int) -> int:
    """Return the attention scores of one layer that are no more bytes than value and output, and so are kept."""
    cross = pairs(None, length, 2 * config.hidden_size) if config.add_cross_attention else 0
    return pairs(config.attention_chunk, length, 2 * config.intermediate_size) + cross


def _rows(config: MegaConfig) -> int:
    """Return the channels of the moving average in all directions."""
    return config.hidden_size * (2 if config.bidirectional else 1)


def head_flops(model: PreTrainedModel, length: int) -> dict[str, float]:
    """Return the FLOPs of an adaptive softmax, which uses weights of the embedding and hides linear layers inside."""
    if getattr(model.config, "adaptive_softmax_cutoffs", None) is None or not isinstance(model, MegaForCausalLM):
        return {}
    inside = [name for name, module in model.named_modules() if name.startswith("lm_head.")]
    return dict.fromkeys(inside, 0.0) | {"lm_head": 2 * length * _adaptive_weights(model)}


def _adaptive_weights(model: MegaForCausalLM) -> int:
    """Return the number of weights that an adaptive softmax multiplies by, its own and the tied ones."""
    embedding, softmax = model.get_input_embeddings(), model.lm_head
    tied = [embedding.words] * softmax.tied + ([embedding.projections[1:]] if softmax.projections is None else [])
    return sum(parameter.numel() for part in (softmax, *tied) for parameter in part.parameters())


def inference_activations(config: MegaConfig, length: int) -> int:
    """Return the numbers alive at the peak of the stack."""
    width, values, shared = config.hidden_size, config.intermediate_size, config.shared_representation_size
    feed_forward = (3 * width + 2 * config.nffn_hidden_size) * config.use_normalized_ffn
    return length * max(6 * width + 5 * values + 4 * shared, feed_forward)


def training_activations(config: MegaConfig, length: int) -> float:
    """Return the numbers of embeddings and layers that are kept for the backward pass."""
    width, values, shared = config.hidden_size, config.intermediate_size, config.shared_representation_size
    masks, value_masks = config.dropout_prob > 0, config.hidden_dropout_prob > 0
    norm = _OF_NORM.get(config.normalization_type, 0.0)
    of_token = (9 + 2 * masks + norm) * width + 5 * shared + 4
    of_token += (6 + value_masks) * values
    once = (1 + masks) * width + 3 + 2 * width * config.output_projection
    if config.input_type == "patches":
        once += config.num_channels * config.patch_size**2
    if config.use_normalized_ffn:
        of_token += (2 + masks + norm) * width + 2
        of_token += (2 + (config.nffn_activation_dropout_prob > 0)) * config.nffn_hidden_size
    if config.add_cross_attention:
        of_token += (12 + masks + norm + value_masks) * width + 3 * shared + 3
        once += width
    of_layer = length * of_token + _kernels(config, length) + _kept_scores(config, length)
    return config.num_hidden_layers * of_layer + length * once


def language_model_activations(config: MegaConfig, kind: str) -> int:
    """Return the numbers per token that a language-modeling head keeps for the backward pass."""
    masks, cutoffs = config.dropout_prob > 0, config.adaptive_softmax_cutoffs
    of_width = {"MaskedLM": 1 + 2 * masks, "CausalLM": 1 + masks, "ConditionalGeneration": 1}[kind]
    return of_width * config.hidden_size + (2 * config.vocab_size if cutoffs is None else cutoffs[0] + len(cutoffs))


def cache_numbers(config: MegaConfig, length: int) -> int:
    """Return how many numbers a decoder remembers for `length` positions and a source of the same length."""
    width, shared = config.hidden_size, config.shared_representation_size
    of_layer = (config.attention_chunk or length) * (
        shared + config.intermediate_size
    ) + width * config.ema_projection_size
    if config.truncation is not None:
        of_layer += width * (config.ema_projection_size + config.truncation)
    if config.add_cross_attention:
        of_layer += length * (shared + width)
    return config.num_hidden_layers * of_layer


def _kernels(config: MegaConfig, length: int) -> float:
    """Return the numbers of one layer for all sequences together: kernels of the moving average."""
    truncated = config.truncation is not None and config.truncation < length
    if length >= MANY_POSITIONS and not truncated:
        return _rows(config) * (CHUNK + 218 * config.ema_projection_size)
    kernel = config.truncation if truncated else length
    inner = 16 if kernel <= 256 else 64
    return _rows(config) * (kernel + config.ema_projection_size * (kernel / inner + inner + 3))
