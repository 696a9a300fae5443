"""Plans the conversion of a Mega checkpoint of the Long Range Arena or of raw speech."""

from luna_mega import MegaConfig, MegaForSequenceClassification, MegaForSequencePairClassification
from luna_mega.convert import plan_lra
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.keymap_mega import BODY, mega_lra
from luna_mega.convert.plan import Plan, build_config
from luna_mega.convert.plan_mega import DECIDED, Stack, layer_fields
from luna_mega.convert.source_detect import Source
from luna_mega.errors import ConversionError

_STACK = Stack(
    body=BODY,
    layers="encoder_layers",
    width="encoder_embed_dim",
    values="encoder_hidden_dim",
    ffn="encoder_ffn_embed_dim",
    shared="z_dim",
    dimensions="n_dim",
    chunk="chunk_size",
    positions="max_positions",
    norm="norm_type",
    before="encoder_normalize_before",
    hidden_dropout="act_dropout",
    ffn_dropout="act_dropout",
)
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
    fields = _encoder_fields(evidence, tokens)
    classifier, in_features = _classifier(evidence)
    model_class = plan_lra.choose_class(
        in_features, fields["hidden_size"], 2, MegaForSequenceClassification, MegaForSequencePairClassification
    )
    pooling = _pooling(evidence, tokens)
    config = build_config(MegaConfig, **fields, **classifier, pooling=pooling, ema_shift=source.revision == "flash")
    starts_with_cls = tokens and pooling == "cls"
    decided = ("input_type", *DECIDED, "pooling")
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
        decisions={"ema_convention": source.revision} | {name: getattr(config, name) for name in decided},
        notes=notes,
        warnings=evidence.warnings,
    )


def _encoder_fields(evidence: Evidence, tokens: bool) -> dict:
    evidence.prefer("input_type", "text" if tokens else "image")
    if tokens:
        vocabulary, width = evidence.shape(f"{BODY}.embed_tokens.embed.weight", "vocabulary", "width")
        return {"input_type": "tokens", "vocab_size": vocabulary} | layer_fields(evidence, _STACK, width)
    (width,) = evidence.shape(f"{BODY}.embed_tokens.weight", "width")
    return {"input_type": "values"} | layer_fields(evidence, _STACK, width)


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
