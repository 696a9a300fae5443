"""The fairseq args that several writers share."""

import copy

import torch
from transformers import PreTrainedConfig

from luna_mega.convert import table
from luna_mega.convert.evidence import ModelSpec
from luna_mega.convert.export.writer import Args, Tensors

ACTIVATIONS = tuple(dict.fromkeys(table.ACTIVATIONS.values()))

# Every checkpoint has these.
COMMON: Args = {"data": ".", "seed": 1, "no_save_optimizer_state": True}

LRA: Args = {"criterion": "lra_cross_entropy", "regression_target": False}
LRA_CRITERIA = {"lra_cross_entropy": "LRACrossEntropyCriterion"}

TRANSLATION_CRITERIA = {"label_smoothed_cross_entropy": "LabelSmoothedCrossEntropyCriterion"}
KEPT_OF_TRANSLATION = ("task", "source_lang", "target_lang", "left_pad_source", "left_pad_target")
_TRANSLATION: Args = {
    "task": "translation",
    "criterion": "label_smoothed_cross_entropy",
    "label_smoothing": 0.1,
    "source_lang": "source",
    "target_lang": "target",
    "left_pad_source": "True",
    "left_pad_target": "False",
    "load_alignments": False,
    "truncate_source": False,
    "num_batch_buckets": 0,
    "adaptive_softmax_cutoff": None,
    "adaptive_softmax_dropout": 0,
    "adaptive_input": False,
    "tie_adaptive_weights": False,
    "encoder_embed_path": None,
    "decoder_embed_path": None,
}


def dtype_of(tensors: Tensors) -> torch.dtype:
    """Return the dtype of added tensors."""
    return next(iter(tensors.values())).dtype


def translation(spec: ModelSpec) -> Args:
    """Return the args of translation in addition to those of the table."""
    return COMMON | _TRANSLATION | {"share_decoder_input_output_embed": spec.config.tie_word_embeddings}


def resolve(config: PreTrainedConfig, decoder_fields: dict[str, str]) -> PreTrainedConfig:
    """Return the configuration of an encoder-decoder with explicit values in all fields of the decoder."""
    full, decoder = copy.deepcopy(config), config.decoder_config
    for own, field in decoder_fields.items():
        setattr(full, own, getattr(decoder, field))
    full.share_encoder_decoder_embeddings = config.shares_embeddings
    return full
