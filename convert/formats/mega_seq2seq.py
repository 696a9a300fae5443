"""mega_seq2seq: Mega encoder-decoders for translation."""

from functools import partial
from typing import Any

from luna_mega import MegaForConditionalGeneration, MegaSeq2SeqConfig
from luna_mega.convert.argtypes import flag
from luna_mega.convert.evidence import Evidence, Target
from luna_mega.convert.formats import _mega, _translation
from luna_mega.convert.formats._translation import SIDES
from luna_mega.convert.formats.format import Companions, Facts, Notes
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.table import NOT, Arg, Table, derived, fields, fixed, never, read_fields
from luna_mega.errors import ConversionError
from luna_mega.modeling_mega.configuration_mega import DECODER_FIELDS

_OUT = "decoder.output_projection.weight"
_WMT = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "activation_dropout": 0.1}
_ARCHITECTURES = {"mega_wmt_en_de": _WMT, "mega_wmt_en_de_big": _WMT | {"dropout": 0.3}}
_OWN = DECODER_FIELDS | {"decoder_chunk_size": "chunk_size"}
_DECIDED = ("decoder_chunk_size", "scale_embedding", "tie_word_embeddings", "share_encoder_decoder_embeddings")


def _options(side: str) -> Table:
    """Return the rows of the common options of encoder and decoder, read from one side."""
    stack = _mega.Stack(side)
    return (
        *_mega.options(stack, truncation=1024),
        stack.affine_final_norm(write_if=never),
        Arg("no_scale_embedding", "scale_embedding", NOT, False, kind=flag),
        *_mega.DROPOUTS,
    )


def _positions(side: str) -> Arg:
    field = _translation.field_of(side, "max_positions", _OWN)
    return _mega.Stack(side).positions(SIDES[side], f"{side}_chunk_size", field, default=1024)


def _sizes(side: str) -> Table:
    """Return the rows of the sizes of one side."""
    field = partial(_translation.field_of, side, decoder_fields=_OWN)
    return fixed(f"{side}_embed_path", None), *_mega.Stack(side).sizes(side, _translation.width, field)


def _common(evidence: Evidence) -> dict[str, Any]:
    """Return the common fields of encoder and decoder; raise an error if the two sides differ."""
    encoder, decoder = (read_fields((_positions(side), *_options(side), *_sizes(side)), evidence) for side in SIDES)
    for name in ("use_normalized_ffn", *decoder):
        if name not in _OWN and encoder.get(name) != decoder.get(name):
            raise ConversionError(
                f"encoder and decoder differ in {name} ({encoder.get(name)!r} and {decoder.get(name)!r}), but "
                "the model has one field for both"
            )
    return encoder | decoder


_TABLE = (
    *_translation.task_arguments(fixed("arch", "mega", kept=True)),  # the args have all sizes
    fields(_translation.vocabularies),
    _positions("encoder"),
    _positions("decoder"),
    *_options("encoder"),
    *_translation.SHARING,
    *_sizes("encoder"),
    *_sizes("decoder"),
    fields(_common),
    *_mega.NORMS,
    derived("ema_shift", lambda evidence: evidence.revision == "flash"),
)


def _resolve(config: MegaSeq2SeqConfig) -> MegaSeq2SeqConfig:
    full = _translation.resolve(config, DECODER_FIELDS)
    full.decoder_chunk_size = config.decoder_config.attention_chunk or -1
    full.cross_attention_positions = config.cross_positions if config.relative_positional_bias == "simple" else None
    return full


def _unused(target: Target) -> set[str]:
    without = set() if target.config.use_normalized_ffn else {"decoder_nffn_hidden_size"}
    return _mega.unused(target, _mega.FIELDS_OF_LM - {"tie_word_embeddings"}) | without | {"bos_token_id"}


class MegaSeq2Seq(_mega.MegaFormat):
    """Files of `mega` and `mega_wmt_*`."""

    facts = Facts(
        name="mega_seq2seq",
        revisions=_mega.revisions("Mega translation"),
        model_classes=(MegaForConditionalGeneration,),
        stacks=frozenset({("mega", side) for side in SIDES}),
        architectures=_ARCHITECTURES,
        container=_translation.CONTAINER,
        decided=(*_mega.DECIDED, *_DECIDED),
        resolve=_resolve,
        **_mega.FACTS | {"config_class": MegaSeq2SeqConfig, "unused": _unused},
    )
    table = _TABLE

    def keymap(self, target: Target) -> KeyMap:
        rows, config = [], target.config
        for side, own in zip(SIDES, (config.encoder_config, config.decoder_config), strict=True):
            rows += [
                _mega.version_row(side),
                Row(f"{side}.embed_tokens.weight", f"mega.{side}.embedding_layer.word_embeddings.weight"),
                *_mega.layer_rows(side, target.revision, own, f"mega.{side}", cross=side == "decoder"),
            ]
        return KeyMap([*rows, Row(_OUT, "lm_head.weight")])

    def companions(self, target: Target, evidence: Evidence) -> Companions:
        return _translation.companions(target, evidence, target.config.decoder_config.max_positions)

    def report(self, target: Target, evidence: Evidence) -> Notes:
        return Notes({"ema_convention": target.revision}, heads=_translation.HEADS)
