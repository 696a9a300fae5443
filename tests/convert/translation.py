"""Small checkpoints of encoder-decoders in fairseq's layout, with the weights of models of this package."""

import argparse

import torch

from luna_mega import LunaForConditionalGeneration, LunaSeq2SeqConfig, MegaForConditionalGeneration, MegaSeq2SeqConfig
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
    "untied, other decoder": {"tie_word_embeddings": False, "decoder_position_embedding_type": "sinusoidal"}
    | {"num_decoder_layers": 1, "decoder_intermediate_size": 9, "num_decoder_attention_heads": 4}
    | {"num_decoder_pack_attention_heads": 1, "decoder_pre_norm": True, "scale_embedding": True},
    "no positions": {"position_embedding_type": "none", "scale_embedding": True, "num_pack_attention_heads": 4},
}
MEGA_KINDS = {
    "joint": {},
    "tied": {"share_encoder_decoder_embeddings": False},
    "two vocabularies": {"decoder_vocab_size": 14, "decoder_chunk_size": -1, "use_chunking": True, "chunk_size": 4},
    "untied, other decoder, simple": {"tie_word_embeddings": False, "relative_positional_bias": "simple"}
    | {"max_positions": 20, "decoder_max_positions": 30, "num_decoder_layers": 1, "decoder_intermediate_size": 9}
    | {"decoder_shared_representation_size": 5, "normalization_type": "scalenorm", "normalize_before_mega": True}
    | {"normalize_before_ffn": True, "final_norm": True, "ema_shift": True},
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

    The names are those of the converter; `tests/parity` converts files of the original.
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


def renamed(config, prefix="", **names):
    """Return args with values of a configuration: name of the arg -> name of the field."""
    return {f"{prefix}{name}": getattr(config, field) for name, field in names.items()}


# Args with the name of another field.
LUNA_SIDE = {"layers": "num_hidden_layers", "embed_dim": "hidden_size", "ffn_embed_dim": "intermediate_size"}
LUNA_SIDE |= {"attention_heads": "num_attention_heads", "projected_attention_heads": "num_pack_attention_heads"}
LUNA_SIDE |= {"normalize_before": "pre_norm", "layerdrop": "layerdrop"}
LUNA_ARGS = {"layernorm_embedding": "embedding_norm", "decoder_input_dim": "hidden_size"}
LUNA_ARGS |= {"decoder_output_dim": "hidden_size"}
LUNA_ARGS |= {x: x for x in ("projection_length", "dropout", "attention_dropout", "activation_dropout", "word_dropout")}
MEGA_SIDE = {"layers": "num_hidden_layers", "embed_dim": "hidden_size", "hidden_dim": "intermediate_size"}
MEGA_SIDE |= {"z_dim": "shared_representation_size", "n_dim": "ema_projection_size"}
MEGA_ARGS = {"truncation_length": "truncation", "rel_pos_bias": "relative_positional_bias"}
MEGA_ARGS |= {"activation_fn": "activation"}
MEGA_ARGS |= {"attention_activation_fn": "attention_activation", "normalization_type": "normalization_type"}
MEGA_ARGS |= {"normalize_before": "normalize_before_mega", "normalize_embedding": "embedding_norm"}
MEGA_ARGS |= {"feature_dropout": "use_feature_dropout", "dropout": "dropout_prob"}
MEGA_ARGS |= {"attention_dropout": "attention_probs_dropout_prob", "hidden_dropout": "hidden_dropout_prob"}
MEGA_ARGS |= {"activation_dropout": "nffn_activation_dropout_prob"}


def task_args(config):
    """Return the args of translation of both families."""
    args = {"task": "translation", "criterion": "label_smoothed_cross_entropy", "source_lang": "source"}
    args |= {"target_lang": "target", "no_scale_embedding": not config.scale_embedding}
    args |= {"share_all_embeddings": config.shares_embeddings}
    args |= {"share_decoder_input_output_embed": config.tie_word_embeddings}
    args |= renamed(config.encoder_config, max_source_positions="max_position_embeddings")
    return args | renamed(config.decoder_config, max_target_positions="max_position_embeddings")


def luna_args(config):
    args = task_args(config) | renamed(config, **LUNA_ARGS)
    args |= {
        "arch": f"luna_base_{'tied' if config.tie_key_value else 'untied'}",
        "untie_luna_kv": not config.tie_key_value,
    }
    args |= {"fix_projection_length": not config.dynamic_projection_length}
    args |= {"activation_fn": {"gelu_new": "gelu_accurate"}.get(config.hidden_act, config.hidden_act)}
    args |= {"no_token_positional_embeddings": config.position_embedding_type == "none"}
    for side, own in sides(config).items():
        args |= renamed(own, f"{side}_", **LUNA_SIDE)
        args[f"{side}_learned_pos"] = own.position_embedding_type == "learned"
    return args


def mega_args(config):
    args = task_args(config) | {"arch": "mega"} | renamed(config, **MEGA_ARGS)
    for side, own in sides(config).items():
        args |= renamed(own, f"{side}_", **MEGA_SIDE)
        args[f"{side}_ffn_embed_dim"] = own.nffn_hidden_size if own.use_normalized_ffn else 0
        args[f"{side}_chunk_size"] = own.attention_chunk or -1
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
