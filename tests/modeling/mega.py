"""Small Mega models for the tests; their inputs are in `luna.py`."""

import luna_mega

from . import luna

HEADS = {name: getattr(luna_mega, f"Mega{name}") for name in luna.HEADS}
VARIANTS = {
    "rotary scalenorm": {},
    "laplace chunks": {"attention_activation": "laplace", "use_chunking": True, "chunk_size": 8},
    "relu2 simple post-norm": {
        "attention_activation": "relu2",
        "relative_positional_bias": "simple",
        "normalize_before_mega": False,
        "normalize_before_ffn": False,
        "normalization_type": "layernorm",
    },
    "one direction, truncated": {"bidirectional": False, "truncation": 5, "normalization_type": "rmsnorm"},
    "batchnorm, norms around": {
        "normalization_type": "batchnorm",
        "embedding_norm": True,
        "final_norm": True,
        "scale_embedding": True,
    },
    "simple chunks, shift, no ffn": {
        "relative_positional_bias": "simple",
        "use_chunking": True,
        "chunk_size": 7,
        "ema_shift": True,
        "use_normalized_ffn": False,
    },
    "no average, no bias": {"ema_projection_size": 0, "relative_positional_bias": "none"},
}
NO_DROPOUT = dict.fromkeys(
    ("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "nffn_activation_dropout_prob"), 0.0
)
VALUES = {"input_type": "values", "pooling": "mean"}


def tiny_config(**overrides):
    fields = {"ema_projection_size": 4, "shared_representation_size": 12, "nffn_hidden_size": 20, "max_positions": 48}
    config = luna_mega.MegaSeq2SeqConfig if overrides.get("is_encoder_decoder") else luna_mega.MegaConfig
    return config(**luna.SIZES | fields | overrides)


def make(head, **overrides):
    def size(name):  # With initial weights, attention is almost uniform, and almost 0 for relu2.
        return 0.5 if "qk_weight" in name or "rel_pos_bias" in name else 0.1

    return luna.enlarged(HEADS[head], tiny_config(**overrides), size)
