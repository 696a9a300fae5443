"""Small checkpoints of encoder-decoders in fairseq's layout, with the weights of models of this package."""

import argparse

import torch

from luna_mega import (
    LunaForConditionalGeneration,
    LunaSeq2SeqConfig,
    MegaForConditionalGeneration,
    MegaSeq2SeqConfig,
)
from luna_mega.convert.evidence import ModelSpec
from tests.convert.folders import find_format
from tests.convert.luna import sinusoids

SIZES = {"vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 12}
LUNA = SIZES | {"num_attention_heads": 2, "projection_length": 5, "max_position_embeddings": 20}
MEGA = SIZES | {"shared_representation_size": 6, "ema_projection_size": 3, "nffn_hidden_size": 10}
MEGA |= {"normalization_type": "layernorm", "normalize_before_mega": False, "normalize_before_ffn": False}
SINUSOIDAL = {"position_embedding_type": "sinusoidal", "embedding_norm": False}
LUNA_KINDS = {
    "joint, as WMT": SINUSOIDAL | {"hidden_act": "relu"},
    "tied, learned positions": {"share_encoder_decoder_embeddings": False, "max_target_positions": 11},
    "two vocabularies, pre-norm, fixed length": SINUSOIDAL
    | {"decoder_vocab_size": 14, "pre_norm": True, "tie_key_value": False, "dynamic_projection_length": False},
    "untied, other decoder": {
        "tie_word_embeddings": False,
        "decoder_position_embedding_type": "sinusoidal",
        "num_decoder_layers": 1,
        "decoder_intermediate_size": 9,
        "num_decoder_attention_heads": 4,
        "num_decoder_pack_attention_heads": 1,
        "decoder_pre_norm": True,
        "scale_embedding": True,
    },
    "no positions": {"position_embedding_type": "none", "scale_embedding": True, "num_pack_attention_heads": 4},
}
MEGA_KINDS = {
    "joint": {},
    "tied": {"share_encoder_decoder_embeddings": False},
    "two vocabularies": {"decoder_vocab_size": 14, "decoder_chunk_size": -1, "use_chunking": True, "chunk_size": 4},
    "untied, other decoder, simple": {
        "tie_word_embeddings": False,
        "relative_positional_bias": "simple",
        "max_positions": 20,
        "decoder_max_positions": 30,
        "num_decoder_layers": 1,
        "decoder_intermediate_size": 9,
        "decoder_shared_representation_size": 5,
        "normalization_type": "scalenorm",
        "normalize_before_mega": True,
        "normalize_before_ffn": True,
        "final_norm": True,
        "ema_shift": True,
    },
    "no ffn": {"use_normalized_ffn": False, "embedding_norm": True, "scale_embedding": True},
}


def luna_seq2seq(**fields):
    """Return a small Luna for translation."""
    torch.manual_seed(0)
    return LunaForConditionalGeneration(LunaSeq2SeqConfig(**LUNA | fields)).eval()


def mega_seq2seq(**fields):
    """Return a small Mega for translation."""
    torch.manual_seed(0)
    return MegaForConditionalGeneration(MegaSeq2SeqConfig(**MEGA | fields)).eval()


def checkpoint(model, **changes):
    """Return the dict that fairseq saves for a model, with these changes of its args.

    The names are those of the converter; `test_fixtures.py` converts files of the original.
    """
    config, luna = model.config, isinstance(model, LunaForConditionalGeneration)
    revision = "r21" if luna else "flash" if config.ema_shift else "main"
    keymap = find_format(config.model_type).keymap(ModelSpec(type(model), config, revision, None))
    named = {match.key: x for name, x in model.state_dict().items() if (match := keymap.backward(name))}
    return {
        "args": argparse.Namespace(**(luna_args if luna else mega_args)(config) | changes),
        "model": with_buffers(config, named),
        "optimizer_history": [{"num_updates": 0}],
    }


def sides(config):
    return {"encoder": config.encoder_config, "decoder": config.decoder_config}


def task_args(config):
    """Return the args of translation of both families."""
    return {
        "task": "translation",
        "criterion": "label_smoothed_cross_entropy",
        "source_lang": "source",
        "target_lang": "target",
        "share_all_embeddings": config.shares_embeddings,
        "share_decoder_input_output_embed": config.tie_word_embeddings,
        "no_scale_embedding": not config.scale_embedding,
        "max_source_positions": config.encoder_config.max_position_embeddings,
        "max_target_positions": config.decoder_config.max_position_embeddings,
    }


def luna_args(config):
    args = task_args(config) | {
        "arch": f"luna_base_{'tied' if config.tie_key_value else 'untied'}",
        "projection_length": config.projection_length,
        "fix_projection_length": not config.dynamic_projection_length,
        "untie_luna_kv": not config.tie_key_value,
        "activation_fn": {"gelu_new": "gelu_accurate"}.get(config.hidden_act, config.hidden_act),
        "layernorm_embedding": config.embedding_norm,
        "no_token_positional_embeddings": config.position_embedding_type == "none",
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "word_dropout": config.word_dropout,
        "decoder_input_dim": config.hidden_size,
        "decoder_output_dim": config.hidden_size,
    }
    for side, own in sides(config).items():
        args |= {
            f"{side}_layers": own.num_hidden_layers,
            f"{side}_embed_dim": own.hidden_size,
            f"{side}_ffn_embed_dim": own.intermediate_size,
            f"{side}_attention_heads": own.num_attention_heads,
            f"{side}_projected_attention_heads": own.num_pack_attention_heads,
            f"{side}_learned_pos": own.position_embedding_type == "learned",
            f"{side}_normalize_before": own.pre_norm,
            f"{side}_layerdrop": own.layerdrop,
        }
    return args


def mega_args(config):
    args = task_args(config) | {
        "arch": "mega",
        "truncation_length": config.truncation,
        "rel_pos_bias": config.relative_positional_bias,
        "activation_fn": config.activation,
        "attention_activation_fn": config.attention_activation,
        "normalization_type": config.normalization_type,
        "normalize_before": config.normalize_before_mega,
        "normalize_embedding": config.embedding_norm,
        "feature_dropout": config.use_feature_dropout,
        "dropout": config.dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "hidden_dropout": config.hidden_dropout_prob,
        "activation_dropout": config.nffn_activation_dropout_prob,
    }
    for side, own in sides(config).items():
        args |= {
            f"{side}_layers": own.num_hidden_layers,
            f"{side}_embed_dim": own.hidden_size,
            f"{side}_hidden_dim": own.intermediate_size,
            f"{side}_ffn_embed_dim": own.nffn_hidden_size if own.use_normalized_ffn else 0,
            f"{side}_z_dim": own.shared_representation_size,
            f"{side}_n_dim": own.ema_projection_size,
            f"{side}_chunk_size": own.attention_chunk or -1,
        }
    return args


def with_buffers(config, named):
    """Return the tensors with the buffers of the original that a model does not have."""
    tensors = {}
    for name, tensor in named.items():
        if config.model_type.startswith("mega") and name.endswith(".embed_tokens.weight"):
            tensors[f"{name.split('.')[0]}.version"] = torch.tensor([3.0])
        tensors[name] = tensor
        if name.endswith(".rel_pos_bias.beta"):
            tensors[f"{name.removesuffix('beta')}_float_tensor"] = torch.zeros(1)
    if config.model_type.startswith("luna"):
        for side, own in sides(config).items():
            if own.position_embedding_type == "sinusoidal":
                tensors[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
                if side == "encoder":
                    tensors["encoder.projected_positions"] = sinusoids(own.projection_length, own.hidden_size)
        tensors |= {f"{side}.version": torch.tensor([3.0]) for side in sides(config)}
    return tensors
