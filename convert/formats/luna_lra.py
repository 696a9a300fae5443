"""luna_lra: Luna encoders of the Long Range Arena, of the code of 2021 and of 2023."""

from dataclasses import replace
from functools import partial
from typing import Any

from luna_mega import LunaForSequenceClassification, LunaForSequencePairClassification
from luna_mega.convert.evidence import Evidence, ModelSpec, flag, integer, number, size, word
from luna_mega.convert.formats import _lra, _luna
from luna_mega.convert.formats._lra import BODY, OUT
from luna_mega.convert.formats._luna import CODE_2021, CODE_2023
from luna_mega.convert.formats.format import Companions, Facts, Format, Notes
from luna_mega.convert.keymap import KeyMap, Row, rows
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.table import MODEL, Arg, derived, fields, typed
from luna_mega.errors import ConversionError

_CLASSES = (LunaForSequenceClassification, LunaForSequencePairClassification)
_EMBEDDING, _POSITIONS = f"{BODY}.embed_tokens.weight", f"{BODY}.embed_positions.weight"
_PRE_LOGITS, _DEPTH = "pre_logits.0.weight", partial(Evidence.layers, prefix="classifier")
_LISTOP = {"encoder_layers": 6, "encoder_attention_heads": 8, "max_positions": 2002, "tie_layer_weights": True}
_IMDB = {"encoder_layers": 4, "encoder_attention_heads": 4, "max_positions": 4002}
_PF32 = {"encoder_layers": 1, "encoder_attention_heads": 4, "max_positions": 1026, "sen_rep_type": "mp"}
_ARCHITECTURES = {
    "luna_lra_listop": _LISTOP,
    **dict.fromkeys(("luna_lra_imdb", "luna_lra_imdb_eff", "luna_lra_aan"), _IMDB),
    "luna_lra_cifar10": {"encoder_layers": 1, "encoder_attention_heads": 8, "max_positions": 1024},
    "luna_lra_pf32": _PF32,
    "luna_lra_pf128": _PF32 | {"max_positions": 16386},
}
# Revision -> number of features of a pair, in widths, and the combination of the pair.
_PAIRS = {CODE_2021: (2, "concat"), CODE_2023: (4, "interaction")}
_PADDING_NOTE = (
    "as in the original, scores depend on how much padding a batch has; set pool_padding to false in config.json for "
    "scores that do not (they then differ from the original's on padded batches)"
)
_SCALED_NOTE = "the 2023 code scales P in place, so every call changes the parameter; the converted model scales a copy"


def _embedding(evidence: Evidence) -> tuple[int, ...]:
    values = _EMBEDDING in evidence.tensors and evidence.tensors[_EMBEDDING].dim() != 2
    return evidence.shape(_EMBEDDING, *(("width",) if values else ("vocabulary", "width")))


def _tokens(evidence: Evidence) -> bool:
    return len(_embedding(evidence)) == 2


def _shares_layers(evidence: Evidence) -> bool:
    in_file = evidence.layers(f"{BODY}.layers")
    if in_file > 1 and evidence.args.get("tie_layer_weights"):
        raise ConversionError(
            f"args.tie_layer_weights is set but the file has {in_file} layers under '{BODY}.layers': its args "
            "belong to another model"
        )
    return in_file == 1 and evidence.arg("tie_layer_weights")


def _layers(evidence: Evidence) -> int:
    shared = _shares_layers(evidence)
    return evidence.arg("encoder_layers") if shared else evidence.unshared_layers(f"{BODY}.layers")


def _embedding_norm(evidence: Evidence) -> dict[str, bool]:
    """Return whether there is an embedding norm.

    If the args require a norm that the file lacks, the key map raises an error.
    """
    name = "encoder_normalize_before"
    if evidence.revision == CODE_2021 or evidence.args.get(name):
        return {"embedding_norm": True}
    return {"embedding_norm": evidence.prefer(name, f"{BODY}.emb_layer_norm.weight" in evidence.tensors)}


def _learned(evidence: Evidence) -> bool:
    return evidence.revision == CODE_2021 or _POSITIONS in evidence.tensors or evidence.arg("encoder_learned_pos")


def _position_type(evidence: Evidence) -> dict[str, str]:
    if not _learned(evidence):
        _luna.check_sinusoids(evidence, f"{BODY}.projected_positions")
        return {"position_embedding_type": "sinusoidal"}
    evidence.shape(_POSITIONS, "positions", "width")
    if evidence.revision == CODE_2023:
        evidence.prefer("encoder_learned_pos", True)
    return {"position_embedding_type": "learned"}


def _positions(evidence: Evidence) -> int:
    if not _learned(evidence):
        return evidence.arg("max_positions")
    rows, _ = evidence.shape(_POSITIONS, "positions", "width")
    return rows - (2 if _tokens(evidence) else 0)  # padding and the row before it


def _pooling(evidence: Evidence) -> dict[str, Any]:
    first = evidence.revision == CODE_2021
    if evidence.arg("use_p"):
        return {"pooling": "packed_mean", "pool_padding": True, "drop_first_token": first}
    if _lra.representation(evidence) == "cls":
        return {"pooling": "cls"}
    return {"pooling": "mean", "pool_padding": first}


def _pre_logits(evidence: Evidence) -> dict[str, Any]:
    return {"classifier_activation": "gelu", "classifier_num_layers": int(_PRE_LOGITS in evidence.tensors)}


def _head(evidence: Evidence) -> dict[str, Any]:
    """Return class and width of the head; its number of features determines whether it classifies pairs."""
    if evidence.revision == CODE_2023 and _PRE_LOGITS not in evidence.tensors:
        found, features = {}, evidence.shape(OUT, "classes", "features")[1]
    else:
        first = "classifier.0.weight" if evidence.revision == CODE_2021 else _PRE_LOGITS
        hidden, features = evidence.shape(first, "hidden", "features")
        found = {"classifier_hidden_size": hidden}
    factor, combined = _PAIRS[evidence.revision]
    model_class = _lra.choose_class(features, _embedding(evidence)[-1], factor, *_CLASSES)
    pair = {"pair_features": combined} if model_class is LunaForSequencePairClassification else {}
    return found | pair | {MODEL: model_class}


_TABLE = (
    *_luna.encoder_arguments(
        BODY,
        layers=_layers,
        width=lambda evidence: _embedding(evidence)[-1],
        positions=_positions,
    ),
    *typed(word, "arch"),
    Arg("layer_type", read=lambda evidence: "luna", kind=word),
    Arg("encoder_projection_length", "projection_length", read=_luna.packed_length(BODY), kind=size),
    Arg("act_dropout", "activation_dropout", default=0.0, kind=number),
    Arg("tie_kv", "tie_key_value", read=_luna.tied_key_value, kind=flag),
    Arg("tie_layer_weights", "share_layers", default=False, read=_shares_layers, kind=flag),
    Arg("encoder_learned_pos", default=False, read=_position_type, kind=flag),
    Arg("encoder_normalize_before", "embedding_norm", read=_embedding_norm, kind=flag),
    _lra.CLASSES,
    Arg("sen_rep_type", default="cls", kind=word),
    Arg("use_p", default=False, read=_pooling, kind=flag),
    Arg("classifier_layers", "classifier_num_layers", read=_DEPTH, revision=CODE_2021, kind=integer),
    _lra.input_type(_embedding),
    replace(_lra.ACTIVATION, default="relu", revision=CODE_2021),
    Arg("pre_logits", read=_pre_logits, kind=flag, revision=CODE_2023),
    Arg("dropout", "classifier_dropout", revision=CODE_2023),
    derived("classifier_dropout", lambda evidence: 0.0, revision=CODE_2021),
    derived("classifier_bias", lambda evidence: False),
    _lra.vocabulary(_embedding),
    fields(_head),
)


class LunaLra(Format):
    """Classifiers of one sequence or of a pair, of tokens or of pixels."""

    facts = Facts(
        name="luna_lra",
        revisions=_luna.REVISIONS,
        model_classes=_CLASSES,
        stacks=frozenset({("luna", BODY)}),
        architectures=_ARCHITECTURES,
        decided=tuple(
            "tie_key_value share_layers position_embedding_type embedding_norm input_type pooling pool_padding "
            "drop_first_token".split()
        ),
        **_luna.FACTS,
    )
    table = _TABLE

    def recognize(self, file: Checkpoint) -> str:
        return CODE_2021 if any(key.startswith("classifier.") for key in file.tensors) else CODE_2023

    def keymap(self, spec: ModelSpec) -> KeyMap:
        embedding = {"tokens": "word_embeddings", "values": "value_embeddings"}[spec.config.input_type]
        classifier = [Row("classifier.{n}.{part}", "classifier.dense.{n}.{part}")]
        if spec.revision == CODE_2023:
            classifier = [Row("pre_logits.0.{part}", "classifier.dense.0.{part}")]
            classifier += _luna.sinusoid_rows(BODY)
        embeddings = rows(BODY, "luna.embeddings", {"embed_tokens": embedding})
        out = Row(OUT, "classifier.out_proj.weight")
        return KeyMap([*embeddings, *_luna.encoder_rows(BODY), *classifier, out])

    def companions(self, spec: ModelSpec, evidence: Evidence) -> Companions:
        return _lra.companions(spec, evidence, _starts_with_cls(spec, evidence))

    def report(self, spec: ModelSpec, evidence: Evidence) -> Notes:
        config = spec.config
        notes = [_PADDING_NOTE] * config.pool_padding
        notes += [_lra.first_token_note(config)] * _starts_with_cls(spec, evidence)
        notes += [_SCALED_NOTE] * (config.position_embedding_type == "sinusoidal")
        return Notes(notes=notes)


def _starts_with_cls(spec: ModelSpec, evidence: Evidence) -> bool:
    tokens = spec.config.input_type == "tokens"
    return tokens and (spec.revision == CODE_2021 or evidence.arg("sen_rep_type") == "cls")
