"""Small Mega language models in fairseq's layout; the tensors are in the original's order."""

from itertools import pairwise

import torch

from tests.convert.luna import checkpoint, linear
from tests.convert.mega import EMA, FFN, LAYERS, POSITIONS, SHARED, VALUES, WIDTH, layer, norm, relative_bias

VOCABULARY, CUTOFFS = 32, (12, 20)
TAIL = "decoder.adaptive_softmax.tail"


def _embedding(size, cutoffs, factor):
    if cutoffs is None:
        model = {"decoder.embed_tokens.weight": torch.randn(VOCABULARY, size)}
        return model | (linear("decoder.project_in_dim", WIDTH, size, bias=False) if size != WIDTH else {})
    model = {"decoder.embed_tokens._float_tensor": torch.zeros(1)}
    for band, (start, end) in enumerate(pairwise((0, *cutoffs, VOCABULARY))):
        width, name = int(size // factor**band), f"decoder.embed_tokens.embeddings.{band}"
        model |= linear(f"{name}.0", end - start, width, bias=False) | linear(f"{name}.1", WIDTH, width, bias=False)
    return model


def _adaptive_softmax(model, size, cutoffs, factor, tied, tied_proj):
    found, bands = {"decoder.adaptive_softmax.version": torch.tensor([1])}, "decoder.embed_tokens.embeddings"
    head = "decoder.adaptive_softmax.head"
    if tied:
        found[f"{head}._float_tensor"] = torch.zeros(1)
        words = model[f"{bands}.0.0.weight"]
        if size == WIDTH:
            found[f"{head}.word_proj.weight"] = words
        else:
            found |= linear(f"{head}.word_proj.0", size, WIDTH, bias=False) | {f"{head}.word_proj.1.weight": words}
        found |= linear(f"{head}.class_proj", len(cutoffs), WIDTH, bias=False)
    else:
        found |= linear(head, cutoffs[0] + len(cutoffs), WIDTH, bias=False)
    for tail, (start, end) in enumerate(pairwise((*cutoffs, VOCABULARY))):
        width = int((size if tied else WIDTH) // factor ** (tail + 1))
        found |= linear(f"{TAIL}.{tail}.0", width, WIDTH, bias=False)
        found |= linear(f"{TAIL}.{tail}.2", end - start, width, bias=False)
        if tied:
            found[f"{TAIL}.{tail}.2.weight"] = model[f"{bands}.{tail + 1}.0.weight"]
        if tied_proj:
            found[f"{TAIL}.{tail}.0.weight"] = model[f"{bands}.{tail + 1}.1.weight"]
    return found


def mega_lm(
    arch="mega_lm_enwik8_base",
    branch="main",
    *,
    size=WIDTH,
    cutoffs=None,
    softmax=None,
    factor=2,
    softmax_factor=2,
    tied=False,
    tied_proj=False,
    norm_type="layernorm",
    prenorm=True,
    affine=True,
    embed_norm=False,
    rotary=True,
    chunk=8,
    ffn=True,
    **args,
):
    """Return a language model checkpoint; `cutoffs` belong to an adaptive input, `softmax` to an adaptive softmax."""
    model = {"decoder.version": torch.tensor([3.0])} | _embedding(size, cutoffs, factor)
    if embed_norm:
        model |= norm("decoder.embed_norm", norm_type)
    for index in range(LAYERS):
        bias = relative_bias(rotary, chunk)
        model |= layer(f"decoder.layers.{index}", branch, norm_type, bias, ffn, rows=WIDTH)
    if prenorm:
        final = norm("decoder.final_norm", norm_type)
        statistics = {key: tensor for key, tensor in final.items() if "running" in key or "tracked" in key}
        model |= final if affine else statistics
    if softmax is not None:
        model |= _adaptive_softmax(model, size, softmax, factor if tied else softmax_factor, tied, tied_proj)
    else:
        model |= linear("decoder.output_projection", VOCABULARY, WIDTH, bias=False)
        if tied:
            model["decoder.output_projection.weight"] = model["decoder.embed_tokens.weight"]
    found = {"arch": arch, "task": "language_modeling", "decoder_layers": LAYERS, "decoder_embed_dim": WIDTH}
    found |= {"criterion": "cross_entropy" if softmax is None else "adaptive_loss", "decoder_input_dim": size}
    found |= {"decoder_hidden_dim": VALUES, "decoder_ffn_embed_dim": FFN if ffn else 0, "decoder_z_dim": SHARED}
    found |= {"decoder_n_dim": EMA, "decoder_chunk_size": chunk, "max_target_positions": POSITIONS}
    found |= {"normalization_type": norm_type, "normalize_before": prenorm, "normalize_embedding": embed_norm}
    found |= {"rel_pos_bias": "rotary" if rotary else "simple", "no_affine_final_norm": not affine}
    found |= {"activation_dropout": 0.0, "share_decoder_input_output_embed": tied and softmax is None}
    found |= {"adaptive_input": cutoffs is not None, "adaptive_input_factor": factor}
    found |= {"adaptive_input_cutoff": cutoffs and ",".join(map(str, cutoffs))}
    found |= {"adaptive_softmax_cutoff": softmax and ",".join(map(str, softmax))}
    found |= {"adaptive_softmax_factor": factor if tied else softmax_factor}
    found |= {"tie_adaptive_weights": tied and softmax is not None, "tie_adaptive_proj": tied_proj}
    return checkpoint(model, **found | args)


BOTH = {"cutoffs": CUTOFFS, "softmax": CUTOFFS}
KINDS = {
    "tied": {"tied": True, "affine": False},
    "untied": {"prenorm": False, "embed_norm": True, "norm_type": "scalenorm", "rotary": False, "chunk": -1},
    "table of a chunk": {"rotary": False, "norm_type": "rmsnorm", "truncation_length": 7},
    "project in": {"size": 10, "no_scale_embedding": True, "norm_type": "batchnorm", "affine": False},
    "no feed-forward": {"ffn": False, "chunk": 0, "truncation_length": 0, "attention_activation_fn": "laplace"},
    "adaptive": BOTH | {"tied": True, "tied_proj": True, "adaptive_softmax_dropout": 0.1},
    "adaptive, own projections": BOTH | {"tied": True, "size": 24},
    "adaptive, square": {"cutoffs": (9,), "softmax": (9,), "tied": True, "tied_proj": True, "factor": 1},
    "adaptive, untied": {"cutoffs": CUTOFFS, "softmax": (7, 9, 30), "softmax_factor": 1.5},
    "adaptive softmax": {"softmax": (20,), "tie_adaptive_proj": True},
    "adaptive input": {"cutoffs": (5, 6), "size": 8},
}
