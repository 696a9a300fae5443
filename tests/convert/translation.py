"""Small checkpoints of encoder-decoders in fairseq's layout, with the weights of models of this package."""

import argparse

import torch

from luna_mega import (
    LunaForConditionalGeneration,
    LunaSeq2SeqConfig,
    MegaForConditionalGeneration,
    MegaSeq2SeqConfig,
)
from tests.convert.luna import sinusoids

SIZES = {"vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 12}
LUNA = SIZES | {"num_attention_heads": 2, "projection_length": 5, "max_position_embeddings": 20}
MEGA = SIZES | {"shared_representation_size": 6, "ema_projection_size": 3, "nffn_hidden_size": 10}
MEGA |= {"normalization_type": "layernorm", "normalize_before_mega": False, "normalize_before_ffn": False}
SINUSOIDAL = {"position_embedding_type": "sinusoidal", "embedding_norm": False}
# Names in the original -> in the model, in the original's order.
LUNA_ENCODER = {
    "projected_embeddings": "embeddings.packed_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "layernorm_embedding": "embeddings.layer_norm",
    "layernorm_porjected_embedding": "embeddings.packed_layer_norm",  # the spelling is the original's
}
LUNA_SIDE = {
    "embed_tokens": "embeddings.word_embeddings",
    "layer_norm": "{side}.layer_norm",
    "proj_layer_norm": "{side}.packed_layer_norm",
}
LUNA_DECODER = {
    "layernorm_embedding": "embeddings.layer_norm",
    "embed_positions": "embeddings.position_embeddings",
}
ATTENTION = {"pq_proj": "pack_query", "pc_proj": "pack_key_value", "pk_proj": "pack_key", "pv_proj": "pack_value"}
ATTENTION |= {"q_proj": "query", "c_proj": "key_value", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
CAUSAL_ATTENTION = {"pq_proj": "pack_query", "pc_proj": "pack_key"}
CAUSAL_ATTENTION |= {name: ATTENTION[name] for name in ("q_proj", "c_proj", "k_proj", "v_proj", "out_proj")}
LUNA_ENCODER_LAYER = {
    **{f"self_attn.{theirs}": f"attention.{ours}" for theirs, ours in ATTENTION.items()},
    "self_attn_layer_norm": "attention_layer_norm",
    "self_atten_proj_layer_norm": "packed_layer_norm",
    "final_layer_norm": "final_layer_norm",
    "fc1": "fc1",
    "fc2": "fc2",
}
LUNA_DECODER_LAYER = {
    **{f"self_attn.{theirs}": f"attention.{ours}" for theirs, ours in CAUSAL_ATTENTION.items()},
    **{f"encoder_attn.{theirs}": f"cross_attention.{ours}" for theirs, ours in ATTENTION.items()},
    "self_attn_layer_norm": "attention_layer_norm",
    "encoder_attn_layer_norm": "cross_attention_layer_norm",
    "encoder_atten_proj_layer_norm": "packed_layer_norm",
    "final_layer_norm": "final_layer_norm",
    "fc1": "fc1",
    "fc2": "fc2",
}
# Branch -> names of the two parameters that the branches swap, in its order.
EMA = {
    "main": {"delta": "damping_factor", "alpha": "decay_factor"},
    "flash": {"alpha": "damping_factor", "delta": "decay_factor"},
}
EMA_OF_BOTH = {"beta": "ema_expansion_matrix", "gamma": "kernel_projection_matrix", "omega": "residual_weight"}
BIAS = {"rel_pos_bias": "rel_pos_bias", "alpha": "alpha", "beta": "b_param"}


def luna_seq2seq(**fields):
    """Return a small Luna for translation."""
    torch.manual_seed(0)
    return LunaForConditionalGeneration(LunaSeq2SeqConfig(**LUNA | fields)).eval()


def mega_seq2seq(**fields):
    """Return a small Mega for translation."""
    torch.manual_seed(0)
    return MegaForConditionalGeneration(MegaSeq2SeqConfig(**MEGA | fields)).eval()


def checkpoint(model, **changes):
    """Return the dict that fairseq saves for a model, with these changes of its args."""
    luna = isinstance(model, LunaForConditionalGeneration)
    args, tensors = luna_args(model.config) if luna else mega_args(model.config), model.state_dict()
    named = {
        theirs + name.removeprefix(ours): tensor
        for theirs, ours in (luna_names if luna else mega_names)(model.config).items()
        for name, tensor in tensors.items()
        if name == ours or name.startswith(f"{ours}.")
    }
    return {
        "args": argparse.Namespace(**args | changes),
        "model": with_buffers(model.config, named),
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


def of_layers(side, model, count, layer):
    """Return the names of the layers of a side; `layer` has those of one layer."""
    return {
        f"{side}.layers.{index}.{theirs}": f"{model}.layers.{index}.{ours}"
        for index in range(count)
        for theirs, ours in layer.items()
    }


def luna_names(config):
    """Return name in the original -> name in the model of every tensor, or of the module that contains it."""

    def of_side(side, names):
        return {f"{side}.{theirs}": f"luna.{side}.{ours.format(side=side)}" for theirs, ours in names.items()}

    layers = {
        side: of_layers(side, f"luna.{side}.{side}", own.num_hidden_layers, layer)
        for (side, own), layer in zip(sides(config).items(), (LUNA_ENCODER_LAYER, LUNA_DECODER_LAYER), strict=True)
    }
    return {
        **of_side("encoder", LUNA_ENCODER),
        **layers["encoder"],
        **of_side("encoder", LUNA_SIDE),
        **of_side("decoder", LUNA_SIDE),
        **of_side("decoder", LUNA_DECODER),
        **layers["decoder"],
        "decoder.output_projection": "lm_head",
    }


def mega_names(config):
    """Return name in the original -> name in the model of every tensor, or of the module that contains it."""
    ema = EMA["flash" if config.ema_shift else "main"] | EMA_OF_BOTH
    attention = {
        "gamma": "qk_weight",
        "beta": "qk_bias",
        "norm": "norm",
        **{f"move.{theirs}": f"ema_gate.{ours}" for theirs, ours in ema.items()},
        **{name: name for name in ("v_proj", "mx_proj", "h_proj")},
        **{f"rel_pos_bias.{theirs}": f"rel_pos_bias.{ours}" for theirs, ours in BIAS.items()},
    }
    cross = {name: name for name in ("norm", "k_proj", "v_proj", "q_proj", "h_proj")}
    cross |= {f"rel_pos_bias.{theirs}": f"rel_pos_bias.{ours}" for theirs, ours in BIAS.items()}
    layer = {f"mega_layer.{theirs}": f"mega_layer.{ours}" for theirs, ours in attention.items()}
    layer |= {f"cross_attn.{theirs}": f"cross_attn.{ours}" for theirs, ours in cross.items()}
    layer |= {f"nffn.{name}": f"nffn.{name}" for name in ("norm", "fc1", "fc2")}
    names = {}
    for side, own in sides(config).items():
        model = f"mega.{side}"
        names |= {
            f"{side}.embed_tokens": f"{model}.embedding_layer.word_embeddings",
            f"{side}.embed_norm": f"{model}.embedding_norm",
            **of_layers(side, model, own.num_hidden_layers, layer),
            f"{side}.final_norm": f"{model}.final_norm",
        }
    return names | {"decoder.output_projection": "lm_head"}


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
