"""mega_seq2seq: Mega encoder-decoders for translation."""

from functools import partial
from typing import Any

from luna_mega import MegaForConditionalGeneration, MegaSeq2SeqConfig
from luna_mega.convert.evidence import Evidence, ModelSpec
from luna_mega.convert.formats import _mega, _translation
from luna_mega.convert.formats._translation import SIDES
from luna_mega.convert.formats.format import Companions, Facts, Notes
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.table import Arg, Table, derived, fields, read_fields
from luna_mega.errors import ConversionError
from luna_mega.modeling_mega.configuration_mega import DECODER_FIELDS

_OUT = "decoder.output_projection.weight"
_WMT = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "activation_dropout": 0.1}
_ARCHITECTURES = {"mega_wmt_en_de": _WMT, "mega_wmt_en_de_big": _WMT | {"dropout": 0.3}}
_OWN = DECODER_FIELDS | {"decoder_chunk_size": "chunk_size"}
_DECIDED = ("decoder_chunk_size", "scale_embedding", "tie_word_embeddings", "share_encoder_decoder_embeddings")


def _positions(side: str) -> Arg:
    field = _translation.field_of(side, "max_positions", _OWN)
    return _mega.Stack(side).positions(SIDES[side], f"{side}_chunk_size", field, default=1024)


def _sizes(side: str) -> Table:
    """Return the rows of the table for the sizes of one side."""
    field = partial(_translation.field_of, side, decoder_fields=_OWN)
    return _mega.Stack(side).sizes(side, _translation.width, field)


def _common(evidence: Evidence) -> dict[str, Any]:
    """Return the common fields of encoder and decoder; raise an error if the two sides differ."""
    rows = ((_positions(side), *_mega.options(_mega.Stack(side)), *_sizes(side)) for side in SIDES)
    encoder, decoder = (read_fields(own, evidence) for own in rows)
    for name in ("use_normalized_ffn", *decoder):
        if name not in _OWN and encoder.get(name) != decoder.get(name):
            raise ConversionError(
                f"encoder and decoder differ in {name} ({encoder.get(name)!r} and {decoder.get(name)!r}), but "
                "the model has one field for both"
            )
    return encoder | decoder


_TABLE = (
    *_translation.TASK,
    fields(_translation.vocabularies),
    _positions("encoder"),
    _positions("decoder"),
    *_mega.options(_mega.Stack("encoder")),
    *_translation.SHARING,
    *_sizes("encoder"),
    *_sizes("decoder"),
    fields(_common),
    derived("ema_shift", lambda evidence: evidence.revision == "flash"),
)


class MegaSeq2Seq(_mega.MegaFormat):
    """Files of `mega` and `mega_wmt_*`."""

    facts = Facts(
        name="mega_seq2seq",
        revisions=_mega.REVISIONS,
        model_classes=(MegaForConditionalGeneration,),
        stacks=frozenset({("mega", side) for side in SIDES}),
        architectures=_ARCHITECTURES,
        decided=(*_mega.DECIDED, *_DECIDED),
        **_mega.FACTS | {"config_class": MegaSeq2SeqConfig},
    )
    table = _TABLE

    def keymap(self, spec: ModelSpec) -> KeyMap:
        rows = []
        for side in SIDES:
            rows += [
                _mega.placeholder_row(f"{side}.version"),
                Row(f"{side}.embed_tokens.weight", f"mega.{side}.embedding_layer.word_embeddings.weight"),
                *_mega.layer_rows(side, spec.revision, f"mega.{side}", cross=side == "decoder"),
            ]
        return KeyMap([*rows, Row(_OUT, "lm_head.weight")])

    def companions(self, spec: ModelSpec, evidence: Evidence) -> Companions:
        return _translation.companions(spec, evidence, spec.config.decoder_config.max_positions)

    def report(self, spec: ModelSpec, evidence: Evidence) -> Notes:
        return Notes({"ema_convention": spec.revision})
