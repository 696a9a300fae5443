"""Plans the conversion of a Luna encoder-decoder for translation."""

from luna_mega import LunaConfig, LunaForConditionalGeneration
from luna_mega.convert import keymap_luna, plan_translation
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.plan import Plan, build_config
from luna_mega.convert.plan_luna_lra import check_sinusoids
from luna_mega.convert.source_detect import Source
from luna_mega.errors import ConversionError

_DEFAULTS = {
    "fix_projection_length": False,
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "word_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "encoder_attention_heads": 8,
    "encoder_learned_pos": False,
    "decoder_learned_pos": False,
    "no_token_positional_embeddings": False,
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "no_scale_embedding": False,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
}
_DECIDED = (
    "tie_key_value",
    "tie_word_embeddings",
    "share_encoder_decoder_embeddings",
    "dynamic_projection_length",
    "position_embedding_type",
    "decoder_position_embedding_type",
    "embedding_norm",
    "pre_norm",
    "decoder_pre_norm",
    "causal_activation",
)
_MISSING = ("decoder.adaptive_softmax.", "decoder.project_in_dim.", "decoder.project_out_dim.")


def plan_luna_seq2seq(source: Source, tensors: dict, args: dict) -> Plan:
    """The plan for a file of `luna`, `luna_base_tied` or `luna_base_untied`.

    Raises:
        ConversionError: args and tensors contradict each other, or the file has what this package has not.
    """
    for prefix in _MISSING:
        if any(key.startswith(prefix) for key in tensors):
            raise ConversionError(
                f"the file has tensors '{prefix}*': a decoder of another width than its embedding, or an adaptive "
                "softmax, which the encoder-decoder here has not; no published recipe trains one"
            )
    heads = args.get("encoder_attention_heads") or _DEFAULTS["encoder_attention_heads"]
    decoder_heads = args.get("decoder_attention_heads") or heads
    evidence = Evidence(
        tensors,
        args,
        _DEFAULTS
        | {
            "encoder_projected_attention_heads": heads,
            "decoder_attention_heads": heads,
            "decoder_projected_attention_heads": decoder_heads,
        },
    )
    config = build_config(
        LunaConfig, **_fields(evidence), **plan_translation.sharing(evidence), is_encoder_decoder=True
    )
    notes = [
        "the causal activation is softplus, as the code has it since August 2021; nothing in a file tells it from the "
        'elu + 1 of before: for such a file set causal_activation to "elu" in config.json'
    ]
    return Plan(
        LunaForConditionalGeneration,
        config,
        keymap_luna.luna_seq2seq(),
        appended_symbol=None,
        num_labels=None,
        languages=(args.get("source_lang") or "source", args.get("target_lang") or "target"),
        generation=plan_translation.generation(config.decoder_config.max_position_embeddings),
        decisions={name: getattr(config, name) for name in _DECIDED},
        notes=notes,
        warnings=list(dict.fromkeys(evidence.warnings)),
    )


def _fields(evidence: Evidence) -> dict:
    vocabulary, width = evidence.shape("encoder.embed_tokens.weight", "vocabulary", "width")
    target, target_width = evidence.shape("decoder.embed_tokens.weight", "vocabulary", "width")
    if width != target_width:
        raise ConversionError(f"the encoder has a width of {width}, the decoder of {target_width}: they must agree")
    packed, _ = evidence.shape("encoder.projected_embeddings", "projection length", "width")
    tied = evidence.tied_key_value()
    evidence.prefer("untie_luna_kv", not tied)
    embedding_norm = "encoder.layernorm_embedding.weight" in evidence.tensors
    ffn, decoder_ffn = (
        evidence.prefer(f"{side}_ffn_embed_dim", evidence.shape(f"{side}.layers.0.fc1.weight", "ffn width", "width")[0])
        for side in ("encoder", "decoder")
    )
    layerdrop, decoder_layerdrop = (evidence.arg(f"{side}_layerdrop") for side in ("encoder", "decoder"))
    if layerdrop != decoder_layerdrop:
        evidence.warnings.append(
            f"args.decoder_layerdrop = {decoder_layerdrop} is taken to be the encoder's {layerdrop}, in training only"
        )
    return {
        "vocab_size": vocabulary,
        "decoder_vocab_size": target,
        "hidden_size": evidence.prefer("encoder_embed_dim", width),
        "num_hidden_layers": evidence.unshared_layers("encoder.layers"),
        "num_decoder_layers": evidence.unshared_layers("decoder.layers", "decoder_layers"),
        "num_attention_heads": evidence.arg("encoder_attention_heads"),
        "num_pack_attention_heads": evidence.arg("encoder_projected_attention_heads"),
        "num_decoder_attention_heads": evidence.arg("decoder_attention_heads"),
        "num_decoder_pack_attention_heads": evidence.arg("decoder_projected_attention_heads"),
        "intermediate_size": ffn,
        "decoder_intermediate_size": decoder_ffn,
        "projection_length": evidence.prefer("projection_length", packed),
        "dynamic_projection_length": not evidence.arg("fix_projection_length"),
        "tie_key_value": tied,
        "hidden_act": evidence.activation("activation_fn"),
        "dropout": evidence.arg("dropout"),
        "attention_dropout": evidence.arg("attention_dropout"),
        "activation_dropout": evidence.arg("activation_dropout"),
        "word_dropout": evidence.arg("word_dropout"),
        "layerdrop": layerdrop,
        "scale_embedding": not evidence.arg("no_scale_embedding"),
        "embedding_norm": evidence.prefer("layernorm_embedding", embedding_norm),
        "pre_norm": evidence.prefer("encoder_normalize_before", "encoder.layer_norm.weight" in evidence.tensors),
        "decoder_pre_norm": evidence.prefer(
            "decoder_normalize_before", "decoder.layer_norm.weight" in evidence.tensors
        ),
        **_positions(evidence, "encoder", "position_embedding_type", "max_position_embeddings", "max_source_positions"),
        **_positions(
            evidence, "decoder", "decoder_position_embedding_type", "max_target_positions", "max_target_positions"
        ),
    }


def _positions(evidence: Evidence, side: str, kind: str, limit: str, argument: str) -> dict:
    """The fields `kind` and `limit` of one side."""
    table = f"{side}.embed_positions.weight"
    if table in evidence.tensors:
        rows, _ = evidence.shape(table, "positions + 2", "width")
        evidence.prefer(f"{side}_learned_pos", True)
        return {kind: "learned", limit: evidence.prefer(argument, rows - 2)}  # 2: padding and the row before it
    if evidence.arg("no_token_positional_embeddings"):
        return {kind: "none", limit: evidence.arg(argument)}
    if evidence.arg(f"{side}_learned_pos"):
        evidence.shape(table, "positions + 2", "width")
    if side == "encoder":
        check_sinusoids(evidence, "encoder.projected_positions")
    return {kind: "sinusoidal", limit: evidence.arg(argument)}
