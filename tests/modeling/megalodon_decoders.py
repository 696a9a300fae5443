"""Small Megalodon models; inputs for them are in `decoders.py`."""

import torch

import luna_mega

from . import luna

DECODER_ONLY = {
    "heads": {},
    "one head, gated, tied": {
        "num_attention_heads": 1,
        "chunk_size": 5,
        "swiglu": True,
        "rescale_nffn": True,
        "scale_embedding": True,
        "tie_word_embeddings": True,
    },
    "chunks of 1, norms without parameters": {"chunk_size": 1, "norm_affine": False, "norm_eps": 1e-3},
}
WITH_ENCODER = {}


def tiny_config(**overrides):
    fields = {
        "vocab_size": 30,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "shared_representation_size": 8,
        "value_size": 20,
        "intermediate_size": 16,
        "ema_projection_size": 3,
        "norm_num_groups": 3,
        "chunk_size": 4,
        "bos_token_id": 0,
        "pad_token_id": 1,
    }
    return luna_mega.MegalodonConfig(**fields | overrides)


def make(head="ForCausalLM", dtype=torch.float64, **fields):
    """Return a model whose scales and shifts differ from their initial values."""
    model = luna.enlarged(getattr(luna_mega, f"Megalodon{head}"), tiny_config(**fields), lambda name: 0.2)
    return model.to(dtype)
