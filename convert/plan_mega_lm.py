"""Plans the conversion of a Mega language model."""

import re
from itertools import accumulate

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.convert.evidence import Evidence, same_bits
from luna_mega.convert.keymap_mega import ADAPTIVE, LM_BODY, LM_OUT, mega_lm, tied_copies
from luna_mega.convert.plan import Plan, build_config
from luna_mega.convert.plan_mega import DECIDED, Stack, layer_fields
from luna_mega.convert.source_detect import Source
from luna_mega.errors import ConversionError

_STACK = Stack(
    body=LM_BODY,
    layers="decoder_layers",
    width="decoder_embed_dim",
    values="decoder_hidden_dim",
    ffn="decoder_ffn_embed_dim",
    shared="decoder_z_dim",
    dimensions="decoder_n_dim",
    chunk="decoder_chunk_size",
    positions="max_target_positions",
    norm="normalization_type",
    before="normalize_before",
    hidden_dropout="hidden_dropout",
    ffn_dropout="activation_dropout",
)
_BANDS = f"{LM_BODY}.embed_tokens.embeddings"
_DEFAULTS = {
    "activation_fn": "silu",
    "attention_activation_fn": "softmax",
    "rel_pos_bias": "simple",
    "decoder_chunk_size": -1,
    "truncation_length": 2048,
    "max_target_positions": 1024,
    "feature_dropout": False,
    "no_scale_embedding": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "adaptive_input_factor": 4,
    "adaptive_softmax_factor": 4,
    "adaptive_softmax_dropout": 0.0,
    "tie_adaptive_proj": False,
}
_ADAPTIVE = {
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "activation_dropout": 0.1,
    "adaptive_softmax_dropout": 0.2,
    "tie_adaptive_proj": True,
}
_ARCHS = {
    "mega_lm_adaptive_big": _ADAPTIVE,
    "mega_lm_wiki103": _ADAPTIVE,
    "mega_lm_adaptive_base": _ADAPTIVE,
    "mega_lm_enwik8_base": {"activation_dropout": 0.0},
    "mega_lm_enwik8_large": {"dropout": 0.2, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "mega_lm_pg19_base": {"dropout": 0.0, "activation_dropout": 0.0},
}


def plan_mega_lm(source: Source, tensors: dict, args: dict) -> Plan:
    """The plan for a file of `mega_lm*`.

    Args:
        source: its `revision` is the branch, "main" or "flash".

    Raises:
        ConversionError: args and tensors contradict each other, or a tied copy differs from its original.
    """
    defaults, notes = _DEFAULTS | _ARCHS.get(source.arch, {}), []
    if args.get("activation_dropout") is None and "activation_dropout" not in defaults:
        defaults["activation_dropout"] = 0.0
        notes.append("args.activation_dropout is missing, without which the original fails here: 0.0 is taken for it")
    evidence = Evidence(tensors, args, defaults)
    embedding, width = _embedding(evidence)
    config = build_config(
        MegaConfig,
        **embedding,
        **layer_fields(evidence, _STACK, width),
        **_head(evidence, embedding),
        is_decoder=True,
        bidirectional=False,
        add_lm_hidden_dense_layer=False,
        lm_head_bias=False,
        scale_embedding=not evidence.arg("no_scale_embedding"),
        bos_token_id=2,  # what fairseq puts before the first token
    )
    for copy, original in tied_copies(config).items():
        if copy not in tensors:
            raise ConversionError(f"tensor {copy!r} is missing; the file is incomplete")
        if original in tensors and not same_bits(tensors[copy], tensors[original]):
            raise ConversionError(
                f"tensors {copy!r} and {original!r} are tied in the original but differ; the file was changed"
            )
    names = (*DECIDED, "scale_embedding", "tie_word_embeddings", "adaptive_input_cutoffs", "adaptive_softmax_cutoffs")
    return Plan(
        MegaForCausalLM,
        config,
        mega_lm(source.revision, config),
        appended_symbol=None,
        num_labels=None,
        decisions={"ema_convention": source.revision} | {name: getattr(config, name) for name in names},
        notes=notes,
        warnings=evidence.warnings,
    )


def _embedding(evidence: Evidence) -> tuple[dict, int]:
    """Fields of the embedding, and the width of the model."""
    if f"{_BANDS}.0.0.weight" not in evidence.tensors:
        vocabulary, size = evidence.shape(f"{LM_BODY}.embed_tokens.weight", "vocabulary", "width")
        projection = f"{LM_BODY}.project_in_dim.weight"
        projected = projection in evidence.tensors
        width = evidence.shape(projection, "width", "width of the embedding")[0] if projected else size
    else:
        *starts, vocabulary = _sizes(evidence, _BANDS, "0")
        width, size = evidence.shape(f"{_BANDS}.0.1.weight", "width", "width of the embedding")
    fields = {"vocab_size": vocabulary, "embedding_size": evidence.prefer("decoder_input_dim", size)}
    if f"{_BANDS}.0.0.weight" in evidence.tensors:
        fields["adaptive_input_cutoffs"] = _cutoffs(evidence, "adaptive_input_cutoff", starts, vocabulary)
        fields["adaptive_input_factor"] = evidence.arg("adaptive_input_factor")
    return fields, width


def _sizes(evidence: Evidence, prefix: str, matrix: str, before: tuple[int, ...] = ()) -> list[int]:
    """Where each band under `prefix` ends, by the rows of its word vectors, behind bands of the sizes `before`."""
    names = (f"{prefix}.{band}.{matrix}.weight" for band in range(evidence.layers(prefix)))
    return list(accumulate((*before, *(evidence.shape(name, "words", "width")[0] for name in names))))


def _head(evidence: Evidence, embedding: dict) -> dict:
    """Fields of the output layer and of what it shares with the embedding."""
    tensors = evidence.tensors
    if not any(key.startswith(f"{ADAPTIVE}.") for key in tensors):
        weight = f"{LM_BODY}.embed_tokens.weight"
        evidence.shape(LM_OUT, "vocabulary", "width")
        same = weight in tensors and same_bits(tensors[LM_OUT], tensors[weight])
        shared = evidence.args.get("share_decoder_input_output_embed")
        if not same:
            evidence.prefer("share_decoder_input_output_embed", False)
        return {"tie_word_embeddings": same and shared is not False}
    tied = f"{ADAPTIVE}.head.class_proj.weight" in tensors
    tails = evidence.layers(f"{ADAPTIVE}.tail")
    if tied:
        cutoffs = embedding.get("adaptive_input_cutoffs")
    else:
        scores, _ = evidence.shape(f"{ADAPTIVE}.head.weight", "words and classes", "width")
        *cutoffs, _ = _sizes(evidence, f"{ADAPTIVE}.tail", "2", (scores - tails,))
    evidence.prefer("tie_adaptive_weights", tied)
    return {
        "tie_word_embeddings": tied,
        "tie_adaptive_projections": tied and _tied_projections(evidence, tails),
        "adaptive_softmax_cutoffs": _cutoffs(evidence, "adaptive_softmax_cutoff", cutoffs, embedding["vocab_size"]),
        "adaptive_softmax_factor": evidence.arg("adaptive_softmax_factor"),
        "adaptive_softmax_dropout": evidence.arg("adaptive_softmax_dropout"),
    }


def _tied_projections(evidence: Evidence, tails: int) -> bool:
    """Whether the tails use the projections of the embedding: the shapes tell, but not of square ones."""
    pairs = [
        [evidence.tensors.get(name) for name in (f"{ADAPTIVE}.tail.{tail}.0.weight", f"{_BANDS}.{tail + 1}.1.weight")]
        for tail in range(tails)
    ]
    if any(tensor is None for pair in pairs for tensor in pair):
        return bool(evidence.arg("tie_adaptive_proj"))  # the file is reported as incomplete
    shapes = all(ours.shape == theirs.shape for ours, theirs in pairs)
    tied = shapes and (bool(evidence.arg("tie_adaptive_proj")) or all(same_bits(*pair) for pair in pairs))
    return evidence.prefer("tie_adaptive_proj", tied)


def _cutoffs(evidence: Evidence, name: str, in_file: list[int] | None, vocabulary: int) -> list[int] | None:
    """What the tensors say; a warning when the argument, a text, disagrees. It may end with the vocabulary's size."""
    in_args = [int(number) for number in re.findall(r"\d+", str(evidence.args.get(name)))]
    if in_args and in_file is not None and in_args not in (in_file, [*in_file, vocabulary]):
        evidence.prefer(name, ",".join(map(str, in_file)))
    return in_file
