"""Key maps of Mega files, in the order of the original. Data only; see keymap.py.

Which of `alpha` and `delta` weighs the input and which one damps depends on the branch, see ema_convention.py. Our
names are those of the Mega of transformers v4.
"""

from luna_mega import MegaConfig
from luna_mega.convert.ema_convention import ORDER
from luna_mega.convert.keymap import KeyMap, Row

BODY, LM_BODY = "encoder.encoder", "decoder"
LM_OUT, ADAPTIVE = f"{LM_BODY}.output_projection.weight", f"{LM_BODY}.adaptive_softmax"

_PLACEHOLDER = "placeholder buffer of the original, no content"
_PROJECTIONS = ("v_proj", "mx_proj", "h_proj")
_CROSS_PROJECTIONS = ("k_proj", "v_proj", "q_proj", "h_proj")
_NORM_PARTS = ("scalar", "weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_EMA = {
    "main": {"delta": "damping_factor", "alpha": "decay_factor"},
    "flash": {"alpha": "damping_factor", "delta": "decay_factor"},
}
_EMA_OF_BOTH = {"beta": "ema_expansion_matrix", "gamma": "kernel_projection_matrix", "omega": "residual_weight"}


def mega_lra(convention: str, input_type: str = "tokens", classifier_layers: int = 1) -> KeyMap:
    """The map of an LRA or speech file of branch `convention`; `input_type` as in `MegaConfig`."""
    embedding = {
        "tokens": Row(f"{BODY}.embed_tokens.embed.weight", "mega.embedding_layer.word_embeddings.weight"),
        "values": Row(f"{BODY}.embed_tokens.{{part}}", "mega.embedding_layer.value_embeddings.{part}"),
    }
    return KeyMap(
        [
            embedding[input_type],
            *_norm(f"{BODY}.embed_norm", "mega.embedding_norm"),
            *_layers(BODY, convention),
            *_norm(f"{BODY}.final_norm", "mega.final_norm"),
            Row("classifier.0.0.{part}", "classifier.dense.{part}"),
            *(
                Row(f"classifier.{index}.0.{{part}}", f"classifier.deeper.{index - 1}.{{part}}")
                for index in range(1, classifier_layers)
            ),
            Row("sentence_projection_layer.weight", "classifier.out_proj.weight"),
        ]
    )


def mega_lm(convention: str, config: MegaConfig) -> KeyMap:
    """The map of a language model of branch `convention`; bands and what is tied are those of `config`."""
    words = "mega.embedding_layer.word_embeddings"
    embedding = [Row(f"{LM_BODY}.embed_tokens.weight", f"{words}.weight")]
    if config.adaptive_input_cutoffs is not None:
        embedding = [Row(f"{LM_BODY}.embed_tokens._float_tensor", None, reason=_PLACEHOLDER)]
        for band in range(len(config.adaptive_input_cutoffs) + 1):
            source = f"{LM_BODY}.embed_tokens.embeddings.{band}"
            embedding.append(Row(f"{source}.0.weight", f"{words}.words.{band}.weight"))
            embedding.append(Row(f"{source}.1.weight", f"{words}.projections.{band}.weight"))
    head = [Row(LM_OUT, "lm_head.weight")]
    if config.adaptive_softmax_cutoffs is not None:
        head = _adaptive_softmax(config)
    return KeyMap(
        [
            Row(f"{LM_BODY}.version", None, reason=_PLACEHOLDER),
            *embedding,
            Row(f"{LM_BODY}.project_in_dim.weight", "mega.embedding_layer.projection.weight"),
            *_norm(f"{LM_BODY}.embed_norm", "mega.embedding_norm"),
            *_layers(LM_BODY, convention),
            *_norm(f"{LM_BODY}.final_norm", "mega.final_norm"),
            *head,
        ]
    )


def mega_seq2seq(convention: str, config: MegaConfig) -> KeyMap:
    """The map of an encoder-decoder of branch `convention`; what is one embedding is that of `config`."""
    rows = []
    for side in ("encoder", "decoder"):
        rows += [
            Row(f"{side}.version", None, reason=_PLACEHOLDER),
            Row(f"{side}.embed_tokens.weight", f"mega.{side}.embedding_layer.word_embeddings.weight"),
            *_norm(f"{side}.embed_norm", f"mega.{side}.embedding_norm"),
            *_layers(side, convention, f"mega.{side}", cross=side == "decoder"),
            *_norm(f"{side}.final_norm", f"mega.{side}.final_norm"),
        ]
    return KeyMap([*rows, Row(LM_OUT, "lm_head.weight")])


def tied_copies(config: MegaConfig) -> dict[str, str]:
    """Of a language model with tied adaptive softmax: tensors that are copies -> those that they are copies of."""
    if config.adaptive_softmax_cutoffs is None or not config.tie_word_embeddings:
        return {}
    bands = f"{LM_BODY}.embed_tokens.embeddings"
    copies = {_head_words(config): f"{bands}.0.0.weight"}
    for tail in range(len(config.adaptive_softmax_cutoffs)):
        if config.tie_adaptive_projections:
            copies[f"{ADAPTIVE}.tail.{tail}.0.weight"] = f"{bands}.{tail + 1}.1.weight"
        copies[f"{ADAPTIVE}.tail.{tail}.2.weight"] = f"{bands}.{tail + 1}.0.weight"
    return copies


def placeholders(config: MegaConfig) -> list[str]:
    """The buffers of a language model that have no content; those named `version` hold the number of a layout."""
    names = [f"{LM_BODY}.version"]
    if config.adaptive_input_cutoffs is not None:
        names.append(f"{LM_BODY}.embed_tokens._float_tensor")
    if config.adaptive_softmax_cutoffs is not None:
        names.append(f"{ADAPTIVE}.version")
        names += [f"{ADAPTIVE}.head._float_tensor"] * config.tie_word_embeddings
    return names + bias_placeholders(LM_BODY, config)


def seq2seq_placeholders(config: MegaConfig) -> list[str]:
    """The same of an encoder-decoder."""
    names = ["encoder.version", "decoder.version", *bias_placeholders("encoder", config.encoder_config)]
    for name in bias_placeholders("decoder", config.decoder_config):
        names += [name, name.replace(".mega_layer.", ".cross_attn.")]
    return names


def bias_placeholders(body: str, config: MegaConfig) -> list[str]:
    """The buffers of a rotary bias under `body` that have no content."""
    layers = range(config.num_hidden_layers if config.relative_positional_bias == "rotary" else 0)
    return [f"{body}.layers.{index}.mega_layer.rel_pos_bias._float_tensor" for index in layers]


def _head_words(config: MegaConfig) -> str:
    projected = config.embedding_size != config.hidden_size
    return f"{ADAPTIVE}.head.word_proj.{'1.' if projected else ''}weight"


def _adaptive_softmax(config: MegaConfig) -> list[Row]:
    rows = [
        Row(f"{ADAPTIVE}.version", None, reason=_PLACEHOLDER),
        Row(f"{ADAPTIVE}.head._float_tensor", None, reason=_PLACEHOLDER),
    ]
    if config.tie_word_embeddings:
        names = {
            f"{ADAPTIVE}.head.word_proj.0.weight": "lm_head.head_projection.weight",
            _head_words(config): None,
            f"{ADAPTIVE}.head.class_proj.weight": "lm_head.head.weight",
        }
    else:
        names = {f"{ADAPTIVE}.head.weight": "lm_head.head.weight"}
    for tail in range(len(config.adaptive_softmax_cutoffs)):
        names[f"{ADAPTIVE}.tail.{tail}.0.weight"] = f"lm_head.projections.{tail}.weight"
        names[f"{ADAPTIVE}.tail.{tail}.2.weight"] = f"lm_head.words.{tail}.weight"
    tied = tied_copies(config)
    for source, target in names.items():
        rows.append(Row(source, None, reason="tied to the embedding") if source in tied else Row(source, target))
    return rows


def _layers(body: str, convention: str, model: str = "mega", cross: bool = False) -> list[Row]:
    """The layers under `body` in the file and under `model` here; `cross`: they have cross-attention."""
    layer, to_layer = f"{body}.layers.{{layer}}", f"{model}.layers.{{layer}}"
    ema = _EMA[convention] | _EMA_OF_BOTH
    attention, to_attention = f"{layer}.mega_layer", f"{to_layer}.mega_layer"
    return [
        Row(f"{attention}.gamma", f"{to_attention}.qk_weight"),
        Row(f"{attention}.beta", f"{to_attention}.qk_bias"),
        *_norm(f"{attention}.norm", f"{to_attention}.norm"),
        *(Row(f"{attention}.move.{name}", f"{to_attention}.ema_gate.{ema[name]}") for name in ORDER[convention]),
        *(Row(f"{attention}.{name}.{{part}}", f"{to_attention}.{name}.{{part}}") for name in _PROJECTIONS),
        *_bias(attention, to_attention),
        *(_cross_attention(f"{layer}.cross_attn", f"{to_layer}.cross_attn") if cross else []),
        *_norm(f"{layer}.nffn.norm", f"{to_layer}.nffn.norm"),
        *(Row(f"{layer}.nffn.{name}.{{part}}", f"{to_layer}.nffn.{name}.{{part}}") for name in ("fc1", "fc2")),
    ]


def _cross_attention(source: str, target: str) -> list[Row]:
    return [
        *_norm(f"{source}.norm", f"{target}.norm"),
        *(Row(f"{source}.{name}.{{part}}", f"{target}.{name}.{{part}}") for name in _CROSS_PROJECTIONS),
        *_bias(source, target),
    ]


def _bias(source: str, target: str) -> list[Row]:
    return [
        Row(f"{source}.rel_pos_bias.rel_pos_bias", f"{target}.rel_pos_bias.rel_pos_bias"),
        Row(f"{source}.rel_pos_bias.alpha", f"{target}.rel_pos_bias.alpha"),
        Row(f"{source}.rel_pos_bias.beta", f"{target}.rel_pos_bias.b_param"),
        Row(f"{source}.rel_pos_bias._float_tensor", None, reason=_PLACEHOLDER),
    ]


def _norm(source: str, target: str) -> list[Row]:
    return [Row(f"{source}.norm.{part}", f"{target}.norm.{part}") for part in _NORM_PARTS]
