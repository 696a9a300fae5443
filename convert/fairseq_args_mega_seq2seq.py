"""What the original Mega code for translation can express of a configuration, and its arguments for that."""

import copy
from typing import Any

from luna_mega import MegaConfig
from luna_mega.convert.evidence import FAIRSEQ_ACTIVATIONS
from luna_mega.modeling_mega.configuration_mega import DECODER_FIELDS

MAIN, FLASH = ("mega_seq2seq", "main"), ("mega_seq2seq", "flash")


def allowed(config: MegaConfig, layout: tuple[str, str]) -> dict[str, tuple]:
    """Field -> the values that the layout has for it, beside what all Mega layouts have in common."""
    longest = max(config.max_positions, config.decoder_config.max_positions)
    fields = {
        "bidirectional": (True,),
        "ema_shift": (layout == FLASH,),
        "eos_token_id": (2, None),
        "decoder_start_token_id": (2,),
    }
    if config.final_norm:
        fields["final_norm_affine"] = (True,)
    if config.relative_positional_bias == "simple":
        fields["cross_attention_positions"] = (None, longest)
    return fields


def resolved(config: MegaConfig) -> MegaConfig:
    """The same configuration with a value in every field of the decoder."""
    if not config.is_encoder_decoder:
        return config
    full, decoder = copy.deepcopy(config), config.decoder_config
    for own, field in DECODER_FIELDS.items():
        setattr(full, own, getattr(decoder, field))
    full.decoder_chunk_size = decoder.attention_chunk or -1
    full.cross_attention_positions = config.cross_positions if config.relative_positional_bias == "simple" else None
    full.share_encoder_decoder_embeddings = config.shares_embeddings
    return full


def unused_fields(config: MegaConfig) -> set[str]:
    """Fields of the decoder that a model of this configuration does not read."""
    return set() if config.use_normalized_ffn else {"decoder_nffn_hidden_size"}


def make_args(config: MegaConfig) -> dict[str, Any]:
    """The args of a checkpoint for a configuration that the original can express, see `allowed`."""
    args = {
        "data": ".",
        "seed": 1,
        "no_save_optimizer_state": True,
        "task": "translation",
        "arch": "mega",  # every size is below
        "criterion": "label_smoothed_cross_entropy",
        "label_smoothing": 0.1,
        "source_lang": "source",
        "target_lang": "target",
        "left_pad_source": "True",
        "left_pad_target": "False",
        "load_alignments": False,
        "truncate_source": False,
        "num_batch_buckets": 0,
        "max_source_positions": config.max_positions,
        "max_target_positions": config.decoder_config.max_positions,
        "truncation_length": config.truncation,
        "rel_pos_bias": config.relative_positional_bias,
        "activation_fn": FAIRSEQ_ACTIVATIONS[config.activation],
        "attention_activation_fn": config.attention_activation,
        "normalization_type": config.normalization_type,
        "normalize_before": config.normalize_before_mega,
        "normalize_embedding": config.embedding_norm,
        "no_scale_embedding": not config.scale_embedding,
        "feature_dropout": config.use_feature_dropout,
        "dropout": config.dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "hidden_dropout": config.hidden_dropout_prob,
        "activation_dropout": config.nffn_activation_dropout_prob,
        "share_all_embeddings": config.shares_embeddings,
        "share_decoder_input_output_embed": config.tie_word_embeddings,
        "adaptive_softmax_cutoff": None,
        "adaptive_softmax_dropout": 0,
        "adaptive_input": False,
        "tie_adaptive_weights": False,
    }
    for side, part in (("encoder", config.encoder_config), ("decoder", config.decoder_config)):
        args |= {
            f"{side}_embed_path": None,
            f"{side}_layers": part.num_hidden_layers,
            f"{side}_embed_dim": part.hidden_size,
            f"{side}_hidden_dim": part.intermediate_size,
            f"{side}_ffn_embed_dim": part.nffn_hidden_size if part.use_normalized_ffn else 0,
            f"{side}_z_dim": part.shared_representation_size,
            f"{side}_n_dim": part.ema_projection_size,
            f"{side}_chunk_size": part.attention_chunk or -1,
        }
    return args
