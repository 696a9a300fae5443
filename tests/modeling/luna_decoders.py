"""Small Luna decoders, with and without an encoder; inputs for them are in `decoders.py`."""

import torch

from luna_mega import LunaConfig, LunaForCausalLM, LunaForConditionalGeneration, LunaSeq2SeqConfig

DECODER_ONLY = {
    "softplus": {},
    "elu, untied": {"causal_activation": "elu", "tie_key_value": False},
    "pre-norm": {"pre_norm": True, "position_embedding_type": "learned"},
    "no positions, shared layers": {"position_embedding_type": "none", "share_layers": True},
}
WITH_ENCODER = {
    "translation": {},
    "elu, untied, pre-norm": {"causal_activation": "elu", "tie_key_value": False, "pre_norm": True},
    "learned positions, fixed length": {"position_embedding_type": "learned", "dynamic_projection_length": False},
    "two vocabularies, other decoder": {
        "decoder_vocab_size": 35,
        "num_decoder_layers": 1,
        "num_decoder_attention_heads": 2,
        "num_decoder_pack_attention_heads": 4,
        "decoder_intermediate_size": 20,
        "decoder_pre_norm": True,
        "decoder_position_embedding_type": "learned",
    },
    "every layer its P": {"contextual_projection": False},
}
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "position_embedding_type": "sinusoidal",
    "vocab_size": 30,
    "num_hidden_layers": 2,
    "projection_length": 6,
    "initializer_range": 0.02,  # of the weights and outputs in surface.json
}


def make(dtype=torch.float64, **fields):
    """Return a model whose weights are large enough that every parameter affects the result."""
    torch.manual_seed(0)
    both = fields.get("is_encoder_decoder")
    config = (LunaSeq2SeqConfig if both else LunaConfig)(
        **{"is_decoder": not both, "num_attention_heads": 4, "max_position_embeddings": 40} | SIZES | fields,
    )
    model = (LunaForConditionalGeneration if both else LunaForCausalLM)(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.tie_weights()
    return model
