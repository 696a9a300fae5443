"""Plans the conversion of a Mega checkpoint of the Long Range Arena or of raw speech."""

from luna_mega import MegaConfig, MegaForSequenceClassification, MegaForSequencePairClassification
from luna_mega.convert import plan_lra
from luna_mega.convert.errors import ConversionError
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.keymap_mega import BODY, mega_lra
from luna_mega.convert.plan import Plan, build_config
from luna_mega.convert.source_detect import Source

_LAYER = f"{BODY}.layers.0"
_OUT = "sentence_projection_layer.weight"
_DEFAULTS = {
    "activation_fn": "gelu",
    "attention_activation_fn": "relu2",
    "rel_pos_bias": "simple",
    "chunk_size": -1,
    "feature_dropout": False,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "act_dropout": 0.0,
    "classifier_layers": 1,
    "classifier_activation_fn": "gelu",
    "sen_rep_type": "mp",
    "use_p": False,
}
_TEXT = {"activation_fn": "silu", "truncation_length": 1024, "max_positions": 4002}
_IMAGE = {"activation_fn": "silu", "truncation_length": 1024, "chunk_size": 1024, "max_positions": 1024}
_SPEECH = {
    "activation_fn": "silu",
    "attention_activation_fn": "laplace",
    "chunk_size": 1000,
    "truncation_length": 1000,
    "max_positions": 16000,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_ARCHS = {
    "mega_lra_listop": _TEXT | {"max_positions": 2002},
    "mega_lra_imdb": _TEXT,
    "mega_lra_aan": _TEXT,
    "mega_lra_cifar10": _IMAGE,
    "mega_lra_pf32": _IMAGE,
    "mega_lra_pf128": _IMAGE | {"truncation_length": 4096, "chunk_size": 16384, "max_positions": 16384},
    "sc_raw": _SPEECH,
    "mega_sc_raw": _SPEECH,
    "mega_sc_raw_base": _SPEECH,
    "mega_sc_raw_big": _SPEECH,
}
# The first of these that a norm has tells its kind.
_NORMS = {"scalar": "scalenorm", "running_mean": "batchnorm", "bias": "layernorm", "weight": "rmsnorm"}
_DECIDED = (
    "input_type",
    "normalization_type",
    "normalize_before_mega",
    "attention_activation",
    "relative_positional_bias",
    "attention_chunk",
    "truncation",
    "pooling",
)


def plan_mega_lra(source: Source, tensors: dict, args: dict) -> Plan:
    """The plan for a Mega file: sequence classification, or pair classification for Retrieval.

    Args:
        source: its `revision` is the branch, "main" or "flash".

    Raises:
        ConversionError: args and tensors contradict each other.
    """
    evidence = Evidence(tensors, args, _DEFAULTS | _ARCHS.get(source.arch, {}))
    tokens = f"{BODY}.embed_tokens.embed.weight" in tensors
    if not tokens and f"{BODY}.embed_tokens.weight" not in tensors:
        tokens = args.get("input_type") == "text"  # which of the two is missing
    fields = _encoder_fields(evidence, tokens) | _norms(evidence) | _positions(evidence)
    classifier, in_features = _classifier(evidence)
    model_class = plan_lra.choose_class(
        in_features, fields["hidden_size"], 2, MegaForSequenceClassification, MegaForSequencePairClassification
    )
    pooling = _pooling(evidence, tokens)
    config = build_config(MegaConfig, **fields, **classifier, pooling=pooling, ema_shift=source.revision == "flash")
    starts_with_cls = tokens and pooling == "cls"
    notes = [plan_lra.first_token_note(config)] if starts_with_cls else []
    if args.get("task") == "lra-image":
        mean, deviation = args.get("pixel_normalization") or (0.5, 0.5)
        notes.append(f"a pixel x of 0 to 255 becomes (x / 255 - {mean}) / {deviation} before it goes into the model")
    return Plan(
        model_class,
        config,
        mega_lra(source.revision, config.input_type, config.classifier_num_layers),
        appended_symbol="<CLS>" if tokens else None,
        num_labels=config.num_labels,
        prepends_appended=starts_with_cls,
        decisions={"ema_convention": source.revision} | {name: getattr(config, name) for name in _DECIDED},
        notes=notes,
        warnings=evidence.warnings,
    )


def _encoder_fields(evidence: Evidence, tokens: bool) -> dict:
    if tokens:
        vocabulary, width = evidence.shape(f"{BODY}.embed_tokens.embed.weight", "vocabulary", "width")
    else:
        (width,) = evidence.shape(f"{BODY}.embed_tokens.weight", "width")
    evidence.prefer("input_type", "text" if tokens else "image")
    values, _ = evidence.shape(f"{_LAYER}.mega_layer.v_proj.weight", "value width", "width")
    _, shared = evidence.shape(f"{_LAYER}.mega_layer.gamma", "2", "z")
    _, dimensions = evidence.shape(f"{_LAYER}.mega_layer.move.gamma", "2 width", "n")
    fields = {
        "input_type": "tokens" if tokens else "values",
        "hidden_size": evidence.prefer("encoder_embed_dim", width),
        "num_hidden_layers": evidence.unshared_layers(f"{BODY}.layers"),
        "intermediate_size": evidence.prefer("encoder_hidden_dim", values),
        "shared_representation_size": evidence.prefer("z_dim", shared),
        "ema_projection_size": evidence.prefer("n_dim", dimensions),
        "activation": evidence.activation("activation_fn"),
        "attention_activation": evidence.arg("attention_activation_fn"),
        "dropout_prob": evidence.arg("dropout"),
        "attention_probs_dropout_prob": evidence.arg("attention_dropout"),
        "hidden_dropout_prob": evidence.arg("act_dropout"),
        "nffn_activation_dropout_prob": evidence.arg("act_dropout"),
        "use_feature_dropout": evidence.arg("feature_dropout"),
    }
    return fields | ({"vocab_size": vocabulary} if tokens else {}) | _feed_forward(evidence)


def _feed_forward(evidence: Evidence) -> dict:
    there = any(".nffn." in key for key in evidence.tensors)
    if not there and (evidence.args.get("encoder_ffn_embed_dim") or 0) < 1:
        return {"use_normalized_ffn": False}
    ffn, _ = evidence.shape(f"{_LAYER}.nffn.fc1.weight", "ffn width", "width")
    return {"nffn_hidden_size": evidence.prefer("encoder_ffn_embed_dim", ffn)}


def _norms(evidence: Evidence) -> dict:
    """Kind and places of the norms; where args ask for one that is not there, the file is reported as incomplete."""
    before = _asked_or_there(evidence, "encoder_normalize_before", f"{BODY}.final_norm.")
    return {
        "normalization_type": _norm_type(evidence),
        "normalize_before_mega": before,
        "normalize_before_ffn": before,
        "final_norm": before,
        "embedding_norm": _asked_or_there(evidence, "normalize_embedding", f"{BODY}.embed_norm."),
    }


def _asked_or_there(evidence: Evidence, name: str, prefix: str) -> bool:
    there = any(key.startswith(prefix) for key in evidence.tensors)
    return bool(evidence.args.get(name)) or evidence.prefer(name, there)


def _norm_type(evidence: Evidence) -> str:
    prefix = f"{_LAYER}.mega_layer.norm.norm"
    kind = next((kind for part, kind in _NORMS.items() if f"{prefix}.{part}" in evidence.tensors), None)
    if kind is None:
        raise ConversionError(f"there is no tensor '{prefix}.*'; the file is incomplete")
    if kind == "batchnorm" and evidence.args.get("norm_type") == "syncbatchnorm":
        return "syncbatchnorm"  # the same tensors
    return evidence.prefer("norm_type", kind)


def _positions(evidence: Evidence) -> dict:
    chunk, positions = evidence.arg("chunk_size"), evidence.arg("max_positions")
    table = f"{_LAYER}.mega_layer.rel_pos_bias.rel_pos_bias"
    simple = table in evidence.tensors
    evidence.prefer("rel_pos_bias", "simple" if simple else "rotary")
    if simple:
        entries = (evidence.shape(table, "2 positions - 1")[0] + 1) // 2
        if chunk > 0:
            chunk = evidence.prefer("chunk_size", entries)
        else:
            positions = evidence.prefer("max_positions", entries)
    # In the args, None is a value: the whole kernel.
    truncation = evidence.args.get("truncation_length", evidence.defaults.get("truncation_length"))
    return {
        "relative_positional_bias": "simple" if simple else "rotary",
        "use_chunking": chunk > 0,
        "chunk_size": chunk if chunk > 0 else -1,
        "max_positions": positions,
        "truncation": truncation if truncation is not None and truncation > 0 else None,
    }


def _classifier(evidence: Evidence) -> tuple[dict, int]:
    """Fields of the classification head, and how many features it reads."""
    num_labels, features = evidence.shape(_OUT, "classes", "features")
    fields = {
        "num_labels": evidence.prefer("sentence_class_num", num_labels),
        "classifier_num_layers": 0,
        "classifier_activation": evidence.activation("classifier_activation_fn"),
        "classifier_dropout": evidence.arg("dropout"),
        "classifier_bias": False,
    }
    if evidence.arg("classifier_layers") < 1 and not any(key.startswith("classifier.") for key in evidence.tensors):
        return fields, features
    hidden, in_features = evidence.shape("classifier.0.0.weight", "hidden", "features")
    layers = evidence.prefer("classifier_layers", evidence.layers("classifier"))
    return fields | {"classifier_num_layers": layers, "classifier_hidden_size": hidden}, in_features


def _pooling(evidence: Evidence, tokens: bool) -> str:
    if evidence.arg("use_p"):
        raise ConversionError("args.use_p is set, which reads the packed sequence of Luna: Mega has none")
    pooling = plan_lra.representation(evidence)
    if pooling == "cls" and not tokens:
        raise ConversionError("args.sen_rep_type = 'cls' with pixels or audio fails in the original as well; it has mp")
    return pooling
