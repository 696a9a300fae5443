"""Plans the conversion of a Luna checkpoint of the Long Range Arena, 2021 ("r21") and 2023 ("head") code."""

import torch

from luna_mega import LunaConfig, LunaForSequenceClassification, LunaForSequencePairClassification
from luna_mega.convert import keymap_luna, plan_lra
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.plan import Plan, build_config
from luna_mega.convert.source_detect import Source
from luna_mega.errors import ConversionError
from luna_mega.modeling_luna.modeling_luna import sinusoids

_BODY = "encoder.encoder"
_OUT = "sentence_projection_layer.weight"
_DEFAULTS = {
    "input_type": "text",
    "tie_layer_weights": False,
    "activation_fn": "gelu",
    "classifier_activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "act_dropout": 0.0,
    "sen_rep_type": "cls",
    "use_p": False,
    "encoder_learned_pos": False,
}
_LISTOP = {"encoder_layers": 6, "encoder_attention_heads": 8, "max_positions": 2002, "tie_layer_weights": True}
_IMDB = {"encoder_layers": 4, "encoder_attention_heads": 4, "max_positions": 4002}
_PF32 = {"encoder_layers": 1, "encoder_attention_heads": 4, "max_positions": 1026, "sen_rep_type": "mp"}
_ARCHS = {
    "luna_lra_listop": _LISTOP,
    "luna_lra_imdb": _IMDB,
    "luna_lra_imdb_eff": _IMDB,
    "luna_lra_aan": _IMDB,
    "luna_lra_cifar10": {"encoder_layers": 1, "encoder_attention_heads": 8, "max_positions": 1024},
    "luna_lra_pf32": _PF32,
    "luna_lra_pf128": _PF32 | {"max_positions": 16386},
}
_DECIDED = (
    "tie_key_value",
    "share_layers",
    "position_embedding_type",
    "embedding_norm",
    "input_type",
    "pooling",
    "pool_padding",
    "drop_first_token",
)
_PADDING_NOTE = (
    "as in the original, scores depend on how much padding a batch has; set pool_padding to false in config.json for "
    "scores that do not (they then differ from the original's on padded batches)"
)


def plan_luna_lra(source: Source, tensors: dict, args: dict) -> Plan:
    """The plan for a Luna LRA file: sequence classification, or pair classification for Retrieval.

    Raises:
        ConversionError: args and tensors contradict each other.
    """
    evidence = Evidence(tensors, args, _DEFAULTS | _ARCHS.get(source.arch, {}))
    tokens = _input_is_tokens(evidence)
    fields = _encoder_fields(evidence, source, tokens)
    positions = _positions(evidence, source, tokens)
    classifier, in_features = _classifier(evidence, source)
    model_class, pair = _towers(in_features, fields["hidden_size"], source)
    pooling = _pooling(evidence, source)
    config = build_config(LunaConfig, **fields, **positions, **classifier, **pair, **pooling)
    notes = [_PADDING_NOTE] if config.pool_padding else []
    starts_with_cls = tokens and (source.revision == "r21" or evidence.arg("sen_rep_type") == "cls")
    if starts_with_cls:
        notes.append(plan_lra.first_token_note(config))
    if config.position_embedding_type == "sinusoidal":
        notes.append(
            "the 2023 code scales P in place, so that there every call changes the parameter; converted is what it was "
            "meant to compute"
        )
    return Plan(
        model_class,
        config,
        keymap_luna.luna_lra(source.revision, config.input_type),
        appended_symbol="<CLS>" if tokens else None,
        num_labels=config.num_labels,
        prepends_appended=starts_with_cls,
        decisions={name: getattr(config, name) for name in _DECIDED},
        notes=notes,
        warnings=evidence.warnings,
    )


def _input_is_tokens(evidence: Evidence) -> bool:
    key = f"{_BODY}.embed_tokens.weight"
    if key not in evidence.tensors:
        evidence.shape(key, "vocabulary", "width")
    tokens = evidence.tensors[key].dim() == 2
    evidence.prefer("input_type", "text" if tokens else "image")
    return tokens


def _encoder_fields(evidence: Evidence, source: Source, tokens: bool) -> dict:
    embedding = evidence.shape(f"{_BODY}.embed_tokens.weight", *(("vocabulary", "width") if tokens else ("width",)))
    packed, _ = evidence.shape(f"{_BODY}.projected_embeddings", "projection length", "width")
    ffn, _ = evidence.shape(f"{_BODY}.layers.0.fc1.weight", "ffn width", "width")
    tied = evidence.tied_key_value()
    evidence.prefer("tie_kv", tied)
    share = _share_layers(evidence)
    fields = {"vocab_size": embedding[0]} if tokens else {}
    return fields | {
        "input_type": "tokens" if tokens else "values",
        "hidden_size": evidence.prefer("encoder_embed_dim", embedding[-1]),
        "num_hidden_layers": evidence.arg("encoder_layers") if share else evidence.unshared_layers(f"{_BODY}.layers"),
        "share_layers": share,
        "num_attention_heads": evidence.arg("encoder_attention_heads"),
        "intermediate_size": evidence.prefer("encoder_ffn_embed_dim", ffn),
        "projection_length": evidence.prefer("encoder_projection_length", packed),
        "tie_key_value": tied,
        "hidden_act": evidence.activation("activation_fn"),
        "dropout": evidence.arg("dropout"),
        "attention_dropout": evidence.arg("attention_dropout"),
        "activation_dropout": evidence.arg("act_dropout"),
        "embedding_norm": source.revision == "r21" or _embedding_norm(evidence),
    }


def _embedding_norm(evidence: Evidence) -> bool:
    """Where args ask for the norm it must be there, and a file without it is reported as incomplete."""
    asked, there = evidence.args.get("encoder_normalize_before"), f"{_BODY}.emb_layer_norm.weight" in evidence.tensors
    return bool(asked) or evidence.prefer("encoder_normalize_before", there)


def _share_layers(evidence: Evidence) -> bool:
    in_file = evidence.layers(f"{_BODY}.layers")
    if in_file > 1 and evidence.args.get("tie_layer_weights"):
        raise ConversionError(
            f"args.tie_layer_weights is set but the file holds {in_file} layers under '{_BODY}.layers': its args are "
            "of another model"
        )
    return in_file == 1 and bool(evidence.arg("tie_layer_weights"))


def _positions(evidence: Evidence, source: Source, tokens: bool) -> dict:
    table = f"{_BODY}.embed_positions.weight"
    if source.revision == "r21" or table in evidence.tensors or evidence.arg("encoder_learned_pos"):
        rows, _ = evidence.shape(table, "positions", "width")
        if source.revision == "head":
            evidence.prefer("encoder_learned_pos", True)
        offset = 2 if tokens else 0  # padding and the row before it
        return {
            "position_embedding_type": "learned",
            "max_position_embeddings": evidence.prefer("max_positions", rows - offset),
        }
    check_sinusoids(evidence, f"{_BODY}.projected_positions")
    return {"position_embedding_type": "sinusoidal", "max_position_embeddings": evidence.arg("max_positions")}


def check_sinusoids(evidence: Evidence, key: str) -> None:
    """The saved sinusoids of P, tensor `key`, must be what the model computes."""
    if key not in evidence.tensors:
        return
    length, width = evidence.shape(key, "projection length", "width")
    saved = evidence.tensors[key]
    tolerance = 1e-4 if saved.dtype in (torch.float32, torch.float64) else 1e-2
    if not torch.allclose(saved.float(), sinusoids(torch.arange(length), width), rtol=0, atol=tolerance):
        raise ConversionError(f"tensor {key!r} is not the sinusoids of the original; the model cannot reproduce it")


def _classifier(evidence: Evidence, source: Source) -> tuple[dict, int]:
    """Fields of the classification head, and how many features it reads."""
    num_labels, hidden = evidence.shape(_OUT, "classes", "features")
    fields = {"num_labels": evidence.prefer("sentence_class_num", num_labels), "classifier_bias": False}
    if source.revision == "r21":
        hidden, in_features = evidence.shape("classifier.0.weight", "hidden", "features")
        return fields | {
            "classifier_num_layers": evidence.prefer("classifier_layers", evidence.layers("classifier")),
            "classifier_hidden_size": hidden,
            "classifier_activation": evidence.activation("classifier_activation_fn"),
            "classifier_dropout": 0.0,
        }, in_features
    fields |= {"classifier_activation": "gelu", "classifier_dropout": evidence.arg("dropout")}
    if "pre_logits.0.weight" not in evidence.tensors:
        return fields | {"classifier_num_layers": 0}, hidden
    hidden, in_features = evidence.shape("pre_logits.0.weight", "hidden", "features")
    return fields | {"classifier_num_layers": 1, "classifier_hidden_size": hidden}, in_features


def _towers(in_features: int, width: int, source: Source) -> tuple[type, dict]:
    factor, features = (2, "concat") if source.revision == "r21" else (4, "interaction")
    model_class = plan_lra.choose_class(
        in_features, width, factor, LunaForSequenceClassification, LunaForSequencePairClassification
    )
    return model_class, {"pair_features": features} if model_class is LunaForSequencePairClassification else {}


def _pooling(evidence: Evidence, source: Source) -> dict:
    if evidence.arg("use_p"):
        return {"pooling": "packed_mean", "pool_padding": True, "drop_first_token": source.revision == "r21"}
    if plan_lra.representation(evidence) == "cls":
        return {"pooling": "cls"}
    return {"pooling": "mean", "pool_padding": source.revision == "r21"}
