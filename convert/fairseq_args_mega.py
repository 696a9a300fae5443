"""What the original Mega code can express of a configuration, and its arguments for that."""

from typing import Any

from transformers import PreTrainedModel

from luna_mega import (
    MegaConfig,
    MegaForCausalLM,
    MegaForConditionalGeneration,
    MegaForSequenceClassification,
    MegaForSequencePairClassification,
)
from luna_mega.convert import fairseq_args_mega_seq2seq as seq2seq
from luna_mega.convert.evidence import FAIRSEQ_ACTIVATIONS

MAIN, FLASH = ("mega_lra", "main"), ("mega_lra", "flash")
LM_MAIN, LM_FLASH = ("mega_lm", "main"), ("mega_lm", "flash")
LAYOUT_NAMES = {
    MAIN: "Mega LRA of branch main",
    FLASH: "Mega LRA of branch flash",
    LM_MAIN: "Mega LM of branch main",
    LM_FLASH: "Mega LM of branch flash",
    seq2seq.MAIN: "Mega translation of branch main",
    seq2seq.FLASH: "Mega translation of branch flash",
}
LAYOUTS_OF_CLASS = {
    MegaForCausalLM: (LM_MAIN, LM_FLASH),
    MegaForConditionalGeneration: (seq2seq.MAIN, seq2seq.FLASH),
    MegaForSequenceClassification: (MAIN, FLASH),
    MegaForSequencePairClassification: (MAIN, FLASH),
}
# Width d -> architecture. All sizes are in the args as well, so that an architecture of other sizes does where none
# has these.
_TEXT_ARCHS = {80: "mega_lra_listop"}
_IMAGE_ARCHS = {64: "mega_lra_pf128", 128: "mega_lra_pf32"}
_SPEECH_ARCHS = {60: "mega_sc_raw_base", 72: "mega_sc_raw_big"}
TRAINING_FIELDS = (
    "dropout_prob",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "nffn_activation_dropout_prob",
    "use_feature_dropout",
    "padded_batch_statistics",
    "adaptive_softmax_dropout",
    "legacy_adaptive_loss",
)
# They are of other heads, of initialisation, or without effect.
_UNUSED_FIELDS = {
    "ema_beta_range",
    "ema_delta_alpha_range",
    "ema_gamma_omega_range",
    "sparse_prediction",
    "type_vocab_size",
    "unpad_inputs",
    "use_cache",
}
_FIELDS_OF_LM = {
    "add_lm_hidden_dense_layer",
    "lm_head_bias",
    "tie_word_embeddings",
    "adaptive_softmax_cutoffs",
    "adaptive_softmax_factor",
    "adaptive_softmax_dropout",
    "tie_adaptive_projections",
    "legacy_adaptive_loss",
}


def allowed(config: MegaConfig, model_class: type[PreTrainedModel], layout: tuple[str, str]) -> dict[str, tuple]:
    """Field -> the values that the layout has for it; fields that may have any value are not listed."""
    before, tokens = config.normalize_before_mega, config.input_type == "tokens"
    activations = tuple(name for name in FAIRSEQ_ACTIVATIONS if name != "tanh")
    fields = {
        "activation": activations,
        "normalize_before_ffn": (before,),
        "final_norm": (before,),
        "embedding_norm": (False,) if before else (False, True),
        "norm_affine": (True,),
        "legacy_rms_norm": (False,),
        "legacy_bias_table": (False,),
        "add_token_type_embeddings": (False,),
    }
    if tokens:
        fields["pad_token_id"] = (1,)
    if model_class is MegaForCausalLM:
        return fields | _of_language_model(config)
    if model_class is MegaForConditionalGeneration:
        return fields | seq2seq.allowed(config, layout)
    fields |= {
        "bidirectional": (True,),
        "ema_shift": (layout == FLASH,),
        "final_norm_affine": (True,),
        "scale_embedding": (False,),
        "embedding_size": (config.hidden_size,),
        "adaptive_input_cutoffs": (None,),
        "pooling": ("cls", "mean") if tokens else ("mean",),
        "classifier_bias": (False,),
    }
    if tokens:
        fields |= {"bos_token_id": (0, None), "eos_token_id": (2, None)}
    if config.classifier_num_layers:
        fields["classifier_activation"] = activations
    if model_class is MegaForSequencePairClassification:
        fields |= {"pair_features": ("concat",), "input_type": ("tokens",)}
    return fields


def _of_language_model(config: MegaConfig) -> dict[str, tuple]:
    fields = {"add_lm_hidden_dense_layer": (False,), "lm_head_bias": (False,), "eos_token_id": (2, None)}
    if config.adaptive_softmax_cutoffs is None and config.tie_word_embeddings:
        fields |= {"embedding_size": (config.hidden_size,), "adaptive_input_cutoffs": (None,)}
    if not config.final_norm:
        fields["final_norm_affine"] = (True, False)
    return fields


def make_args(config: MegaConfig, model_class: type[PreTrainedModel]) -> dict[str, Any]:
    """The args of a checkpoint for a configuration that the original can express, see `allowed`."""
    if model_class is MegaForCausalLM:
        return _lm_args(config)
    if model_class is MegaForConditionalGeneration:
        return seq2seq.make_args(config)
    pair = model_class is MegaForSequencePairClassification
    in_features = (2 if pair else 1) * config.hidden_size
    args = {
        "data": ".",
        "seed": 1,
        "no_save_optimizer_state": True,
        "criterion": "lra_cross_entropy",
        "layer_type": "mega",
        "apply_bert_init": False,
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_hidden_dim": config.intermediate_size,
        "encoder_ffn_embed_dim": config.nffn_hidden_size if config.use_normalized_ffn else 0,
        "z_dim": config.shared_representation_size,
        "n_dim": config.ema_projection_size,
        "chunk_size": config.attention_chunk or -1,
        "truncation_length": config.truncation,
        "rel_pos_bias": config.relative_positional_bias,
        "max_positions": config.max_positions,
        "tokens_per_sample": config.max_positions,
        "activation_fn": FAIRSEQ_ACTIVATIONS[config.activation],
        "attention_activation_fn": config.attention_activation,
        "norm_type": config.normalization_type,
        "encoder_normalize_before": config.normalize_before_mega,
        "normalize_embedding": config.embedding_norm,
        "feature_dropout": config.use_feature_dropout,
        "dropout": config.dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "act_dropout": config.hidden_dropout_prob,
        "sentence_class_num": config.num_labels,
        "sen_rep_type": "cls" if config.pooling == "cls" else "mp",
        "classifier_layers": config.classifier_num_layers,
        "classifier_in_dim": in_features,
        "classifier_out_dim": config.classifier_hidden_size if config.classifier_num_layers else in_features,
        "classifier_activation_fn": FAIRSEQ_ACTIVATIONS.get(config.classifier_activation, "gelu"),
        "use_p": False,
        "regression_target": False,
    }
    if config.input_type == "tokens":
        arch = "mega_lra_aan" if pair else _TEXT_ARCHS.get(config.hidden_size, "mega_lra_imdb")
        return args | {"arch": arch, "task": "lra-text", "input_type": "text"}
    # The code for speech always has a classifier layer, and no norm on the embeddings.
    if config.hidden_size in _SPEECH_ARCHS and config.classifier_num_layers and not config.embedding_norm:
        return args | {"arch": _SPEECH_ARCHS[config.hidden_size], "task": "speech_commands"}
    arch = _IMAGE_ARCHS.get(config.hidden_size, "mega_lra_cifar10")
    return args | {"arch": arch, "task": "lra-image", "input_type": "image"}


def _lm_args(config: MegaConfig) -> dict[str, Any]:
    ffn, tied = config.nffn_hidden_size if config.use_normalized_ffn else 0, config.tie_word_embeddings
    adaptive = config.adaptive_softmax_cutoffs is not None
    softmax_factor = config.adaptive_input_factor if tied else config.adaptive_softmax_factor
    return {
        "data": ".",
        "seed": 1,
        "no_save_optimizer_state": True,
        "task": "language_modeling",
        "arch": "mega_lm_adaptive_big" if adaptive else "mega_lm",  # every size is below
        "criterion": "adaptive_loss" if adaptive else "cross_entropy",
        "sample_break_mode": "complete",
        "tokens_per_sample": config.max_positions,
        "max_target_positions": config.max_positions,
        "output_dictionary_size": -1,
        "self_target": False,
        "future_target": False,
        "past_target": False,
        "add_bos_token": False,
        "shorten_method": "none",
        "shorten_data_split_list": "",
        "variant_block_multiple_min": 1,
        "variant_block_multiple_max": 1,
        "valid_block": "splits:10",
        "decoder_layers": config.num_hidden_layers,
        "decoder_embed_dim": config.hidden_size,
        "decoder_input_dim": config.embedding_size,
        "decoder_hidden_dim": config.intermediate_size,
        "decoder_ffn_embed_dim": ffn,
        "decoder_z_dim": config.shared_representation_size,
        "decoder_n_dim": config.ema_projection_size,
        "decoder_chunk_size": config.attention_chunk or -1,
        "decoder_embed_path": None,
        "truncation_length": config.truncation,
        "rel_pos_bias": config.relative_positional_bias,
        "activation_fn": FAIRSEQ_ACTIVATIONS[config.activation],
        "attention_activation_fn": config.attention_activation,
        "normalization_type": config.normalization_type,
        "normalize_before": config.normalize_before_mega,
        "normalize_embedding": config.embedding_norm,
        "no_affine_final_norm": not config.final_norm_affine,
        "no_scale_embedding": not config.scale_embedding,
        "feature_dropout": config.use_feature_dropout,
        "dropout": config.dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "hidden_dropout": config.hidden_dropout_prob,
        "activation_dropout": config.nffn_activation_dropout_prob,
        "share_decoder_input_output_embed": tied and not adaptive,
        "share_all_embeddings": False,
        "adaptive_input": config.adaptive_input_cutoffs is not None,
        "adaptive_input_cutoff": _listed(config.adaptive_input_cutoffs),
        "adaptive_input_factor": config.adaptive_input_factor,
        "adaptive_softmax_cutoff": _listed(config.adaptive_softmax_cutoffs),
        "adaptive_softmax_factor": softmax_factor,
        "adaptive_softmax_dropout": config.adaptive_softmax_dropout,
        "tie_adaptive_weights": tied and adaptive,
        "tie_adaptive_proj": config.tie_adaptive_projections,
    }


def _listed(cutoffs: list[int] | None) -> str | None:
    return None if cutoffs is None else ",".join(map(str, cutoffs))


def unused_fields(config: MegaConfig, model_class: type[PreTrainedModel]) -> set[str]:
    """Fields that a model of this configuration does not read."""
    unused = set(_UNUSED_FIELDS)
    if model_class is not MegaForCausalLM:
        unused |= _FIELDS_OF_LM
    if model_class is MegaForConditionalGeneration:
        unused = unused - {"tie_word_embeddings"} | seq2seq.unused_fields(config)
    if config.adaptive_input_cutoffs is None:
        unused.add("adaptive_input_factor")
    if config.adaptive_softmax_cutoffs is None:
        unused |= {"adaptive_softmax_factor", "adaptive_softmax_dropout", "legacy_adaptive_loss"}
    if config.tie_word_embeddings:
        unused.add("adaptive_softmax_factor")
    if not config.final_norm:
        unused.add("final_norm_affine")
    if not config.use_chunking:
        unused.add("chunk_size")
    if not config.use_normalized_ffn:
        unused |= {"nffn_hidden_size", "nffn_activation_dropout_prob", "normalize_before_ffn"}
    return unused
