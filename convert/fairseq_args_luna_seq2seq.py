"""What the original Luna code for translation can express of a configuration, and its arguments for that."""

import copy
from typing import Any

from luna_mega import LunaConfig
from luna_mega.convert.evidence import FAIRSEQ_ACTIVATIONS
from luna_mega.modeling_luna.configuration_luna import DECODER_FIELDS

LAYOUT = ("luna_seq2seq", "r21")


def allowed(config: LunaConfig) -> dict[str, tuple]:
    """Field -> the values that the code has for it; fields that may have any value are not listed."""
    learned = "learned" in (config.position_embedding_type, config.decoder_config.position_embedding_type)
    return {
        "hidden_act": tuple(name for name in FAIRSEQ_ACTIVATIONS if name != "silu"),
        "causal_activation": ("softplus",),
        "contextual_projection": (True,),
        "share_layers": (False,),
        "layer_norm_eps": (1e-5,),
        "pad_token_id": (1,),
        "bos_token_id": (0, None),
        "eos_token_id": (2, None),
        "decoder_start_token_id": (2,),
        # Where one side has positions, both have.
        "decoder_position_embedding_type": (None, "learned", "sinusoidal")
        if learned or config.position_embedding_type == "sinusoidal"
        else (None, "none"),
    }


def resolved(config: LunaConfig) -> LunaConfig:
    """The same configuration with a value in every field of the decoder."""
    full, decoder = copy.deepcopy(config), config.decoder_config
    for own, field in DECODER_FIELDS.items():
        setattr(full, own, getattr(decoder, field))
    full.share_encoder_decoder_embeddings = config.shares_embeddings
    return full


def make_args(config: LunaConfig) -> dict[str, Any]:
    """The args of a checkpoint for a configuration that the original can express, see `allowed`."""
    args = {
        "data": ".",
        "seed": 1,
        "no_save_optimizer_state": True,
        "task": "translation",
        "arch": f"luna_base_{'tied' if config.tie_key_value else 'untied'}",  # every size is below
        "criterion": "label_smoothed_cross_entropy",
        "label_smoothing": 0.1,
        "source_lang": "source",
        "target_lang": "target",
        "left_pad_source": "True",
        "left_pad_target": "False",
        "load_alignments": False,
        "truncate_source": False,
        "num_batch_buckets": 0,
        "max_source_positions": config.max_position_embeddings,
        "max_target_positions": config.decoder_config.max_position_embeddings,
        "projection_length": config.projection_length,
        "fix_projection_length": not config.dynamic_projection_length,
        "untie_luna_kv": not config.tie_key_value,
        "activation_fn": FAIRSEQ_ACTIVATIONS[config.hidden_act],
        "layernorm_embedding": config.embedding_norm,
        "no_scale_embedding": not config.scale_embedding,
        "no_token_positional_embeddings": config.position_embedding_type == "none",
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "word_dropout": config.word_dropout,
        "share_all_embeddings": config.shares_embeddings,
        "share_decoder_input_output_embed": config.tie_word_embeddings,
        "adaptive_softmax_cutoff": None,
        "adaptive_softmax_dropout": 0,
        "adaptive_input": False,
        "tie_adaptive_weights": False,
        "decoder_input_dim": config.hidden_size,
        "decoder_output_dim": config.hidden_size,
    }
    for side, part in (("encoder", config.encoder_config), ("decoder", config.decoder_config)):
        args |= {
            f"{side}_embed_path": None,
            f"{side}_layers": part.num_hidden_layers,
            f"{side}_embed_dim": part.hidden_size,
            f"{side}_ffn_embed_dim": part.intermediate_size,
            f"{side}_attention_heads": part.num_attention_heads,
            f"{side}_projected_attention_heads": part.num_pack_attention_heads,
            f"{side}_learned_pos": part.position_embedding_type == "learned",
            f"{side}_normalize_before": part.pre_norm,
            f"{side}_layerdrop": part.layerdrop,
            f"{side}_layers_to_keep": None,
        }
    return args
