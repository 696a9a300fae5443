"""Small Mega language models in fairseq's layout; the tensors are in the original's order."""

from itertools import pairwise

import torch

from tests.convert.luna import checkpoint, linear
from tests.convert.mega import EMA, POSITIONS, SHARED, WIDTH, body, settings, sizes

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


def _adaptive_softmax(model, s):
    found, bands = {"decoder.adaptive_softmax.version": torch.tensor([1])}, "decoder.embed_tokens.embeddings"
    head, cutoffs = "decoder.adaptive_softmax.head", s.softmax
    if s.tied:
        found[f"{head}._float_tensor"] = torch.zeros(1)
        words = model[f"{bands}.0.0.weight"]
        if s.size == WIDTH:
            found[f"{head}.word_proj.weight"] = words
        else:
            found |= linear(f"{head}.word_proj.0", s.size, WIDTH, bias=False) | {f"{head}.word_proj.1.weight": words}
        found |= linear(f"{head}.class_proj", len(cutoffs), WIDTH, bias=False)
    else:
        found |= linear(head, cutoffs[0] + len(cutoffs), WIDTH, bias=False)
    for tail, (start, end) in enumerate(pairwise((*cutoffs, VOCABULARY))):
        width = int(s.size // s.factor ** (tail + 1) if s.tied else WIDTH // s.softmax_factor ** (tail + 1))
        found |= linear(f"{TAIL}.{tail}.0", width, WIDTH, bias=False)
        found |= linear(f"{TAIL}.{tail}.2", end - start, width, bias=False)
        if s.tied:
            found[f"{TAIL}.{tail}.2.weight"] = model[f"{bands}.{tail + 1}.0.weight"]
        if s.tied_proj:
            found[f"{TAIL}.{tail}.0.weight"] = model[f"{bands}.{tail + 1}.1.weight"]
    return found


# Fields that determine the tensors: `cutoffs` belong to an adaptive input, `softmax` to an adaptive softmax.
# Other fields are args.
SETTINGS = {"size": WIDTH, "cutoffs": None, "softmax": None, "factor": 2, "softmax_factor": 2, "tied": False}
SETTINGS |= {"tied_proj": False, "norm_type": "layernorm", "prenorm": True, "affine": True, "embed_norm": False}
SETTINGS |= {"rotary": True, "chunk": 8, "ffn": True}


def mega_lm(arch="mega_lm_enwik8_base", branch="main", **args):
    """Return a language model checkpoint."""
    s = settings(SETTINGS, args)
    model = {"decoder.version": torch.tensor([3.0])} | _embedding(s.size, s.cutoffs, s.factor)
    model |= body("decoder", s, branch, WIDTH)
    if not s.affine:
        for part in ("weight", "bias"):
            model.pop(f"decoder.final_norm.norm.{part}", None)
    if s.softmax is not None:
        model |= _adaptive_softmax(model, s)
    else:
        model |= linear("decoder.output_projection", VOCABULARY, WIDTH, bias=False)
        if s.tied:
            model["decoder.output_projection.weight"] = model["decoder.embed_tokens.weight"]
    found = {"arch": arch, "task": "language_modeling", "decoder_input_dim": s.size} | sizes("decoder", s)
    found |= {"criterion": "cross_entropy" if s.softmax is None else "adaptive_loss", "decoder_z_dim": SHARED}
    found |= {"decoder_n_dim": EMA, "decoder_chunk_size": s.chunk, "max_target_positions": POSITIONS}
    found |= {"normalization_type": s.norm_type, "normalize_before": s.prenorm, "no_affine_final_norm": not s.affine}
    found |= {"activation_dropout": 0.0, "share_decoder_input_output_embed": s.tied and s.softmax is None}
    found |= {"adaptive_input": s.cutoffs is not None, "adaptive_input_factor": s.factor}
    for name, cutoffs in (("input", s.cutoffs), ("softmax", s.softmax)):
        found[f"adaptive_{name}_cutoff"] = cutoffs and ",".join(map(str, cutoffs))
    found |= {"adaptive_softmax_factor": s.factor if s.tied else s.softmax_factor}
    found |= {"tie_adaptive_weights": s.tied and s.softmax is not None, "tie_adaptive_proj": s.tied_proj}
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
