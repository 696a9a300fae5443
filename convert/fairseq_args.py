"""What the original code can express of a configuration, and its command line arguments for that."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega import (
    LunaConfig,
    LunaForConditionalGeneration,
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForSequenceClassification,
    LunaForSequencePairClassification,
    LunaModel,
    MegaConfig,
    MegaForCausalLM,
    MegaForConditionalGeneration,
    MegaForSequenceClassification,
    MegaForSequencePairClassification,
)
from luna_mega.convert import fairseq_args_luna_seq2seq as luna_seq2seq, fairseq_args_mega as mega
from luna_mega.convert.evidence import FAIRSEQ_ACTIVATIONS
from luna_mega.errors import ConversionError

LUNA_BERT, LRA_2021, LRA_2023 = ("luna_bert", "r21"), ("luna_lra", "r21"), ("luna_lra", "head")
LAYOUT_NAMES = {
    LUNA_BERT: "luna_bert",
    ("luna_bert", "head"): "luna_bert of the 2023 code",
    LRA_2021: "Luna LRA of the 2021 code",
    LRA_2023: "Luna LRA of the 2023 code",
    luna_seq2seq.LAYOUT: "Luna translation",
} | mega.LAYOUT_NAMES
_LAYOUTS_OF_CLASS = {
    LunaModel: (LUNA_BERT,),
    LunaForMaskedLM: (LUNA_BERT,),
    LunaForMultipleChoice: (LUNA_BERT,),
    LunaForSequenceClassification: (LUNA_BERT, LRA_2021, LRA_2023),
    LunaForSequencePairClassification: (LRA_2021, LRA_2023),
    LunaForConditionalGeneration: (luna_seq2seq.LAYOUT,),
} | mega.LAYOUTS_OF_CLASS
HEAD_OF_POOLING = {
    "cls": "sentence_classification_head",
    "packed_max": "pooling_classification_head",
    "packed_attention": "attention_classification_head",
}
_POOLING_OF_HEAD = {head: pooling for pooling, head in HEAD_OF_POOLING.items() if pooling != "cls"}
_TASKS = {
    LunaModel: "masked_lm",
    LunaForMaskedLM: "masked_lm",
    LunaForMultipleChoice: "sentence_ranking",
    LunaForSequenceClassification: "sentence_prediction",
}
# Sizes (layers, d, ffn, heads, positions, l) -> architecture. All sizes are in the args as well, so that an
# architecture of other sizes does where none has these.
_BERT_ARCHS = {
    (12, 768, 3072, 12, 2048, 256): "luna_base_2048",
    (24, 1024, 4096, 16, 512, 128): "luna_large_512",
    (24, 1024, 4096, 16, 512, 256): "luna_large_2048",
}
_LRA_ARCHS = {512: "luna_lra_listop", 256: "luna_lra_imdb", 128: "luna_lra_pf32", 64: "luna_lra_cifar10"}
# They change training and not what the model computes in evaluation.
TRAINING_FIELDS = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "word_dropout",
    "layerdrop",
    "classifier_dropout",
    "problem_type",
    *mega.TRAINING_FIELDS,
)
_HEAD_FIELDS = (
    "pooling",
    "pool_padding",
    "drop_first_token",
    "classifier_num_layers",
    "classifier_hidden_size",
    "classifier_activation",
    "classifier_dropout",
    "classifier_bias",
    "pair_features",
    "num_labels",
)


def has_classifier(model_class: type[PreTrainedModel]) -> bool:
    """Whether the class ends in a classification head (as opposed to the LM head or none)."""
    others = (LunaForConditionalGeneration, MegaForCausalLM, MegaForConditionalGeneration)
    return model_class not in (LunaModel, LunaForMaskedLM, *others)


def choose_layout(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], head: str | None, given: tuple[str, str] | None
) -> tuple[str, str]:
    """The (layout, revision) that can express the model.

    Args:
        head: name of the classification head, which fixes its kind; None = any kind.
        given: the one that the model was converted from; no other is tried.

    Raises:
        ConversionError: none can; the message names the fields.
    """
    layouts = _LAYOUTS_OF_CLASS.get(model_class, ())
    if given is not None:
        layouts = (given,) if given[0] in {name for name, _ in layouts} else ()
    if not layouts:
        name = LAYOUT_NAMES[given] if given else "the fairseq code"
        way_out = "to export the encoder alone, load the folder as LunaModel and save that"
        if isinstance(config, MegaConfig):
            way_out = f"what can be exported are {', '.join(cls.__name__ for cls in mega.LAYOUTS_OF_CLASS)}"
        raise ConversionError(f"{name} has no head like that of {model_class.__name__}; {way_out}")
    problems = {layout: list(_problems(config, model_class, layout, head)) for layout in layouts}
    layout = min(layouts, key=lambda layout: len(problems[layout]))
    if problems[layout]:
        raise ConversionError(f"{LAYOUT_NAMES[layout]} cannot express {'; '.join(problems[layout])}")
    return layout


def _problems(config, model_class, layout, head) -> Iterator[str]:
    for field, allowed in _allowed(config, model_class, layout, head).items():
        value = getattr(config, field)
        if value not in allowed:
            yield f"{field} = {value!r} (it has {' or '.join(map(repr, allowed))})"


def _allowed(config, model_class, layout, head) -> dict[str, tuple]:
    """Field -> the values that the layout has for it; fields that may have any value are not listed."""
    if isinstance(config, MegaConfig):
        return mega.allowed(config, model_class, layout)
    if layout == luna_seq2seq.LAYOUT:
        return luna_seq2seq.allowed(config)
    # `tanh` left the 2023 code and `silu` came; files of the time between have either.
    activations = tuple(name for name in FAIRSEQ_ACTIVATIONS if layout[1] == "head" or name != "silu")
    allowed = {
        "hidden_act": activations,
        "num_pack_attention_heads": (config.num_attention_heads,),
        "contextual_projection": (True,),
        "pre_norm": (False,),
        "layer_norm_eps": (1e-5,),
        "scale_embedding": (config.position_embedding_type == "sinusoidal",),
    }
    if config.input_type == "tokens":
        allowed |= {"pad_token_id": (1,), "bos_token_id": (0, None), "eos_token_id": (2, None)}
    if layout != LRA_2023:
        allowed |= {"input_type": ("tokens",), "position_embedding_type": ("learned",), "embedding_norm": (True,)}
    else:
        allowed["position_embedding_type"] = ("learned", "sinusoidal")
    if layout[0] == "luna_bert":
        allowed["share_layers"] = (False,)
        if model_class is LunaForMultipleChoice:
            allowed["classifier_hidden_size"] = (config.hidden_size,)
        return allowed | (_bert_head(head, activations) if has_classifier(model_class) else {})
    allowed |= {"dynamic_projection_length": (True,), "classifier_bias": (False,)}
    if layout == LRA_2023:
        return allowed | _lra_2023_head(config, model_class)
    return allowed | _lra_2021_head(config, model_class, activations)


def _bert_head(head: str | None, activations: tuple[str, ...]) -> dict[str, tuple]:
    return {
        "pooling": tuple(HEAD_OF_POOLING) if head is None else (_POOLING_OF_HEAD.get(head, "cls"),),
        "pool_padding": (False,),
        "drop_first_token": (False,),
        "classifier_num_layers": (1,),
        "classifier_bias": (True,),
        "classifier_activation": activations,
    }


def _lra_2021_head(config: LunaConfig, model_class: type, activations: tuple[str, ...]) -> dict[str, tuple]:
    pair = model_class is LunaForSequencePairClassification
    return {
        "pooling": ("cls", "mean", "packed_mean"),
        "pool_padding": (config.pooling != "cls",),
        "drop_first_token": (config.pooling == "packed_mean",),
        "classifier_num_layers": (config.classifier_num_layers or 1,),
        "classifier_activation": activations,
        "pair_features": ("concat",) if pair else (config.pair_features,),
    }


def _lra_2023_head(config: LunaConfig, model_class: type) -> dict[str, tuple]:
    allowed = {
        "pooling": ("cls", "mean", "packed_mean") if config.input_type == "tokens" else ("mean", "packed_mean"),
        "pool_padding": (config.pooling == "packed_mean",),
        "drop_first_token": (False,),
        "classifier_num_layers": (0, 1),
    }
    if config.classifier_num_layers:
        allowed |= {"classifier_activation": ("gelu",), "classifier_hidden_size": (config.hidden_size,)}
    if model_class is LunaForSequencePairClassification:
        allowed["pair_features"] = ("interaction",)
    return allowed


def make_args(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], layout: tuple[str, str], head: str | None
) -> dict[str, Any]:
    """The args of a checkpoint of `layout` for a configuration that it can express, see `choose_layout`."""
    if isinstance(config, MegaConfig):
        return mega.make_args(config, model_class)
    if layout == luna_seq2seq.LAYOUT:
        return luna_seq2seq.make_args(config)
    args = {
        "data": ".",
        "seed": 1,
        "no_save_optimizer_state": True,
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_attention_heads,
        "max_positions": config.max_position_embeddings,
        "tokens_per_sample": config.max_position_embeddings,
        "activation_fn": FAIRSEQ_ACTIVATIONS[config.hidden_act],
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
    }
    if layout[1] == "head":
        args["stop_min_lr"] = -1  # the option by which the 2023 code is known
    if layout[0] == "luna_bert":
        return args | _bert_args(config, model_class, head)
    return args | _lra_args(config, model_class, layout)


def _bert_args(config: LunaConfig, model_class: type, head: str | None) -> dict[str, Any]:
    sizes = (
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.max_position_embeddings,
        config.projection_length,
    )
    task = _TASKS[model_class]
    if head is not None and config.classifier_hidden_size != config.hidden_size:
        task = "masked_lm"  # the other tasks build a head of width d before the file is read
    args = {
        "arch": _BERT_ARCHS.get(sizes, f"luna_base_{'tied' if config.tie_key_value else 'untied'}_512"),
        "task": task,
        "criterion": task,
        "projection_length": config.projection_length,
        "fix_projection_length": not config.dynamic_projection_length,
        "untie_luna_kv": not config.tie_key_value,
        "untie_weights_luna": not config.tie_word_embeddings,
        "activation_dropout": config.activation_dropout,
        "encoder_layerdrop": config.layerdrop,
    }
    if head is None:
        return args
    args |= {
        "pooler_activation_fn": FAIRSEQ_ACTIVATIONS[config.classifier_activation],
        "pooler_dropout": config.classifier_dropout,
    }
    if task == "sentence_ranking":  # its num_classes is the number of options, which the model does not know
        return args | {"ranking_head_name": head}
    return args | {
        "num_classes": config.num_labels,
        "regression_target": problem_type(config) == "regression",
        "classification_head_name": head,
    }


def _lra_args(config: LunaConfig, model_class: type, layout: tuple[str, str]) -> dict[str, Any]:
    pair = model_class is LunaForSequencePairClassification
    image = config.input_type == "values"
    args = {
        "arch": "luna_lra_aan" if pair else _LRA_ARCHS.get(config.hidden_size, "luna_lra_imdb"),
        "criterion": "lra_cross_entropy",
        "layer_type": "luna",
        "encoder_projection_length": config.projection_length,
        "act_dropout": config.activation_dropout,
        "tie_kv": config.tie_key_value,
        "tie_layer_weights": config.share_layers,
        "encoder_learned_pos": config.position_embedding_type == "learned",
        "encoder_normalize_before": config.embedding_norm,
        "sentence_class_num": config.num_labels,
        "sen_rep_type": "mp" if config.pooling == "mean" or image else "cls",
        "use_p": config.pooling == "packed_mean",
        "regression_target": False,
    }
    if layout == LRA_2021:
        return args | {
            "task": "long_range_arena",
            "classifier_layers": config.classifier_num_layers,
            "classifier_in_dim": (2 if pair else 1) * config.hidden_size,
            "classifier_out_dim": config.classifier_hidden_size,
            "classifier_activation_fn": FAIRSEQ_ACTIVATIONS[config.classifier_activation],
        }
    return args | {
        "task": "lra-image" if image else "lra-text",
        "input_type": "image" if image else "text",
        "classifier_in_dim": (4 if pair else 1) * config.hidden_size,
        "pre_logits": config.classifier_num_layers == 1,
    }


def problem_type(config: PreTrainedConfig) -> str:
    """`config.problem_type`, where it is not set as transformers guesses it."""
    return config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")


def differences(
    config: PreTrainedConfig, planned: PreTrainedConfig, model_class: type[PreTrainedModel]
) -> list[tuple[str, Any, Any]]:
    """(field, `config`'s, `planned`'s) of all fields that the class uses and in which the two differ."""
    ignored = {"initializer_range", "bos_token_id", "eos_token_id", "sparse_prediction", "unpad_inputs", "use_cache"}
    if config.input_type == "values":
        ignored |= {"vocab_size", "pad_token_id"}
    if not has_classifier(model_class):
        ignored |= set(_HEAD_FIELDS)
    if model_class is LunaForMultipleChoice:
        ignored |= {"num_labels", "drop_first_token"}
    if isinstance(config, MegaConfig):
        ignored |= mega.unused_fields(config, model_class)
        config, planned = mega.seq2seq.resolved(config), mega.seq2seq.resolved(planned)
    elif config.is_encoder_decoder:
        config, planned = luna_seq2seq.resolved(config), luna_seq2seq.resolved(planned)
    if model_class not in (LunaForSequencePairClassification, MegaForSequencePairClassification):
        ignored.add("pair_features")
    if config.classifier_num_layers == 0:
        ignored |= {"classifier_hidden_size", "classifier_activation"}
    fields = [field for field in (*type(config).__annotations__, "num_labels") if field not in ignored]
    pairs = [(field, getattr(config, field), getattr(planned, field)) for field in fields]
    if model_class in (LunaForSequenceClassification, MegaForSequenceClassification):
        pairs.append(("problem_type", problem_type(config), problem_type(planned)))
    return [(field, ours, theirs) for field, ours, theirs in pairs if ours != theirs]
