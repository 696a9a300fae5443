"""mega_seq2seq: Mega encoder-decoders for translation."""

from luna_mega import MegaForConditionalGeneration, MegaSeq2SeqConfig
from luna_mega.convert.argmap import NOT, Arg, Table, build_config, fixed, never, read_fields
from luna_mega.convert.argtypes import flag, size
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.formats import _mega, _translation
from luna_mega.convert.formats._base import Tensors
from luna_mega.convert.formats._translation import SIDES
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.plan import Plan, Target
from luna_mega.errors import ConversionError
from luna_mega.modeling_mega.configuration_mega import DECODER_FIELDS

_OUT = "decoder.output_projection.weight"
_WMT = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "activation_dropout": 0.1}
_ARCHITECTURES = {"mega_wmt_en_de": _WMT, "mega_wmt_en_de_big": _WMT | {"dropout": 0.3}}
_OWN = DECODER_FIELDS | {"decoder_chunk_size": "chunk_size"}
_DECIDED = (
    *_mega.DECIDED,
    "decoder_chunk_size",
    "scale_embedding",
    "tie_word_embeddings",
    "share_encoder_decoder_embeddings",
)


def _options(side: str) -> Table:
    """Return the rows of the options that encoder and decoder must have in common, as one side has them."""
    stack = _mega.Stack(side)
    return (
        *_mega.options(stack, truncation=1024),
        stack.affine_final_norm(when=never),
        Arg("no_scale_embedding", "scale_embedding", NOT, False, kind=flag),
        *_mega.DROPOUTS,
    )


def _positions(side: str) -> Arg:
    stack, field = _mega.Stack(side), _field(side, "max_positions")
    return stack.positions(SIDES[side], f"{side}_chunk_size", field, default=1024)


def _sizes(side: str) -> Table:
    """Return the rows of the arguments and fields that each side has for itself."""
    stack = _mega.Stack(side)
    return (
        fixed(f"{side}_embed_path", None),
        Arg(f"{side}_layers", _field(side, "num_hidden_layers"), measure=stack.layers(f"{side}_layers"), kind=size),
        Arg(f"{side}_embed_dim", "hidden_size", measure=_translation.width, kind=size),
        Arg(f"{side}_hidden_dim", _field(side, "intermediate_size"), measure=stack.values, kind=size),
        stack.feed_forward(f"{side}_ffn_embed_dim", _field(side, "nffn_hidden_size")),
        Arg(f"{side}_z_dim", _field(side, "shared_representation_size"), measure=stack.shared, kind=size),
        Arg(f"{side}_n_dim", _field(side, "ema_projection_size"), measure=stack.dimensions, kind=size),
        stack.chunk(f"{side}_chunk_size", _field(side, "chunk_size")),
    )


def _field(side: str, field: str) -> str:
    return _translation.field_of(side, field, _OWN)


_ENCODER = (_positions("encoder"), *_options("encoder"), *_translation.SHARING, *_sizes("encoder"))
_DECODER = (_positions("decoder"), *_options("decoder"), *_sizes("decoder"))
_TABLE = (
    *_translation.task_arguments(fixed("arch", "mega", kept=True)),  # the args have all sizes
    _ENCODER[0],
    _DECODER[0],
    *_ENCODER[1:],
    *_sizes("decoder"),
)


class MegaSeq2Seq(_translation.TranslationFormat, _mega.MegaFormat):
    """Files of `mega` and `mega_wmt_*`."""

    name = "mega_seq2seq"
    revisions = _mega.revisions("Mega translation")
    config_class = MegaSeq2SeqConfig
    classes = (MegaForConditionalGeneration,)
    stacks = frozenset(SIDES)
    unread = _mega.FIELDS_OF_LM - {"tie_word_embeddings"}
    decoder_fields = DECODER_FIELDS
    table = _TABLE
    architectures = _ARCHITECTURES

    def evidence(self, tensors: Tensors, args: dict, revision: str) -> Evidence:
        """Return the evidence; a decoder without a chunk length takes the encoder's."""
        evidence = super().evidence(tensors, args, revision)
        chunk = evidence.args.get("encoder_chunk_size")
        evidence.defaults |= {"encoder_chunk_size": -1, "decoder_chunk_size": -1 if chunk is None else chunk}
        return evidence

    def plan(self, evidence: Evidence, head: str | None = None) -> Plan:
        """Return the plan of an encoder-decoder.

        Raises:
            ConversionError: args and tensors contradict each other, or encoder and decoder differ in a shared field.
        """
        if any(key.startswith("decoder.adaptive_softmax.") for key in evidence.tensors):
            raise ConversionError(
                "the file has an adaptive softmax (--adaptive-softmax-cutoff), which the encoder-decoder here lacks; "
                "train with an ordinary one"
            )
        vocabulary, target_vocabulary, _ = _translation.vocabularies(evidence)
        encoder, decoder = read_fields(_ENCODER, evidence), read_fields(_DECODER, evidence)
        for name in ("use_normalized_ffn", *decoder):
            if name not in _OWN and encoder.get(name) != decoder.get(name):
                raise ConversionError(
                    f"encoder and decoder differ in {name} ({encoder.get(name)!r} and {decoder.get(name)!r}), which is "
                    "one field here"
                )
        config = build_config(
            MegaSeq2SeqConfig,
            self.table,
            evidence,
            **encoder | decoder,
            vocab_size=vocabulary,
            decoder_vocab_size=target_vocabulary,
            ema_shift=evidence.revision == "flash",
        )
        decisions = {"ema_convention": evidence.revision} | {name: getattr(config, name) for name in _DECIDED}
        return self.plan_of(config, evidence, config.decoder_config.max_positions, decisions=decisions)

    def keymap(self, config: MegaSeq2SeqConfig, revision: str, head: str | None = None) -> KeyMap:
        """Return the map of an encoder-decoder of a branch."""
        rows = []
        for side, own in zip(SIDES, (config.encoder_config, config.decoder_config), strict=True):
            rows += [
                Row(f"{side}.version", None, reason=_mega.PLACEHOLDER, fill=_mega.version),
                Row(f"{side}.embed_tokens.weight", f"mega.{side}.embedding_layer.word_embeddings.weight"),
                *_mega.layer_rows(side, revision, own, f"mega.{side}", cross=side == "decoder"),
            ]
        return KeyMap([*rows, Row(_OUT, "lm_head.weight")])

    def allowed(self, target: Target) -> dict[str, tuple]:
        """Return the values that the code for translation can express."""
        config = target.config
        fields = _mega.allowed_in_all(config) | {
            "bidirectional": (True,),
            "ema_shift": (target.revision == "flash",),
            "eos_token_id": (2, None),
            "decoder_start_token_id": (2,),
        }
        if config.final_norm:
            fields["final_norm_affine"] = (True,)
        if config.relative_positional_bias == "simple":
            longest = max(config.max_positions, config.decoder_config.max_positions)
            fields["cross_attention_positions"] = (None, longest)
        return fields

    def resolved(self, config: MegaSeq2SeqConfig) -> MegaSeq2SeqConfig:
        """Return the same configuration with a value in every field of the decoder."""
        full = super().resolved(config)
        full.decoder_chunk_size = config.decoder_config.attention_chunk or -1
        simple = config.relative_positional_bias == "simple"
        full.cross_attention_positions = config.cross_positions if simple else None
        return full

    def unused(self, target: Target) -> set[str]:
        """Return the fields that a model of this configuration does not read."""
        without = set() if target.config.use_normalized_ffn else {"decoder_nffn_hidden_size"}
        return super().unused(target) | without
