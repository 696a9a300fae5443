"""mega_lra: Mega encoders of the Long Range Arena and of raw speech."""

from dataclasses import replace
from typing import Any

from luna_mega import MegaForSequenceClassification, MegaForSequencePairClassification
from luna_mega.convert.evidence import Evidence, ModelSpec, flag, integer, mean_and_deviation, number, word
from luna_mega.convert.formats import _lra, _mega
from luna_mega.convert.formats._lra import BODY, OUT
from luna_mega.convert.formats.format import Companions, Facts, Notes
from luna_mega.convert.keymap import KeyMap, Row, rows
from luna_mega.convert.table import MODEL, Arg, derived, typed
from luna_mega.errors import ConversionError

_CLASSES = (MegaForSequenceClassification, MegaForSequencePairClassification)
_WORDS, _VALUES = f"{BODY}.embed_tokens.embed.weight", f"{BODY}.embed_tokens.weight"
_STACK = _mega.Stack(BODY)
_TEXT = {"activation_fn": "silu", "truncation_length": 1024, "max_positions": 4002}
_IMAGE = {"activation_fn": "silu", "truncation_length": 1024, "chunk_size": 1024, "max_positions": 1024}
_SPEECH = {"activation_fn": "silu", "attention_activation_fn": "laplace", "chunk_size": 1000, "truncation_length": 1000}
_SPEECH |= {"max_positions": 16000, "dropout": 0.0, "attention_dropout": 0.0}
_ARCHITECTURES = {
    "mega_lra_listop": _TEXT | {"max_positions": 2002},
    **dict.fromkeys(("mega_lra_imdb", "mega_lra_aan"), _TEXT),
    **dict.fromkeys(("mega_lra_cifar10", "mega_lra_pf32"), _IMAGE),
    "mega_lra_pf128": _IMAGE | {"truncation_length": 4096, "chunk_size": 16384, "max_positions": 16384},
    **dict.fromkeys(("sc_raw", "mega_sc_raw", "mega_sc_raw_base", "mega_sc_raw_big"), _SPEECH),
}


def _tokens(evidence: Evidence) -> bool:
    if _WORDS in evidence.tensors or _VALUES in evidence.tensors:
        return _WORDS in evidence.tensors
    return evidence.args.get("input_type") == "text"  # the error names the missing one of the two


def _embedding(evidence: Evidence) -> tuple[int, ...]:
    return evidence.shape(_WORDS, "vocabulary", "width") if _tokens(evidence) else evidence.shape(_VALUES, "width")


def _classifier(evidence: Evidence) -> dict[str, Any]:
    """Return depth, width and class of the head; its number of features determines whether it classifies pairs."""
    present = any(key.startswith("classifier.") for key in evidence.tensors)
    if evidence.arg("classifier_layers") < 1 and not present:
        found, (_, features) = {"classifier_num_layers": 0}, evidence.shape(OUT, "classes", "features")
    else:
        hidden, features = evidence.shape("classifier.0.0.weight", "hidden", "features")
        layers = evidence.prefer("classifier_layers", evidence.layers("classifier"))
        found = {"classifier_num_layers": layers, "classifier_hidden_size": hidden}
    return found | {MODEL: _lra.choose_class(features, _embedding(evidence)[-1], 2, *_CLASSES)}


def _pooling(evidence: Evidence) -> dict[str, str]:
    if evidence.arg("use_p"):
        raise ConversionError("args.use_p is set, but Mega has no packed sequence")
    pooling = _lra.representation(evidence)
    if pooling == "cls" and not _tokens(evidence):
        raise ConversionError("args.sen_rep_type = 'cls' is not supported for pixels and audio, only 'mp' is")
    return {"pooling": pooling}


_TABLE = (
    Arg("layer_type", read=lambda evidence: "mega", kind=word),
    *_STACK.sizes("encoder", lambda evidence: _embedding(evidence)[-1], short=""),
    _mega.TRUNCATION,
    Arg("rel_pos_bias", "relative_positional_bias", read=_STACK.bias, kind=word),
    _STACK.positions("max_positions", "chunk_size"),
    replace(_mega.ACTIVATION_FUNCTION, default="gelu"),
    Arg("attention_activation_fn", "attention_activation", default="relu2", kind=word),
    _STACK.norm_type("norm_type"),
    _STACK.normalize_before("encoder_normalize_before"),
    _STACK.affine_final_norm(),
    _STACK.normalize_embedding(),
    _mega.FEATURE_DROPOUT,
    Arg("dropout", "dropout_prob", default=0.1, kind=number),
    Arg("dropout", "classifier_dropout"),
    Arg("attention_dropout", "attention_probs_dropout_prob", default=0.1, kind=number),
    Arg("act_dropout", "hidden_dropout_prob", default=0.0, kind=number),
    Arg("act_dropout", "nffn_activation_dropout_prob"),
    _lra.CLASSES,
    Arg("sen_rep_type", "pooling", _lra.REPRESENTATION, "mp", read=_pooling, kind=word),
    Arg("classifier_layers", "classifier_num_layers", default=1, read=_classifier, kind=integer),
    replace(_lra.ACTIVATION, default="gelu"),
    Arg("use_p", default=False, kind=flag),
    *typed(word, "arch", "task"),
    _lra.input_type(_embedding),
    *typed(mean_and_deviation, "pixel_normalization"),
    _lra.vocabulary(_embedding),
    derived("classifier_bias", lambda evidence: False),
    derived("ema_shift", lambda evidence: evidence.revision == "flash"),
)


class MegaLra(_mega.MegaFormat):
    """Classifiers of one sequence or of a pair, of tokens, pixels or samples of speech."""

    facts = Facts(
        name="mega_lra",
        revisions=_mega.REVISIONS,
        model_classes=_CLASSES,
        stacks=frozenset({("mega", BODY)}),
        architectures=_ARCHITECTURES,
        decided=("input_type", *_mega.DECIDED, "pooling"),
        **_mega.FACTS,
    )
    table = _TABLE

    def keymap(self, spec: ModelSpec) -> KeyMap:
        deeper = range(1, spec.config.classifier_num_layers)
        return KeyMap(
            [
                Row(_WORDS, "mega.embedding_layer.word_embeddings.weight"),
                *rows(BODY, "mega.embedding_layer", {"embed_tokens": "value_embeddings"}),
                *_mega.layer_rows(BODY, spec.revision),
                Row("classifier.0.0.{part}", "classifier.dense.{part}"),
                *rows("classifier", "classifier.deeper", {f"{n}.0": f"{n - 1}" for n in deeper}),
                Row(OUT, "classifier.out_proj.weight"),
            ]
        )

    def companions(self, spec: ModelSpec, evidence: Evidence) -> Companions:
        return _lra.companions(spec, evidence, _starts_with_cls(spec))

    def report(self, spec: ModelSpec, evidence: Evidence) -> Notes:
        notes = [_lra.first_token_note(spec.config)] * _starts_with_cls(spec)
        if evidence.args.get("task") == "lra-image":
            mean, deviation = evidence.args.get("pixel_normalization") or (0.5, 0.5)
            notes.append(f"a pixel x of 0 to 255 must be normalized to (x / 255 - {mean}) / {deviation}")
        return Notes({"ema_convention": spec.revision}, notes)


def _starts_with_cls(spec: ModelSpec) -> bool:
    return spec.config.input_type == "tokens" and spec.config.pooling == "cls"
