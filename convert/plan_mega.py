"""What the plans of all Mega files share: the layers, of an encoder or a decoder."""

from dataclasses import dataclass

from luna_mega.convert.evidence import Evidence
from luna_mega.errors import ConversionError

# The first of these that a norm has tells its kind.
_NORMS = {"scalar": "scalenorm", "running_mean": "batchnorm", "bias": "layernorm", "weight": "rmsnorm"}
DECIDED = (
    "normalization_type",
    "normalize_before_mega",
    "attention_activation",
    "relative_positional_bias",
    "attention_chunk",
    "truncation",
)


@dataclass(frozen=True)
class Stack:
    """Where a kind of file has its layers (`body`), and what its args call their sizes and options."""

    body: str
    layers: str
    width: str
    values: str
    ffn: str
    shared: str
    dimensions: str
    chunk: str
    positions: str
    norm: str
    before: str
    hidden_dropout: str
    ffn_dropout: str

    @property
    def first(self) -> str:
        return f"{self.body}.layers.0"


def layer_fields(evidence: Evidence, stack: Stack, width: int) -> dict:
    """Fields of the layers: sizes, activations, dropout, norms, positions.

    Args:
        width: what the embeddings say.

    Raises:
        ConversionError: args and tensors contradict each other, or the file is incomplete.
    """
    values, _ = evidence.shape(f"{stack.first}.mega_layer.v_proj.weight", "value width", "width")
    _, shared = evidence.shape(f"{stack.first}.mega_layer.gamma", "2", "z")
    _, dimensions = evidence.shape(f"{stack.first}.mega_layer.move.gamma", "rows", "n")
    fields = {
        "hidden_size": evidence.prefer(stack.width, width),
        "num_hidden_layers": evidence.unshared_layers(f"{stack.body}.layers", stack.layers),
        "intermediate_size": evidence.prefer(stack.values, values),
        "shared_representation_size": evidence.prefer(stack.shared, shared),
        "ema_projection_size": evidence.prefer(stack.dimensions, dimensions),
        "activation": evidence.activation("activation_fn"),
        "attention_activation": evidence.arg("attention_activation_fn"),
        "dropout_prob": evidence.arg("dropout"),
        "attention_probs_dropout_prob": evidence.arg("attention_dropout"),
        "hidden_dropout_prob": evidence.arg(stack.hidden_dropout),
        "nffn_activation_dropout_prob": evidence.arg(stack.ffn_dropout),
        "use_feature_dropout": evidence.arg("feature_dropout"),
    }
    return fields | _feed_forward(evidence, stack) | _norms(evidence, stack) | _positions(evidence, stack)


def _feed_forward(evidence: Evidence, stack: Stack) -> dict:
    there = any(key.startswith(f"{stack.body}.") and ".nffn." in key for key in evidence.tensors)
    if not there and (evidence.args.get(stack.ffn) or 0) < 1:
        return {"use_normalized_ffn": False}
    ffn, _ = evidence.shape(f"{stack.first}.nffn.fc1.weight", "ffn width", "width")
    return {"nffn_hidden_size": evidence.prefer(stack.ffn, ffn)}


def _norms(evidence: Evidence, stack: Stack) -> dict:
    """Kind and places of the norms; where args ask for one that is not there, the file is reported as incomplete."""
    before = _asked_or_there(evidence, stack.before, f"{stack.body}.final_norm.")
    return {
        "normalization_type": _norm_type(evidence, stack),
        "normalize_before_mega": before,
        "normalize_before_ffn": before,
        "final_norm": before,
        "final_norm_affine": _final_norm_affine(evidence, stack),
        "embedding_norm": _asked_or_there(evidence, "normalize_embedding", f"{stack.body}.embed_norm."),
    }


def _asked_or_there(evidence: Evidence, name: str, prefix: str) -> bool:
    if evidence.args.get(name):
        return True  # of a norm without parameters there may be nothing
    return evidence.prefer(name, any(key.startswith(prefix) for key in evidence.tensors))


def _final_norm_affine(evidence: Evidence, stack: Stack) -> bool:
    """False as args say, unless the parameters are there."""
    if not evidence.args.get("no_affine_final_norm"):
        return True
    there = any(f"{stack.body}.final_norm.norm.{part}" in evidence.tensors for part in ("scalar", "weight"))
    return not evidence.prefer("no_affine_final_norm", not there)


def _norm_type(evidence: Evidence, stack: Stack) -> str:
    prefix = f"{stack.first}.mega_layer.norm.norm"
    kind = next((kind for part, kind in _NORMS.items() if f"{prefix}.{part}" in evidence.tensors), None)
    if kind is None:
        raise ConversionError(f"there is no tensor '{prefix}.*'; the file is incomplete")
    if kind == "batchnorm" and evidence.args.get(stack.norm) == "syncbatchnorm":
        return "syncbatchnorm"  # the same tensors
    return evidence.prefer(stack.norm, kind)


def _positions(evidence: Evidence, stack: Stack) -> dict:
    chunk, positions = evidence.arg(stack.chunk), evidence.arg(stack.positions)
    table = f"{stack.first}.mega_layer.rel_pos_bias.rel_pos_bias"
    simple = table in evidence.tensors
    evidence.prefer("rel_pos_bias", "simple" if simple else "rotary")
    if simple:
        entries = (evidence.shape(table, "2 positions - 1")[0] + 1) // 2
        if chunk > 0:
            chunk = evidence.prefer(stack.chunk, entries)
        else:
            positions = evidence.prefer(stack.positions, entries)
    # In the args, None is a value: the whole kernel.
    truncation = evidence.args.get("truncation_length", evidence.defaults.get("truncation_length"))
    return {
        "relative_positional_bias": "simple" if simple else "rotary",
        "use_chunking": chunk > 0,
        "chunk_size": chunk if chunk > 0 else -1,
        "max_positions": positions,
        "truncation": truncation if truncation is not None and truncation > 0 else None,
    }
