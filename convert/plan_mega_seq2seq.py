"""Plans the conversion of a Mega encoder-decoder for translation."""

from luna_mega import MegaConfig, MegaForConditionalGeneration
from luna_mega.convert import plan_translation
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.keymap_mega import mega_seq2seq
from luna_mega.convert.plan import Plan, build_config
from luna_mega.convert.plan_mega import DECIDED, Stack, layer_fields
from luna_mega.convert.source_detect import Source
from luna_mega.errors import ConversionError
from luna_mega.modeling_mega.configuration_mega import DECODER_FIELDS

_SIDES = {"encoder": "max_source_positions", "decoder": "max_target_positions"}
_DEFAULTS = {
    "activation_fn": "silu",
    "attention_activation_fn": "softmax",
    "rel_pos_bias": "simple",
    "truncation_length": 1024,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
    "feature_dropout": False,
    "no_scale_embedding": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
}
_WMT = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "activation_dropout": 0.1}
_ARCHS = {"mega_wmt_en_de": _WMT, "mega_wmt_en_de_big": _WMT | {"dropout": 0.3}}


def plan_mega_seq2seq(source: Source, tensors: dict, args: dict) -> Plan:
    """The plan for a file of `mega` or `mega_wmt_*`.

    Args:
        source: its `revision` is the branch, "main" or "flash".

    Raises:
        ConversionError: args and tensors contradict each other, or encoder and decoder differ in what they share.
    """
    if any(key.startswith("decoder.adaptive_softmax.") for key in tensors):
        raise ConversionError(
            "the file has an adaptive softmax (--adaptive-softmax-cutoff), which the encoder-decoder here has not; "
            "train with an ordinary one"
        )
    chunk = args.get("encoder_chunk_size")
    chunks = {"encoder_chunk_size": -1, "decoder_chunk_size": -1 if chunk is None else chunk}
    evidence = Evidence(tensors, args, _DEFAULTS | chunks | _ARCHS.get(source.arch, {}))
    (vocabulary, width), (target, target_width) = (
        evidence.shape(f"{side}.embed_tokens.weight", "vocabulary", "width") for side in _SIDES
    )
    if width != target_width:
        raise ConversionError(f"the encoder has a width of {width}, the decoder of {target_width}: they must agree")
    fields = {"vocab_size": vocabulary} | _side(evidence, "encoder", width)
    decoder = {"vocab_size": target} | _side(evidence, "decoder", width)
    own = {name: decoder.pop(field) for name, field in DECODER_FIELDS.items() if field in decoder}
    decoder_chunk = decoder.pop("chunk_size") if decoder.pop("use_chunking") else -1
    for name in ("use_normalized_ffn", *decoder):
        if name != "chunk_size" and fields.get(name) != decoder.get(name):
            raise ConversionError(
                f"encoder and decoder differ in {name} ({fields.get(name)!r} and {decoder.get(name)!r}), which is one "
                "field here"
            )
    config = build_config(
        MegaConfig,
        **fields,
        **own,
        **plan_translation.sharing(evidence),
        decoder_chunk_size=decoder_chunk,
        is_encoder_decoder=True,
        ema_shift=source.revision == "flash",
        scale_embedding=not evidence.arg("no_scale_embedding"),
    )
    names = (*DECIDED, "decoder_chunk_size", "scale_embedding", "tie_word_embeddings")
    decisions = {name: getattr(config, name) for name in (*names, "share_encoder_decoder_embeddings")}
    return Plan(
        MegaForConditionalGeneration,
        config,
        mega_seq2seq(source.revision, config),
        appended_symbol=None,
        num_labels=None,
        languages=(args.get("source_lang") or "source", args.get("target_lang") or "target"),
        generation=plan_translation.generation(config.decoder_config.max_positions),
        decisions={"ema_convention": source.revision} | decisions,
        warnings=list(dict.fromkeys(evidence.warnings)),
    )


def _side(evidence: Evidence, side: str, width: int) -> dict:
    stack = Stack(
        body=side,
        layers=f"{side}_layers",
        width=f"{side}_embed_dim",
        values=f"{side}_hidden_dim",
        ffn=f"{side}_ffn_embed_dim",
        shared=f"{side}_z_dim",
        dimensions=f"{side}_n_dim",
        chunk=f"{side}_chunk_size",
        positions=_SIDES[side],
        norm="normalization_type",
        before="normalize_before",
        hidden_dropout="hidden_dropout",
        ffn_dropout="activation_dropout",
    )
    return layer_fields(evidence, stack, width)
