"""Common parts of the formats of Luna: arguments, names and sinusoids of an encoder."""

from collections.abc import Callable

import torch

from luna_mega import LunaConfig
from luna_mega.convert.evidence import Evidence, flag, number, size, word
from luna_mega.convert.keymap import LAYER_NORM, Row, rows
from luna_mega.convert.table import ACTIVATIONS, NOT, Arg, Table, derived, size_of
from luna_mega.errors import ConversionError
from luna_mega.modeling_luna.modeling_luna import sinusoids
from luna_mega.modeling_luna.presets_luna import BERT_RANGE

# Revisions of the code, with their names in conversion reports: the published models, and the last commit.
CODE_2021, CODE_2023 = "r21", "head"
REVISIONS = {CODE_2021: "2021 code", CODE_2023: "2023 code"}
SINUSOIDS = "sinusoids of P: checked against the formula, not stored"
PLACEHOLDER = "placeholder buffer of the original, no content"
ATTENTION = {"pq_proj": "pack_query", "pc_proj": "pack_key_value", "pk_proj": "pack_key", "pv_proj": "pack_value"}
ATTENTION |= {"q_proj": "query", "c_proj": "key_value", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
_LAYER_NORMS = {
    "self_attn_layer_norm": "attention_layer_norm",
    "self_atten_proj_layer_norm": "packed_layer_norm",  # the spelling is the original's
    "final_layer_norm": "final_layer_norm",
}


# New heads are initialized with this value. The default of the field depends on the width.
INITIALIZER = derived("initializer_range", lambda evidence: BERT_RANGE)
FACTS = {
    "config_class": LunaConfig,
    "unsupported_options": {"ema-convention": "Luna has no moving average"},
}


def encoder_rows(
    source: str, model: str = "luna", norms: tuple[str, str] = ("emb_layer_norm", "proj_emb_layer_norm")
) -> list[Row]:
    """Return the rows of an encoder without its input embedding.

    The prefix is `source` in the file and `model` in the model. `norms` are names of the norms of embeddings and P.
    """
    embeddings, layer = f"{model}.embeddings", f"{source}.layers.{{layer}}"
    to_layer, (norm, packed_norm) = f"{model}.encoder.layers.{{layer}}", norms
    return [
        Row(f"{source}.projected_embeddings", f"{embeddings}.packed_embeddings"),
        Row(f"{source}.embed_positions.weight", f"{embeddings}.position_embeddings.weight"),
        *rows(source, embeddings, {norm: "layer_norm", packed_norm: "packed_layer_norm"}, LAYER_NORM),
        *rows(f"{layer}.self_attn", f"{to_layer}.attention", ATTENTION),
        *rows(layer, to_layer, _LAYER_NORMS, LAYER_NORM),
        *rows(layer, to_layer, ("fc1", "fc2")),
    ]


def encoder_arguments(body: str, layers: Callable, width: Callable, positions: Callable) -> Table:
    """Return the rows of the common arguments of encoders; `layers`, `width` and `positions` return values."""
    return (
        Arg("encoder_layers", "num_hidden_layers", read=layers, kind=size),
        Arg("encoder_embed_dim", "hidden_size", read=width, kind=size),
        Arg("encoder_ffn_embed_dim", "intermediate_size", read=feed_forward(body), kind=size),
        Arg("encoder_attention_heads", "num_attention_heads", kind=size),
        Arg("max_positions", "max_position_embeddings", read=positions, kind=size),
        Arg("activation_fn", "hidden_act", ACTIVATIONS, "gelu", kind=word),
        Arg("dropout", "dropout", default=0.1, kind=number),
        Arg("attention_dropout", "attention_dropout", default=0.1, kind=number),
        INITIALIZER,
    )


def feed_forward(body: str) -> Callable[[Evidence], int]:
    """Return a function that reads the feed-forward width from the layers under `body`."""
    return size_of(f"{body}.layers.0.fc1.weight", "ffn width", "width")


def positions(body: str) -> Callable[[Evidence], int]:
    """Return a function that counts the learned positions under `body`, without the first two rows."""
    return lambda evidence: evidence.shape(f"{body}.embed_positions.weight", "positions + 2", "width")[0] - 2


def packed_length(body: str) -> Callable[[Evidence], int]:
    """Return a function that counts the rows of P under `body`."""
    return size_of(f"{body}.projected_embeddings", "projection length", "width")


def tied_key_value(evidence: Evidence) -> bool:
    """Return whether keys and values share one projection, in place of `pk_proj` and `pv_proj`."""
    return not any(".self_attn.pk_proj." in key for key in evidence.tensors)


# Rows of luna_bert and luna_seq2seq.
PACKED_LENGTH_FIXED = Arg("fix_projection_length", "dynamic_projection_length", NOT, False, kind=flag)
UNTIED_KEY_VALUE = Arg(
    "untie_luna_kv", "tie_key_value", NOT, read=lambda evidence: not tied_key_value(evidence), kind=flag
)


def check_sinusoids(evidence: Evidence, key: str) -> None:
    """Raise `ConversionError` if the tensor `key` differs from the sinusoids of P in the model."""
    if key not in evidence.tensors:
        return
    length, width = evidence.shape(key, "projection length", "width")
    saved = evidence.tensors[key]
    tolerance = 1e-4 if saved.dtype in (torch.float32, torch.float64) else 1e-2
    if not torch.allclose(saved.float(), sinusoids(torch.arange(length), width), rtol=0, atol=tolerance):
        raise ConversionError(f"tensor {key!r} is not the sinusoids of the original; the model cannot reproduce it")


def sinusoid_rows(body: str) -> list[Row]:
    """Return the rows of the buffers of sinusoidal positions under `body`."""
    return [
        Row(f"{body}.embed_positions._float_tensor", None, reason=PLACEHOLDER),
        Row(f"{body}.projected_positions", None, reason=SINUSOIDS),
    ]
