"""Random configurations of encoders, decoders and encoder-decoders, and models of them in float64."""

import copy
import pickle

import torch

from tests.random_cases import choose

SIZES = {"vocab_size": 40, "hidden_size": 16}
LUNA = {
    "num_attention_heads": (1, 2, 4), "num_pack_attention_heads": (None, 1, 2), "projection_length": (1, 3, 8),
    "tie_key_value": (True, False), "position_embedding_type": ("learned", "sinusoidal", "none"),
    "embedding_norm": (True, False), "pre_norm": (True, False), "share_layers": (True, False),
    "first_position": (None, 0), "pad_token_id": (0, 1), "scale_embedding": (None, True, False),
}  # fmt: skip
MEGA = {
    "intermediate_size": (16, 24), "ema_projection_size": (0, 1, 2, 5), "shared_representation_size": (4, 8),
    "truncation": (None, None, 2, 5, 100), "normalize_before_mega": (True, False),
    "normalization_type": ("layernorm", "scalenorm", "rmsnorm", "batchnorm"), "norm_affine": (True, False),
    "attention_activation": ("softmax", "laplace", "relu2"), "use_normalized_ffn": (True, False),
    "normalize_before_ffn": (True, False), "relative_positional_bias": ("rotary", "simple", "none"),
    "embedding_norm": (True, False), "final_norm": (True, False), "scale_embedding": (True, False),
    "legacy_rms_norm": (True, False),
}  # fmt: skip


def luna(rng, layers=(1, 2, 3), **fields):
    """Return fields of a `LunaConfig`, those of all models and `fields`."""
    chosen = choose(rng, num_hidden_layers=layers, **LUNA, **fields)
    return SIZES | chosen | {"intermediate_size": 24, "max_position_embeddings": 64}


def mega(rng, layers=(1, 2, 3), **fields):
    """Return fields of a `MegaConfig`, those of all models and `fields`; about a half without chunks."""
    chosen, chunk = choose(rng, num_hidden_layers=layers, **MEGA, **fields), rng.choice((None, None, 3, 4, 8))
    chosen |= {} if chunk is None else {"use_chunking": True, "chunk_size": chunk}
    chosen |= {} if chosen["ema_projection_size"] else {"truncation": None}
    return SIZES | chosen | {"nffn_hidden_size": 24, "max_positions": 64, "pad_token_id": 1}


def make(rng, model_class, config):
    """Return an evaluated model in float64, with either form of attention and moved parameters."""
    model = model_class(config).double().eval()
    model.set_attn_implementation(rng.choice(("eager", "sdpa")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.3))
    return model


def drop(rng, mask, side):
    """Drop positions of a mask `[B, T]` in place; `side` is "left", "right", "gaps" or "none".

    The first row is complete unless there are gaps, and every row has at least one position.
    """
    length = mask.shape[1]
    for row in range(side != "gaps", len(mask)):
        count = rng.randrange(1, length + 1)
        if side == "left":
            mask[row, : length - count] = 0
        elif side == "right":
            mask[row, count:] = 0
        elif side == "gaps":
            mask[row] &= torch.rand(length) < 0.7
            mask[row, rng.randrange(length)] = 1


def change_cache(texts, cache, *others):
    """Change the cache of `texts` by a random action, of which `others` are more, or replace it by a copy; return it.

    `texts` has `rng`, `expected` with a row for each text, `select(change)`, which changes all its tensors, and
    `disturb(cache)`, which continues with other tokens.
    """
    rng, rows = texts.rng, len(texts.expected)
    action = rng.choice(("reorder", "select", "repeat", "copy", "pickle", *others))
    if action == "reorder" or (action == "select" and cache.is_static):
        order = torch.randint(0, rows, (rows,))
        cache.reorder_cache(order)
        texts.select(lambda x: x[order])
    elif action == "select":
        order = torch.randint(0, rows, (rng.randrange(1, rows + 1),))
        cache.batch_select_indices(order)
        texts.select(lambda x: x[order])
    elif action == "repeat" and not cache.is_static and rows < 6:
        cache.batch_repeat_interleave(2)
        texts.select(lambda x: x.repeat_interleave(2, 0))
    elif action == "copy":
        other = copy.deepcopy(cache)
        cache, other = (cache, other) if rng.random() < 0.5 else (other, cache)
        texts.disturb(other)  # has no effect on the cache that is returned
    elif action == "pickle":
        cache = pickle.loads(pickle.dumps(cache))
    elif action == "crop":
        cache.crop(cache.get_seq_length())
    return cache
