"""Random configurations of encoders, decoders and encoder-decoders, and models of them in float64."""

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
    """Drop positions of a mask `[B, T]` in place; `side` is "left", "right", "mixed", "gaps" or "none".

    The first row is complete unless there are gaps, and every row has at least one position.
    """
    length = mask.shape[1]
    for row in range(side != "gaps", len(mask)):
        count = rng.randrange(1, length + 1)
        if side == "left" or (side == "mixed" and row % 2):
            mask[row, : length - count] = 0
        elif side in ("right", "mixed"):
            mask[row, count:] = 0
        elif side == "gaps":
            mask[row] &= torch.rand(length) < 0.7
            mask[row, rng.randrange(length)] = 1
