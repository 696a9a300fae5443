"""luna_seq2seq: Luna encoder-decoders for translation."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from luna_mega import LunaForConditionalGeneration, LunaSeq2SeqConfig
from luna_mega.convert.evidence import Evidence, ModelSpec, flag, number, size, word
from luna_mega.convert.formats import _luna, _translation
from luna_mega.convert.formats._luna import CODE_2021
from luna_mega.convert.formats.format import Companions, Facts, Format, Notes
from luna_mega.convert.keymap import LAYER_NORM, KeyMap, Row, rows
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.table import ACTIVATIONS, NOT, Arg, Table, fields
from luna_mega.errors import ConversionError
from luna_mega.modeling_luna.configuration_luna import DECODER_FIELDS

_DECIDED = tuple(
    "tie_key_value tie_word_embeddings share_encoder_decoder_embeddings dynamic_projection_length "
    "position_embedding_type decoder_position_embedding_type embedding_norm pre_norm decoder_pre_norm "
    "causal_activation".split()
)
_ACTIVATION_NOTE = (
    "the causal activation is softplus, as in the code since August 2021, but a file does not record it; for a file of "
    'earlier code, which used elu + 1, set causal_activation to "elu" in config.json'
)


def _there(key: str) -> Callable[[Evidence], bool]:
    return lambda evidence: key in evidence.tensors


def _positions(side: str) -> Callable[[Evidence], int]:
    """Return a function that counts the positions of a side: the rows of its table or, without one, the argument."""

    def read(evidence: Evidence) -> int:
        if f"{side}.embed_positions.weight" not in evidence.tensors:
            return evidence.arg(_translation.SIDES[side])
        return _luna.positions(side)(evidence)

    return read


def _type(side: str, field: str) -> Callable[[Evidence], dict[str, str]]:
    def read(evidence: Evidence) -> dict[str, str]:
        if f"{side}.embed_positions.weight" in evidence.tensors:
            evidence.prefer(f"{side}_learned_pos", True)
            return {field: "learned"}
        if evidence.arg("no_token_positional_embeddings"):
            return {field: "none"}
        if evidence.arg(f"{side}_learned_pos"):
            _luna.positions(side)(evidence)  # an error
        if side == "encoder":
            _luna.check_sinusoids(evidence, "encoder.projected_positions")
        return {field: "sinusoidal"}

    return read


def _decoder_layerdrop(evidence: Evidence) -> dict[str, Any]:
    layerdrop, ours = evidence.arg("encoder_layerdrop"), evidence.arg("decoder_layerdrop")
    if not 0 <= ours < 1:
        raise ConversionError(f"{evidence.shown('decoder_layerdrop')} is not a number from 0 to below 1")
    if layerdrop != ours:
        evidence.warn(f"args.decoder_layerdrop = {ours} is taken to be the encoder's {layerdrop}, in training only")
    return {}


def _side(side: str) -> Table:
    """Return the rows of the table for the arguments and fields of one side."""
    field = partial(_translation.field_of, side, decoder_fields=DECODER_FIELDS)
    positions, layers = field("position_embedding_type"), f"{side}_layers"
    depth = partial(Evidence.unshared_layers, prefix=f"{side}.layers", name=layers)
    heads, default_heads = f"{side}_attention_heads", 8
    own_heads = partial(Evidence.arg, name=heads)
    width = Arg("encoder_embed_dim", "hidden_size", read=_translation.width, kind=size)
    drop = Arg("encoder_layerdrop", "layerdrop", default=0.0, kind=number)
    if side == "decoder":
        default_heads = partial(Evidence.arg, name="encoder_attention_heads")
        width = Arg("decoder_embed_dim", kind=size)
        drop = replace(drop, name="decoder_layerdrop", read=_decoder_layerdrop)
    return (
        Arg(layers, field("num_hidden_layers"), read=depth, kind=size),
        width,
        Arg(f"{side}_ffn_embed_dim", field("intermediate_size"), read=_luna.feed_forward(side), kind=size),
        Arg(heads, field("num_attention_heads"), default=default_heads, kind=size),
        Arg(f"{side}_projected_attention_heads", field("num_pack_attention_heads"), default=own_heads, kind=size),
        Arg(f"{side}_learned_pos", default=False, read=_type(side, positions), kind=flag),
        Arg(f"{side}_normalize_before", field("pre_norm"), read=_there(f"{side}.layer_norm.weight"), kind=flag),
        drop,
    )


_TABLE = (
    *_translation.TASK,
    fields(_translation.vocabularies),
    Arg("max_source_positions", "max_position_embeddings", default=1024, read=_positions("encoder"), kind=size),
    Arg("max_target_positions", "max_target_positions", default=1024, read=_positions("decoder"), kind=size),
    Arg("projection_length", "projection_length", read=_luna.packed_length("encoder"), kind=size),
    _luna.PACKED_LENGTH_FIXED,
    _luna.UNTIED_KEY_VALUE,
    Arg("activation_fn", "hidden_act", ACTIVATIONS, "relu", kind=word),
    Arg("layernorm_embedding", "embedding_norm", read=_there("encoder.layernorm_embedding.weight"), kind=flag),
    Arg("no_scale_embedding", "scale_embedding", NOT, False, kind=flag),
    Arg("no_token_positional_embeddings", default=False, kind=flag),
    Arg("dropout", "dropout", default=0.1, kind=number),
    Arg("attention_dropout", "attention_dropout", default=0.0, kind=number),
    Arg("activation_dropout", "activation_dropout", default=0.0, kind=number),
    Arg("word_dropout", "word_dropout", default=0.0, kind=number),
    _luna.INITIALIZER,
    *_translation.SHARING,
    *_side("encoder"),
    *_side("decoder"),
)


class LunaSeq2Seq(Format):
    """Files of `luna`, `luna_base_tied` and `luna_base_untied`."""

    facts = Facts(
        name="luna_seq2seq",
        revisions={CODE_2021: _luna.REVISIONS[CODE_2021]},
        model_classes=(LunaForConditionalGeneration,),
        stacks=frozenset({("luna", "encoder"), ("luna", "decoder")}),
        decided=_DECIDED,
        **_luna.FACTS | {"config_class": LunaSeq2SeqConfig},
    )
    table = _TABLE

    def recognize(self, file: Checkpoint) -> str:
        return CODE_2021

    def companions(self, spec: ModelSpec, evidence: Evidence) -> Companions:
        return _translation.companions(spec, evidence, spec.config.decoder_config.max_position_embeddings)

    def report(self, spec: ModelSpec, evidence: Evidence) -> Notes:
        return Notes(notes=[_ACTIVATION_NOTE])

    def keymap(self, spec: ModelSpec) -> KeyMap:
        encoder, decoder = "luna.encoder", "luna.decoder"
        return KeyMap(
            [
                # The spelling is the original's.
                *_luna.encoder_rows("encoder", encoder, ("layernorm_embedding", "layernorm_porjected_embedding")),
                *_rows_of_side("encoder", encoder),
                *_rows_of_side("decoder", decoder),
                Row("decoder.layernorm_embedding.{part}", f"{decoder}.embeddings.layer_norm.{{part}}", LAYER_NORM),
                Row("decoder.embed_positions.weight", f"{decoder}.embeddings.position_embeddings.weight"),
                *_decoder_layers(f"{decoder}.decoder.layers.{{layer}}"),
                Row("decoder.output_projection.weight", "lm_head.weight"),
                *_luna.sinusoid_rows("encoder"),
                *_luna.sinusoid_rows("decoder"),
                *(Row(f"{side}.version", None, reason="version of the file format") for side in _translation.SIDES),
            ]
        )


def _rows_of_side(source: str, model: str) -> list[Row]:
    norms = {"layer_norm": "layer_norm", "proj_layer_norm": "packed_layer_norm"}
    return [
        Row(f"{source}.embed_tokens.weight", f"{model}.embeddings.word_embeddings.weight"),
        *rows(source, f"{model}.{source}", norms, LAYER_NORM),
    ]


def _decoder_layers(model: str) -> list[Row]:
    layer = "decoder.layers.{layer}"
    norms = {
        "self_attn_layer_norm": "attention_layer_norm",
        "encoder_attn_layer_norm": "cross_attention_layer_norm",
        "encoder_atten_proj_layer_norm": "packed_layer_norm",
        "final_layer_norm": "final_layer_norm",
    }
    return [
        *rows(f"{layer}.self_attn", f"{model}.attention", _luna.ATTENTION | {"pc_proj": "pack_key"}),
        *rows(f"{layer}.encoder_attn", f"{model}.cross_attention", _luna.ATTENTION),
        *rows(layer, model, norms, LAYER_NORM),
        *rows(layer, model, ("fc1", "fc2")),
    ]
