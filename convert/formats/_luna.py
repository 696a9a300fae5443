"""Common parts of the formats of Luna: names of an encoder's tensors, its arguments, and its sinusoids."""

from collections.abc import Callable

import torch

from luna_mega import LunaConfig
from luna_mega.convert.argtypes import flag, number, size, word
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.formats.format import Revision
from luna_mega.convert.keymap import LAYER_NORM, Row
from luna_mega.convert.table import ACTIVATION, COMMON, FAIRSEQ_ACTIVATIONS, NOT, Arg, Table, fixed, limited, written
from luna_mega.convert.target import Target
from luna_mega.errors import ConversionError
from luna_mega.modeling_luna.positions_luna import sinusoids

SINUSOIDS = "sinusoids of P: checked against the formula, not stored"
PLACEHOLDER = "placeholder buffer of the original, no content"
ATTENTION = {
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


FACTS = {
    "config_class": LunaConfig,
    "way_out": "to export the encoder alone, load the folder as LunaModel and save that",
    "refused": {"ema-convention": "Luna has no moving average"},
    "training_fields": (
        "dropout",
        "attention_dropout",
        "activation_dropout",
        "word_dropout",
        "layerdrop",
        "classifier_dropout",
        "problem_type",
    ),
}


def code_of_2021(name: str) -> Revision:
    """Return the words for the code of the paper; `name` is the format in words."""
    return Revision(name, "2021 code", "the 2021 fairseq code")


def code_of_2023(name: str) -> Revision:
    """Return the words for the later code; `name` is the format in words."""
    return Revision(name, "2023 code", "the 2023 fairseq code")


def encoder_rows(
    source: str, model: str = "luna", norms: tuple[str, str] = ("emb_layer_norm", "proj_emb_layer_norm")
) -> list[Row]:
    """Return the rows of an encoder without its input embedding.

    `source` is its prefix in the file, `model` the prefix of `LunaModel`; `norms` names the norms of embeddings and P.
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
            for theirs, ours in ATTENTION.items()
        ),
        *(
            Row(f"{layer}.{theirs}.{{part}}", f"{to_layer}.{ours}.{{part}}", LAYER_NORM)
            for theirs, ours in _LAYER_NORMS.items()
        ),
        Row(f"{layer}.fc1.{{part}}", f"{to_layer}.fc1.{{part}}"),
        Row(f"{layer}.fc2.{{part}}", f"{to_layer}.fc2.{{part}}"),
    ]


def encoder_arguments(body: str, layers: Callable, width: Callable, positions: Arg) -> Table:
    """Return the rows of the arguments that all encoders have.

    Args:
        body: the prefix of the encoder in the file.
        layers, width: the measures of the number of layers and of the width.
        positions: the row of `max_positions`.
    """
    return (
        *COMMON,
        Arg("encoder_layers", "num_hidden_layers", measure=layers, kind=size),
        Arg("encoder_embed_dim", "hidden_size", measure=width, kind=size),
        Arg("encoder_ffn_embed_dim", "intermediate_size", measure=feed_forward(body), kind=size),
        Arg("encoder_attention_heads", "num_attention_heads", kind=size),
        positions,
        written("tokens_per_sample", "max_position_embeddings", kind=size),
        Arg("activation_fn", "hidden_act", ACTIVATION, "gelu", kind=word, only=activations),
        Arg("dropout", "dropout", default=0.1, kind=number),
        Arg("attention_dropout", "attention_dropout", default=0.1, kind=number),
        fixed("stop_min_lr", -1, revision="head"),  # only the 2023 code has this option
    )


def feed_forward(body: str) -> Callable[[Evidence], int]:
    """Return the measure of the feed-forward width of the layers under `body`."""
    return lambda evidence: evidence.shape(f"{body}.layers.0.fc1.weight", "ffn width", "width")[0]


def packed_length(body: str) -> Callable[[Evidence], int]:
    """Return the measure of the number of rows of P under `body`."""
    return lambda evidence: evidence.shape(f"{body}.projected_embeddings", "projection length", "width")[0]


def tied_key_value(evidence: Evidence) -> bool:
    """Return whether keys and values share one projection, so that there are no `pk_proj` and `pv_proj`."""
    return not any(".self_attn.pk_proj." in key for key in evidence.tensors)


# Rows that luna_bert and translation have.
PACKED_LENGTH_FIXED = Arg("fix_projection_length", "dynamic_projection_length", NOT, False, kind=flag)
UNTIED_KEY_VALUE = Arg(
    "untie_luna_kv", "tie_key_value", NOT, measure=lambda evidence: not tied_key_value(evidence), kind=flag
)


def activations(target: Target) -> tuple[str, ...]:
    """Return the activations of a revision. In the 2023 code `silu` replaced `tanh`; files from between have either."""
    return tuple(name for name in FAIRSEQ_ACTIVATIONS if target.revision == "head" or name != "silu")


def check_sinusoids(evidence: Evidence, key: str) -> None:
    """Raise an error if the saved sinusoids of P, tensor `key`, differ from those of the model."""
    if key not in evidence.tensors:
        return
    length, width = evidence.shape(key, "projection length", "width")
    saved = evidence.tensors[key]
    tolerance = 1e-4 if saved.dtype in (torch.float32, torch.float64) else 1e-2
    if not torch.allclose(saved.float(), sinusoids(torch.arange(length), width), rtol=0, atol=tolerance):
        raise ConversionError(f"tensor {key!r} is not the sinusoids of the original; the model cannot reproduce it")


def sinusoid_rows(body: str, config: LunaConfig) -> list[Row]:
    """Return the rows of the buffers that the original saves under `body` if positions are sinusoidal."""

    def table(dtype: torch.dtype) -> torch.Tensor:
        return sinusoids(torch.arange(config.projection_length), config.hidden_size).to(dtype)

    sinusoidal = config.position_embedding_type == "sinusoidal"
    packs = sinusoidal and not config.add_cross_attention
    return [
        Row(
            f"{body}.embed_positions._float_tensor", None, reason=PLACEHOLDER, fill=placeholder if sinusoidal else None
        ),
        Row(f"{body}.projected_positions", None, reason=SINUSOIDS, fill=table if packs else None),
    ]


def placeholder(dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer without content."""
    return torch.zeros(1, dtype=dtype)


def _padding(target: Target) -> tuple[int, ...]:
    return (1,) if target.config.input_type == "tokens" else (target.config.pad_token_id,)


LIMITS = (
    limited("contextual_projection", (True,)),
    limited("pack_method", ("attention",)),
    limited("position_extension", (None,)),
    limited("pad_token_id", _padding),
    limited("first_position", (None,)),
    limited("type_vocab_size", (0,)),
    limited("embedding_size", lambda target: (target.config.hidden_size,)),
)
