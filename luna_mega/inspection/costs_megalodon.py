"""FLOPs and memory of Megalodon layers for one sequence; `FORMULAS` describes them."""

from transformers import PreTrainedModel

from luna_mega import MegalodonConfig
from luna_mega.inspection.costs_mega import pairs

FORMULAS = {
    "FLOPs/token": "2 for each multiply-add; d width, z width of queries and keys, v of values, H heads, N complex "
    "states of the moving average, f feed-forward width, C chunk, c keys of a query (n, or the chunk), G groups of "
    "the timestep norm, S scores of the output layer. Per layer: projections 2 d (3v + z + d), attention 2 c (z + v), "
    "moving average 14 N d, counted as the recurrence, feed-forward 4 d f, with swiglu 6 d f. Head: 2 d S for every "
    "token. Norms, rotations and activations are not counted. A training step takes about three times the FLOPs.",
    "inference": "n max(6d + 4v + 2z + z / H, 7d + 3v + 2z + z / H, 4d + 2f + z / H) numbers, 3f instead of 2f with "
    "swiglu, and with an output layer at least n (S + d). Attention uses blocks of some MB, which are not counted.",
    "training": "In each layer n ((6 + a + 2m + b + r) d + (6 + b) v + 4z + (2 + 2g + b) f + 4G + 1.25H + 3) numbers, "
    "and once per batch 7 N d + 5d + 2N + 2z + 4G for the moving average. In the embeddings and the last norm n ((1 + "
    "m) d + 4G + z / H + 2), in the output layer n (d + 2S). a, r, g = 1 with affine norms, rescale_nffn and swiglu, "
    "m, b = 1 with dropout and hidden dropout. The attention scores, n c H in each layer, are stored if c is at most "
    "2 v / H; otherwise they are recomputed in the backward pass. If C does not divide n, the copies that pad the "
    "last chunk are added. Dropout masks are counted as numbers; on a GPU they are bytes.",
    "cache": "in each layer C (z + v) + 2 N d + 4G for any n, and 4G once. Statistics are float64 and count twice.",
    "with Adam": "weight, gradient and two moments for each parameter.",
}


def flops_per_token(config: MegalodonConfig, length: int) -> dict[str, float]:
    """Return the FLOPs of each part of all layers, for one of `length` positions."""
    width, values, shared = config.hidden_size, config.value_size, config.shared_representation_size
    counts = {
        "projections": 2 * width * (3 * values + shared + width),
        "attention": 2 * pairs(config.chunk_size, length) / length * (shared + values),
        "moving_average": 14 * config.ema_projection_size * width,
        "feed_forward": (6 if config.swiglu else 4) * width * config.intermediate_size,
    }
    return {part: config.num_hidden_layers * flops for part, flops in counts.items()}


def head_flops(model: PreTrainedModel, length: int) -> dict[str, float]:
    """Return no FLOPs: the head has linear layers only."""
    return {}


def inference_activations(config: MegalodonConfig, length: int) -> int:
    """Return the numbers alive at the peak of the stack."""
    width, values, shared = config.hidden_size, config.value_size, config.shared_representation_size
    rotation = shared // config.num_attention_heads
    attention = max(6 * width + 4 * values, 7 * width + 3 * values) + 2 * shared
    return length * (max(attention, 4 * width + (2 + config.swiglu) * config.intermediate_size) + rotation)


def training_activations(config: MegalodonConfig, length: int) -> float:
    """Return the numbers of embeddings and layers that are kept for the backward pass."""
    width, values, shared = config.hidden_size, config.value_size, config.shared_representation_size
    heads, groups, states = config.num_attention_heads, config.norm_num_groups, config.ema_projection_size
    masks, hidden_masks = config.dropout_prob > 0, config.hidden_dropout_prob > 0
    of_token = (6 + config.norm_affine + 2 * masks + hidden_masks + config.rescale_nffn) * width
    of_token += (6 + hidden_masks) * values + (2 + 2 * config.swiglu + hidden_masks) * config.intermediate_size
    of_token += 4 * shared + 4 * groups + 1.25 * heads + 3
    average = 7 * states * width + 5 * width + 2 * states + 2 * shared + 4 * groups
    scores = heads * pairs(config.chunk_size, length) if min(config.chunk_size, length) <= 2 * values / heads else 0
    once = (1 + masks) * width + 4 * groups + shared / heads + 2
    return config.num_hidden_layers * (length * of_token + average + scores) + length * once


def language_model_activations(config: MegalodonConfig, kind: str) -> int:
    """Return the numbers per token that the output layer keeps for the backward pass."""
    return config.hidden_size + 2 * config.scores


def cache_numbers(config: MegalodonConfig, length: int) -> int:
    """Return how many float32 numbers a cache contains; a statistic of a norm, in float64, counts as two."""
    keys = config.chunk_size * (config.shared_representation_size + config.value_size)
    average, statistics = 2 * config.ema_projection_size * config.hidden_size, 4 * config.norm_num_groups
    return config.num_hidden_layers * (keys + average + statistics) + statistics
