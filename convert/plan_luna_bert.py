"""Plans the conversion of a luna_bert checkpoint: masked LM, or one of its classification heads."""

import re

from luna_mega import LunaConfig, LunaForMaskedLM, LunaForMultipleChoice, LunaForSequenceClassification
from luna_mega.convert import keymap_luna
from luna_mega.convert.evidence import Evidence, same_bits
from luna_mega.convert.plan import Plan, build_config
from luna_mega.convert.source_detect import Source
from luna_mega.errors import ConversionError

_BODY = "encoder.sentence_encoder"
_DEFAULTS = {
    "fix_projection_length": False,
    "activation_fn": "gelu",
    "pooler_activation_fn": "tanh",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.0,
    "pooler_dropout": 0.0,
    "encoder_layerdrop": 0.0,
}
_ATTENTION_HEADS = {
    "luna_bert": 12,
    "luna_base_512": 12,
    "luna_base_tied_512": 12,
    "luna_base_untied_512": 12,
    "luna_base_2048": 12,
    "luna_large_512": 16,
    "luna_large_2048": 16,
}
_RANKING_TASKS = ("sentence_ranking", "commonsense_qa")
_FINE_TUNING_TASKS = ("sentence_prediction", *_RANKING_TASKS)
_POOLING = {"pooling_classification_head": "packed_max", "attention_classification_head": "packed_attention"}


def plan_luna_bert(source: Source, tensors: dict, args: dict, head: str | None) -> Plan:
    """The plan for a luna_bert file.

    Args:
        head: name of the classification head to convert; None = the only head of a fine-tuned model, else masked LM.

    Raises:
        ConversionError: args and tensors contradict each other, or the file has no head `head`.
    """
    defaults = _DEFAULTS | {"encoder_attention_heads": _ATTENTION_HEADS.get(source.arch)}
    evidence = Evidence(tensors, args, defaults)
    names = sorted({key.split(".")[1] for key in tensors if key.startswith("classification_heads.")})
    for name in names:
        if not re.fullmatch(r"[\w-]+", name):
            raise ConversionError(f"classification head {name!r}: a name has letters, digits, '_' and '-' only")
    head = _choose_head(names, args, head)
    fields = _encoder_fields(evidence)
    fields["tie_word_embeddings"] = _tied_lm(evidence)
    model_class = LunaForMaskedLM
    if head is not None:
        model_class, head_fields = _head(evidence, head)
        fields |= head_fields
    return Plan(
        model_class,
        build_config(LunaConfig, **fields),
        keymap_luna.luna_bert(head, tuple(name for name in names if name != head)),
        appended_symbol="<mask>",
        num_labels=fields.get("num_labels"),
        also_loads=() if head is None else (LunaForMaskedLM,),
        decisions={
            "head": head,
            "tie_key_value": fields["tie_key_value"],
            "tie_word_embeddings": fields["tie_word_embeddings"],
            "dynamic_projection_length": fields["dynamic_projection_length"],
        },
        notes=[] if head is None else ["the LM head is kept: AutoModelForMaskedLM loads from the same folder"],
        warnings=evidence.warnings,
    )


def _choose_head(names: list[str], args: dict, requested: str | None) -> str | None:
    if requested is not None and requested not in names:
        has = f"has {', '.join(names)}" if names else "has no classification head"
        raise ConversionError(f"--head {requested}: the file {has}")
    if requested is None and args.get("task") in _FINE_TUNING_TASKS and len(names) == 1:
        return names[0]
    return requested


def _encoder_fields(evidence: Evidence) -> dict:
    vocab_size, width = evidence.shape(f"{_BODY}.embed_tokens.weight", "vocabulary", "width")
    positions, _ = evidence.shape(f"{_BODY}.embed_positions.weight", "positions + 2", "width")
    packed, _ = evidence.shape(f"{_BODY}.projected_embeddings", "projection length", "width")
    ffn, _ = evidence.shape(f"{_BODY}.layers.0.fc1.weight", "ffn width", "width")
    tied = evidence.tied_key_value()
    evidence.prefer("untie_luna_kv", not tied)
    return {
        "vocab_size": vocab_size,
        "hidden_size": evidence.prefer("encoder_embed_dim", width),
        "num_hidden_layers": evidence.unshared_layers(f"{_BODY}.layers"),
        "num_attention_heads": evidence.arg("encoder_attention_heads"),
        "intermediate_size": evidence.prefer("encoder_ffn_embed_dim", ffn),
        "projection_length": evidence.prefer("projection_length", packed),
        "dynamic_projection_length": not evidence.arg("fix_projection_length"),
        "tie_key_value": tied,
        "hidden_act": evidence.activation("activation_fn"),
        "dropout": evidence.arg("dropout"),
        "attention_dropout": evidence.arg("attention_dropout"),
        "activation_dropout": evidence.arg("activation_dropout"),
        "layerdrop": evidence.arg("encoder_layerdrop"),
        "max_position_embeddings": evidence.prefer("max_positions", positions - 2),  # 2: padding and the row before it
        "classifier_activation": evidence.activation("pooler_activation_fn"),
        "classifier_dropout": evidence.arg("pooler_dropout"),
    }


def _tied_lm(evidence: Evidence) -> bool:
    evidence.shape("encoder.lm_head.weight", "vocabulary", "width")
    same = same_bits(evidence.tensors["encoder.lm_head.weight"], evidence.tensors[f"{_BODY}.embed_tokens.weight"])
    untied = bool(evidence.args.get("untie_weights_luna", False))
    if not same:
        evidence.prefer("untie_weights_luna", True)
    return same and not untied


def _head(evidence: Evidence, name: str) -> tuple[type, dict]:
    source = f"classification_heads.{name}"
    num_labels, inner = evidence.shape(f"{source}.out_proj.weight", "classes", "inner width")
    fields = {"pooling": _POOLING.get(name, "cls"), "classifier_hidden_size": inner}
    if evidence.args.get("task") in _RANKING_TASKS and num_labels == 1:
        return LunaForMultipleChoice, fields
    if evidence.args.get("regression_target"):
        fields["problem_type"] = "regression"
    return LunaForSequenceClassification, fields | {"num_labels": num_labels}
