"""Key maps of luna_bert and Luna LRA of both code revisions and of Luna seq2seq. Data only; see keymap.py."""

from luna_mega.convert.keymap import KeyMap, Row

LAYER_NORM = "layer_norm"
_SINUSOIDS = "sinusoids of P: checked against the formula, not stored"
_PLACEHOLDER = "placeholder buffer of the original, no content"

_ATTENTION = {
    "pq_proj": "pack_query",
    "pc_proj": "pack_key_value",
    "pk_proj": "pack_key",
    "pv_proj": "pack_value",
    "q_proj": "query",
    "c_proj": "key_value",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "output",
}
_LAYER_NORMS = {
    "self_attn_layer_norm": "attention_layer_norm",
    "self_atten_proj_layer_norm": "packed_layer_norm",  # the spelling is the original's
    "final_layer_norm": "final_layer_norm",
}


_CAUSAL_ATTENTION = _ATTENTION | {"pc_proj": "pack_key"}


def _encoder(
    source: str, model: str = "luna", norms: tuple[str, str] = ("emb_layer_norm", "proj_emb_layer_norm")
) -> list[Row]:
    """The encoder without its input embedding.

    `source` is its prefix in the file, `model` that of `LunaModel`, `norms` the names of those of embeddings and P.
    """
    embeddings, layer = f"{model}.embeddings", f"{source}.layers.{{layer}}"
    to_layer, (norm, packed_norm) = f"{model}.encoder.layers.{{layer}}", norms
    return [
        Row(f"{source}.projected_embeddings", f"{embeddings}.packed_embeddings"),
        Row(f"{source}.embed_positions.weight", f"{embeddings}.position_embeddings.weight"),
        Row(f"{source}.{norm}.{{part}}", f"{embeddings}.layer_norm.{{part}}", LAYER_NORM),
        Row(f"{source}.{packed_norm}.{{part}}", f"{embeddings}.packed_layer_norm.{{part}}", LAYER_NORM),
        *(
            Row(f"{layer}.self_attn.{theirs}.{{part}}", f"{to_layer}.attention.{ours}.{{part}}")
            for theirs, ours in _ATTENTION.items()
        ),
        *(
            Row(f"{layer}.{theirs}.{{part}}", f"{to_layer}.{ours}.{{part}}", LAYER_NORM)
            for theirs, ours in _LAYER_NORMS.items()
        ),
        Row(f"{layer}.fc1.{{part}}", f"{to_layer}.fc1.{{part}}"),
        Row(f"{layer}.fc2.{{part}}", f"{to_layer}.fc2.{{part}}"),
    ]


def luna_bert(head: str | None = None, other_heads: tuple[str, ...] = ()) -> KeyMap:
    """The map of a luna_bert file whose classification head `head` is converted and `other_heads` are not."""
    body, lm_head = "encoder.sentence_encoder", "encoder.lm_head"
    rows = [
        Row(f"{body}.embed_tokens.weight", "luna.embeddings.word_embeddings.weight"),
        *_encoder(body),
        Row(f"{lm_head}.{{part}}", "lm_head.decoder.{part}"),
        Row(f"{lm_head}.dense.{{part}}", "lm_head.dense.{part}"),
        Row(f"{lm_head}.layer_norm.{{part}}", "lm_head.layer_norm.{part}", LAYER_NORM),
    ]
    if head is not None:
        source = f"classification_heads.{head}"
        rows += [
            Row(f"{source}.in_proj.{{part}}", "pooler.dense.{part}"),
            *(
                Row(f"{source}.attn.{name}.{{part}}", f"pooler.attention.{name}.{{part}}")
                for name in ("q_proj", "k_proj", "v_proj", "out_proj")
            ),
            Row(f"{source}.layernorm.{{part}}", "pooler.layer_norm.{part}", LAYER_NORM),
            Row(f"{source}.dense.{{part}}", "classifier.dense.0.{part}"),
            Row(f"{source}.out_proj.{{part}}", "classifier.out_proj.{part}"),
        ]
    rows += [
        Row(f"classification_heads.{name}.{{rest}}", None, reason=f"head not chosen; --head {name} converts it")
        for name in other_heads
    ]
    return KeyMap(rows)


def luna_lra(revision: str, input_type: str = "tokens") -> KeyMap:
    """The map of a Luna LRA file of `revision` "r21" or "head"; `input_type` as in `LunaConfig`."""
    body = "encoder.encoder"
    embedding = {
        "tokens": Row(f"{body}.embed_tokens.weight", "luna.embeddings.word_embeddings.weight"),
        "values": Row(f"{body}.embed_tokens.{{part}}", "luna.embeddings.value_embeddings.{part}"),
    }
    classifier = {
        "r21": [Row("classifier.{n}.{part}", "classifier.dense.{n}.{part}")],
        "head": [
            Row("pre_logits.0.{part}", "classifier.dense.0.{part}"),
            Row(f"{body}.projected_positions", None, reason=_SINUSOIDS),
            Row(f"{body}.embed_positions._float_tensor", None, reason=_PLACEHOLDER),
        ],
    }
    return KeyMap(
        [
            embedding[input_type],
            *_encoder(body),
            *classifier[revision],
            Row("sentence_projection_layer.weight", "classifier.out_proj.weight"),
        ]
    )


def luna_seq2seq() -> KeyMap:
    """The map of a Luna encoder-decoder."""
    encoder, decoder = "luna.encoder", "luna.decoder"
    layer, to_layer = "decoder.layers.{layer}", f"{decoder}.decoder.layers.{{layer}}"
    attentions = {"self_attn": ("attention", _CAUSAL_ATTENTION), "encoder_attn": ("cross_attention", _ATTENTION)}
    norms = {
        "self_attn_layer_norm": "attention_layer_norm",
        "encoder_attn_layer_norm": "cross_attention_layer_norm",
        "encoder_atten_proj_layer_norm": "packed_layer_norm",
        "final_layer_norm": "final_layer_norm",
    }
    return KeyMap(
        [
            # The spelling is the original's.
            *_encoder("encoder", encoder, ("layernorm_embedding", "layernorm_porjected_embedding")),
            *(
                row
                for source, model in (("encoder", encoder), ("decoder", decoder))
                for row in (
                    Row(f"{source}.embed_tokens.weight", f"{model}.embeddings.word_embeddings.weight"),
                    Row(f"{source}.layer_norm.{{part}}", f"{model}.{source}.layer_norm.{{part}}", LAYER_NORM),
                    Row(
                        f"{source}.proj_layer_norm.{{part}}", f"{model}.{source}.packed_layer_norm.{{part}}", LAYER_NORM
                    ),
                    Row(f"{source}.embed_positions._float_tensor", None, reason=_PLACEHOLDER),
                    Row(f"{source}.version", None, reason="version of the file format"),
                )
            ),
            Row("decoder.layernorm_embedding.{part}", f"{decoder}.embeddings.layer_norm.{{part}}", LAYER_NORM),
            Row("encoder.projected_positions", None, reason=_SINUSOIDS),
            Row("decoder.embed_positions.weight", f"{decoder}.embeddings.position_embeddings.weight"),
            *(
                Row(f"{layer}.{source}.{theirs}.{{part}}", f"{to_layer}.{target}.{ours}.{{part}}")
                for source, (target, names) in attentions.items()
                for theirs, ours in names.items()
            ),
            *(
                Row(f"{layer}.{theirs}.{{part}}", f"{to_layer}.{ours}.{{part}}", LAYER_NORM)
                for theirs, ours in norms.items()
            ),
            Row(f"{layer}.fc1.{{part}}", f"{to_layer}.fc1.{{part}}"),
            Row(f"{layer}.fc2.{{part}}", f"{to_layer}.fc2.{{part}}"),
            Row("decoder.output_projection.weight", "lm_head.weight"),
        ]
    )
