"""Small Mega decoders, with and without an encoder; inputs for them are in `decoders.py`."""

import torch

from luna_mega import MegaConfig, MegaForCausalLM, MegaForConditionalGeneration, MegaSeq2SeqConfig

ABSENT = {"ema_projection_size": 0, "relative_positional_bias": "none"}
DECODER_ONLY = {
    "softmax": {},
    "laplace": {"attention_activation": "laplace"},
    "relu2 simple": {"attention_activation": "relu2", "relative_positional_bias": "simple", "max_positions": 40},
    "softmax chunks": {"use_chunking": True, "chunk_size": 4, "relative_positional_bias": "simple"},
    "rope chunks": {"use_chunking": True, "chunk_size": 4, "relative_positional_bias": "rope"},
    "t5": {"relative_positional_bias": "t5"},
    "laplace chunks": {"attention_activation": "laplace", "use_chunking": True, "chunk_size": 5},
    "relu2 chunks of 1": {"attention_activation": "relu2", "use_chunking": True, "chunk_size": 1},
    "truncated": {"truncation": 3, "use_chunking": True, "chunk_size": 4},
    "laplace chunks, no average, no bias": ABSENT
    | {"attention_activation": "laplace", "use_chunking": True, "chunk_size": 5},
}
SIMPLE = {"relative_positional_bias": "simple", "max_positions": 24, "decoder_max_positions": 30}
WITH_ENCODER = {
    "softmax": {},
    "laplace simple post-norm": SIMPLE
    | {
        "attention_activation": "laplace",
        "normalize_before_mega": False,
        "normalize_before_ffn": False,
        "embedding_norm": True,
        "scale_embedding": True,
    },
    "relu2 chunks": {"attention_activation": "relu2", "use_chunking": True, "chunk_size": 4, "final_norm": True},
    "softmax simple, two vocabularies, other decoder": SIMPLE
    | {
        "decoder_vocab_size": 23,
        "num_decoder_layers": 1,
        "decoder_intermediate_size": 14,
        "decoder_nffn_hidden_size": 10,
        "decoder_shared_representation_size": 6,
        "decoder_ema_projection_size": 2,
        "decoder_chunk_size": 5,
    },
    "no average, no bias": ABSENT,
    "truncated": {"truncation": 3, "tie_word_embeddings": False, "attention_activation": "laplace"},
}


def make(dtype=torch.float64, **fields):
    """Return a model whose weights are large enough that every parameter affects the result."""
    torch.manual_seed(0)
    decoder_only = not fields.get("is_encoder_decoder")
    config = (MegaConfig if decoder_only else MegaSeq2SeqConfig)(
        **{
            "hidden_size": 12,
            "intermediate_size": 20,
            "shared_representation_size": 8,
            "nffn_hidden_size": 16,
            "initializer_range": 0.3,
            "vocab_size": 30,
            "num_hidden_layers": 2,
            "ema_projection_size": 3,
            "is_decoder": decoder_only,
            "bidirectional": not decoder_only,
        }
        | fields,
    )
    return (MegaForCausalLM if decoder_only else MegaForConditionalGeneration)(config).to(dtype).eval()
