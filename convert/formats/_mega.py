"""Common parts of the formats of Mega: arguments of the layers, and names of the tensors.

The two branches of the code swap the names of the input weight and the damping, see conventions.py. The names in the
model match Mega in transformers v4.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from luna_mega import MegaConfig
from luna_mega.convert.conventions import ORDER, order_of
from luna_mega.convert.evidence import Evidence, flag, integer, number, size, word
from luna_mega.convert.formats.format import Format
from luna_mega.convert.keymap import Row, rows
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.table import ACTIVATIONS, NOT, Arg, Table
from luna_mega.errors import ConversionError

DECIDED = tuple(
    "normalization_type normalize_before_mega attention_activation relative_positional_bias attention_chunk "
    "truncation".split()
)
# The first of these parts in a norm determines its kind.
_NORMS = {"scalar": "scalenorm", "running_mean": "batchnorm", "bias": "layernorm", "weight": "rmsnorm"}
_NORM_PARTS = ("scalar", "weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_EMA = {
    "main": {"delta": "damping_factor", "alpha": "decay_factor"},
    "flash": {"alpha": "damping_factor", "delta": "decay_factor"},
}
_EMA_OF_BOTH = {"beta": "ema_expansion_matrix", "gamma": "kernel_projection_matrix", "omega": "residual_weight"}


REVISIONS = {branch: f"branch {branch}" for branch in ORDER}
FACTS = {
    "config_class": MegaConfig,
    "unsupported_options": {"layer-norm": "Mega stores norm weights as they are"},
}


class MegaFormat(Format):
    """A format whose revisions are the branches of the Mega code."""

    def recognize(self, file: Checkpoint) -> str:
        return order_of(file.tensors) or "unknown"


class Stack:
    """Rows of the layers of an encoder or decoder, and sizes in their tensors.

    Args:
        body: Prefix of the encoder or decoder in the file.
        layers: Prefix of the layers; None for `{body}.layers`.
    """

    def __init__(self, body: str, layers: str | None = None):
        self.body, self._layers = body, layers or f"{body}.layers"
        self._attention = f"{self._layers}.0.mega_layer"

    def sizes(
        self,
        side: str,
        width: Callable[[Evidence], int],
        field: Callable[[str], str] = lambda name: name,
        short: str | None = None,
    ) -> Table:
        """Return the rows of the sizes of a side, "encoder" or "decoder".

        `field` returns the name of a field on this side, and `short` is the prefix of `z_dim`, `n_dim` and `chunk_size`
        if it differs from `side`.
        """
        layers, short = f"{side}_layers", f"{side}_" if short is None else short
        depth = partial(Evidence.unshared_layers, prefix=self._layers, name=layers)
        return (
            Arg(layers, field("num_hidden_layers"), read=depth, kind=size),
            Arg(f"{side}_embed_dim", "hidden_size", read=width, kind=size),
            Arg(f"{side}_hidden_dim", field("intermediate_size"), read=self.values, kind=size),
            self.feed_forward(f"{side}_ffn_embed_dim", field("nffn_hidden_size")),
            Arg(f"{short}z_dim", field("shared_representation_size"), read=self.shared, kind=size),
            Arg(f"{short}n_dim", field("ema_projection_size"), read=self.dimensions, kind=size),
            self.chunk(f"{short}chunk_size", field("chunk_size")),
        )

    def values(self, evidence: Evidence) -> int:
        return evidence.shape(f"{self._attention}.v_proj.weight", "value width", "width")[0]

    def shared(self, evidence: Evidence) -> int:
        return evidence.shape(f"{self._attention}.gamma", "2", "z")[1]

    def dimensions(self, evidence: Evidence) -> int:
        """Return the number of dimensions of the moving average."""
        return evidence.shape(f"{self._attention}.move.gamma", "rows", "n")[1]

    def feed_forward(self, name: str, field: str = "nffn_hidden_size") -> Arg:
        """Return the row of the feed-forward width; 0 disables the feed-forward layers."""

        def read(evidence: Evidence) -> dict[str, Any]:
            present = any(key.startswith(f"{self.body}.") and ".nffn." in key for key in evidence.tensors)
            if not present and (evidence.args.get(name) or 0) < 1:
                return {"use_normalized_ffn": False}
            width, _ = evidence.shape(f"{self._layers}.0.nffn.fc1.weight", "ffn width", "width")
            return {field: evidence.prefer(name, width)}

        return Arg(name, field, read=read, kind=integer)

    def chunk(self, name: str, field: str = "chunk_size") -> Arg:
        """Return the row of the chunk length, which is also the length of a table of positions."""

        def read(evidence: Evidence) -> dict[str, Any]:
            chunk, entries = evidence.arg(name), self._entries(evidence)
            if entries is not None and chunk > 0:
                chunk = evidence.prefer(name, entries)
            if field != "chunk_size":
                return {field: chunk if chunk > 0 else -1}
            return {"use_chunking": chunk > 0, "chunk_size": chunk if chunk > 0 else -1}

        return Arg(name, field, default=-1, read=read, kind=integer)

    def positions(self, name: str, chunk: str, field: str = "max_positions", **options: Any) -> Arg:
        """Return the row of the number of positions: the size of the table unless the argument `chunk` is positive."""

        def read(evidence: Evidence) -> int:
            positions, entries = evidence.arg(name), self._entries(evidence)
            return positions if entries is None or evidence.arg(chunk) > 0 else entries

        return Arg(name, field, read=read, kind=size, **options)

    def bias(self, evidence: Evidence) -> str:
        """Return the kind of relative positional bias."""
        return "rotary" if self._entries(evidence) is None else "simple"

    def norm_type(self, name: str) -> Arg:
        """Return the row of the kind of norms."""

        def read(evidence: Evidence) -> str:
            prefix = f"{self._attention}.norm.norm"
            kind = next((kind for part, kind in _NORMS.items() if f"{prefix}.{part}" in evidence.tensors), None)
            if kind is None:
                raise ConversionError(f"there is no tensor '{prefix}.*'; the file is incomplete")
            synchronized = kind == "batchnorm" and evidence.args.get(name) == "syncbatchnorm"
            return "syncbatchnorm" if synchronized else kind  # both kinds have the same tensors

        return Arg(name, "normalization_type", read=read, kind=word)

    def normalize_before(self, name: str) -> Arg:
        """Return the row of the position of the norms; pre-norm models have a final norm."""

        def read(evidence: Evidence) -> dict[str, bool]:
            before = evidence.prefer(name, self._has_norm(evidence, name, "final_norm"))
            return dict.fromkeys(("normalize_before_mega", "normalize_before_ffn", "final_norm"), before)

        return Arg(name, "normalize_before_mega", read=read, kind=flag)

    def normalize_embedding(self) -> Arg:
        """Return the row of the norm of the embeddings."""
        name = "normalize_embedding"
        return Arg(
            name, "embedding_norm", read=lambda evidence: self._has_norm(evidence, name, "embed_norm"), kind=flag
        )

    def affine_final_norm(self) -> Arg:
        """Return the row of a final norm without parameters; tensors override the argument."""

        def read(evidence: Evidence) -> bool:
            present = any(f"{self.body}.final_norm.norm.{part}" in evidence.tensors for part in ("scalar", "weight"))
            return bool(evidence.args.get("no_affine_final_norm")) and not present

        return Arg("no_affine_final_norm", "final_norm_affine", NOT, read=read, kind=flag)

    def _entries(self, evidence: Evidence) -> int | None:
        """Return the length of the table of a simple bias, or None if there is no table."""
        table = f"{self._attention}.rel_pos_bias.rel_pos_bias"
        if table not in evidence.tensors:
            return None
        return (evidence.shape(table, "2 positions - 1")[0] + 1) // 2

    def _has_norm(self, evidence: Evidence, name: str, norm: str) -> bool:
        """Return whether the model has this norm.

        If the args require a norm that the file lacks, the key map raises an error.
        """
        # The argument comes first, because a norm without parameters has no tensor.
        return bool(evidence.args.get(name)) or any(key.startswith(f"{self.body}.{norm}.") for key in evidence.tensors)


def _truncation(evidence: Evidence) -> dict[str, int | None]:
    name = "truncation_length"
    length = evidence.args.get(name, evidence.defaults.get(name))  # in the args, None means no truncation
    return {"truncation": None if length is None or length < 1 else length}


TRUNCATION = Arg("truncation_length", "truncation", read=_truncation, kind=integer)
ACTIVATION_FUNCTION = Arg("activation_fn", "activation", ACTIVATIONS, kind=word)
FEATURE_DROPOUT = Arg("feature_dropout", "use_feature_dropout", default=False, kind=flag)


def options(stack: Stack, truncation: int = 1024) -> Table:
    """Return the common options of language models and translation; `truncation` is the default of their length."""
    return (
        replace(TRUNCATION, default=truncation),
        Arg("rel_pos_bias", "relative_positional_bias", read=stack.bias, kind=word),
        replace(ACTIVATION_FUNCTION, default="silu"),
        Arg("attention_activation_fn", "attention_activation", default="softmax", kind=word),
        stack.norm_type("normalization_type"),
        stack.normalize_before("normalize_before"),
        stack.normalize_embedding(),
        stack.affine_final_norm(),
        Arg("no_scale_embedding", "scale_embedding", NOT, False, kind=flag),
        FEATURE_DROPOUT,
        Arg("dropout", "dropout_prob", default=0.1, kind=number),
        Arg("attention_dropout", "attention_probs_dropout_prob", default=0.0, kind=number),
        Arg("hidden_dropout", "hidden_dropout_prob", default=0.0, kind=number),
        Arg("activation_dropout", "nffn_activation_dropout_prob", default=0.0, kind=number),
    )


def placeholder_row(source: str) -> Row:
    """Return the row of a buffer that the model lacks."""
    return Row(source, None, reason="placeholder buffer of the original, no content")


def layer_rows(body: str, revision: str, model: str = "mega", cross: bool = False) -> list[Row]:
    """Return the rows of an encoder or decoder; `cross` adds cross-attention."""
    return [
        *norm_rows(f"{body}.embed_norm", f"{model}.embedding_norm"),
        *block_rows(f"{body}.layers.{{layer}}", f"{model}.layers.{{layer}}", revision, cross),
        *norm_rows(f"{body}.final_norm", f"{model}.final_norm"),
    ]


def block_rows(layer: str, to_layer: str, revision: str, cross: bool = False) -> list[Row]:
    """Return the rows of a layer with the prefix `layer` in the file and `to_layer` in the model."""
    ema = _EMA[revision] | _EMA_OF_BOTH
    attention, to_attention = f"{layer}.mega_layer", f"{to_layer}.mega_layer"
    source, target = f"{layer}.cross_attn", f"{to_layer}.cross_attn"
    cross_attention = [
        *norm_rows(f"{source}.norm", f"{target}.norm"),
        *rows(source, target, ("k_proj", "v_proj", "q_proj", "h_proj")),
        *_bias_rows(source, target),
    ]
    return [
        Row(f"{attention}.gamma", f"{to_attention}.qk_weight"),
        Row(f"{attention}.beta", f"{to_attention}.qk_bias"),
        *norm_rows(f"{attention}.norm", f"{to_attention}.norm"),
        *(Row(f"{attention}.move.{name}", f"{to_attention}.ema_gate.{ema[name]}") for name in ORDER[revision]),
        *rows(attention, to_attention, ("v_proj", "mx_proj", "h_proj")),
        *_bias_rows(attention, to_attention),
        *(cross_attention if cross else ()),
        *norm_rows(f"{layer}.nffn.norm", f"{to_layer}.nffn.norm"),
        *rows(f"{layer}.nffn", f"{to_layer}.nffn", ("fc1", "fc2")),
    ]


def _bias_rows(source: str, target: str) -> list[Row]:
    return [
        Row(f"{source}.rel_pos_bias.rel_pos_bias", f"{target}.rel_pos_bias.rel_pos_bias"),
        Row(f"{source}.rel_pos_bias.alpha", f"{target}.rel_pos_bias.alpha"),
        Row(f"{source}.rel_pos_bias.beta", f"{target}.rel_pos_bias.b_param"),
        placeholder_row(f"{source}.rel_pos_bias._float_tensor"),
    ]


def norm_rows(source: str, target: str) -> list[Row]:
    return [Row(f"{source}.norm.{part}", f"{target}.norm.{part}") for part in _NORM_PARTS]
