"""What the original Mega code for LRA and raw speech can express of a configuration, and its arguments for that."""

from typing import Any

from transformers import PreTrainedModel

from luna_mega import MegaConfig, MegaForSequenceClassification, MegaForSequencePairClassification
from luna_mega.convert.evidence import FAIRSEQ_ACTIVATIONS

MAIN, FLASH = ("mega_lra", "main"), ("mega_lra", "flash")
LAYOUT_NAMES = {MAIN: "Mega LRA of branch main", FLASH: "Mega LRA of branch flash"}
LAYOUTS_OF_CLASS = {
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
)
# They are of other heads, of initialisation, or without effect.
_UNUSED_FIELDS = {
    "add_lm_hidden_dense_layer",
    "ema_beta_range",
    "ema_delta_alpha_range",
    "ema_gamma_omega_range",
    "sparse_prediction",
    "tie_word_embeddings",
    "type_vocab_size",
    "use_cache",
}


def allowed(config: MegaConfig, model_class: type[PreTrainedModel], layout: tuple[str, str]) -> dict[str, tuple]:
    """Field -> the values that the layout has for it; fields that may have any value are not listed."""
    before, tokens = config.normalize_before_mega, config.input_type == "tokens"
    activations = tuple(name for name in FAIRSEQ_ACTIVATIONS if name != "tanh")
    fields = {
        "bidirectional": (True,),
        "ema_shift": (layout == FLASH,),
        "activation": activations,
        "normalize_before_ffn": (before,),
        "final_norm": (before,),
        "embedding_norm": (False,) if before else (False, True),
        "norm_affine": (True,),
        "final_norm_affine": (True,),
        "legacy_rms_norm": (False,),
        "legacy_bias_table": (False,),
        "scale_embedding": (False,),
        "add_token_type_embeddings": (False,),
        "pooling": ("cls", "mean") if tokens else ("mean",),
        "classifier_bias": (False,),
    }
    if tokens:
        fields |= {"pad_token_id": (1,), "bos_token_id": (0, None), "eos_token_id": (2, None)}
    if config.classifier_num_layers:
        fields["classifier_activation"] = activations
    if model_class is MegaForSequencePairClassification:
        fields |= {"pair_features": ("concat",), "input_type": ("tokens",)}
    return fields


def make_args(config: MegaConfig, model_class: type[PreTrainedModel]) -> dict[str, Any]:
    """The args of a checkpoint for a configuration that the original can express, see `allowed`."""
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


def unused_fields(config: MegaConfig) -> set[str]:
    """Fields that a model of this configuration does not read."""
    unused = set(_UNUSED_FIELDS)
    if not config.use_chunking:
        unused.add("chunk_size")
    if not config.use_normalized_ffn:
        unused |= {"nffn_hidden_size", "nffn_activation_dropout_prob", "normalize_before_ffn"}
    return unused
