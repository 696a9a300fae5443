"""Key map of the Mega encoders of LRA and raw speech, in the order of the original. Data only; see keymap.py.

Which of `alpha` and `delta` weighs the input and which one damps depends on the branch, see ema_convention.py. Our
names are those of the Mega of transformers v4.
"""

from luna_mega.convert.ema_convention import ORDER
from luna_mega.convert.keymap import KeyMap, Row

BODY = "encoder.encoder"
FLOAT_TENSOR = "mega_layer.rel_pos_bias._float_tensor"

_PROJECTIONS = ("v_proj", "mx_proj", "h_proj")
_NORM_PARTS = ("scalar", "weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_EMA = {
    "main": {"delta": "damping_factor", "alpha": "decay_factor"},
    "flash": {"alpha": "damping_factor", "delta": "decay_factor"},
}
_EMA_OF_BOTH = {"beta": "ema_expansion_matrix", "gamma": "kernel_projection_matrix", "omega": "residual_weight"}


def mega_lra(convention: str, input_type: str = "tokens", classifier_layers: int = 1) -> KeyMap:
    """The map of a file of branch `convention`; `input_type` as in `MegaConfig`."""
    layer, to_layer = f"{BODY}.layers.{{layer}}", "mega.layers.{layer}"
    embedding = {
        "tokens": Row(f"{BODY}.embed_tokens.embed.weight", "mega.embedding_layer.word_embeddings.weight"),
        "values": Row(f"{BODY}.embed_tokens.{{part}}", "mega.embedding_layer.value_embeddings.{part}"),
    }
    ema = _EMA[convention] | _EMA_OF_BOTH
    attention, to_attention = f"{layer}.mega_layer", f"{to_layer}.mega_layer"
    return KeyMap(
        [
            embedding[input_type],
            *_norm(f"{BODY}.embed_norm", "mega.embedding_norm"),
            Row(f"{attention}.gamma", f"{to_attention}.qk_weight"),
            Row(f"{attention}.beta", f"{to_attention}.qk_bias"),
            *_norm(f"{attention}.norm", f"{to_attention}.norm"),
            *(Row(f"{attention}.move.{name}", f"{to_attention}.ema_gate.{ema[name]}") for name in ORDER[convention]),
            *(Row(f"{attention}.{name}.{{part}}", f"{to_attention}.{name}.{{part}}") for name in _PROJECTIONS),
            Row(f"{attention}.rel_pos_bias.rel_pos_bias", f"{to_attention}.rel_pos_bias.rel_pos_bias"),
            Row(f"{attention}.rel_pos_bias.alpha", f"{to_attention}.rel_pos_bias.alpha"),
            Row(f"{attention}.rel_pos_bias.beta", f"{to_attention}.rel_pos_bias.b_param"),
            Row(f"{layer}.{FLOAT_TENSOR}", None, reason="placeholder buffer of the original, no content"),
            *_norm(f"{layer}.nffn.norm", f"{to_layer}.nffn.norm"),
            *(Row(f"{layer}.nffn.{name}.{{part}}", f"{to_layer}.nffn.{name}.{{part}}") for name in ("fc1", "fc2")),
            *_norm(f"{BODY}.final_norm", "mega.final_norm"),
            Row("classifier.0.0.{part}", "classifier.dense.{part}"),
            *(
                Row(f"classifier.{index}.0.{{part}}", f"classifier.deeper.{index - 1}.{{part}}")
                for index in range(1, classifier_layers)
            ),
            Row("sentence_projection_layer.weight", "classifier.out_proj.weight"),
        ]
    )


def _norm(source: str, target: str) -> list[Row]:
    return [Row(f"{source}.norm.{part}", f"{target}.norm.{part}") for part in _NORM_PARTS]
