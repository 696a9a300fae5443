"""Small Luna decoders, with and without an encoder, called alike."""

import torch

import luna_mega
from luna_mega import LunaConfig, LunaForCausalLM, LunaForConditionalGeneration

ALONE = {
    "softplus": {},
    "elu, untied": {"causal_activation": "elu", "tie_key_value": False},
    "pre-norm": {"pre_norm": True, "position_embedding_type": "learned"},
    "no positions, shared layers": {"position_embedding_type": "none", "share_layers": True},
}
WITH_ENCODER = {
    "translation": {},
    "elu, untied, pre-norm": {"causal_activation": "elu", "tie_key_value": False, "pre_norm": True},
    "learned positions, fixed length": {"position_embedding_type": "learned", "dynamic_projection_length": False},
    "two vocabularies, other decoder": {
        "decoder_vocab_size": 35,
        "num_decoder_layers": 1,
        "num_decoder_attention_heads": 2,
        "num_decoder_pack_attention_heads": 4,
        "decoder_intermediate_size": 20,
        "decoder_pre_norm": True,
        "decoder_position_embedding_type": "learned",
    },
    "every layer its P": {"contextual_projection": False},
}
DECODERS = {f"decoder: {name}": fields for name, fields in ALONE.items()} | {
    f"encoder-decoder: {name}": fields | {"is_encoder_decoder": True} for name, fields in WITH_ENCODER.items()
}


def make(dtype=torch.float64, **fields):
    """A model with weights large enough that every part of it shows in the result."""
    torch.manual_seed(0)
    config = LunaConfig(
        is_decoder=not fields.get("is_encoder_decoder"),
        hidden_size=24,
        intermediate_size=32,
        num_attention_heads=4,
        projection_length=6,
        max_position_embeddings=40,
        **{"position_embedding_type": "sinusoidal", "vocab_size": 30, "num_hidden_layers": 2} | fields,
    )
    model = (LunaForConditionalGeneration if config.is_encoder_decoder else LunaForCausalLM)(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.tie_weights()
    return model


def padded(lengths, total, side, seed=0):
    """Tokens and mask `[B, total]` of sequences of these lengths, padded on the `side` or behind the first two."""
    ids, mask = torch.ones(len(lengths), total, dtype=torch.long), torch.zeros(len(lengths), total, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, total - length if side == "left" else 0 : total if side == "left" else length] = 1
        if side == "middle":
            mask[row] = torch.cat([mask[row, :2], mask[row, 2:].flip(0)])
        generator = torch.Generator().manual_seed(seed + row)
        ids[row, mask[row].bool()] = torch.randint(3, 30, (length,), generator=generator)
    return ids, mask


def source(model, batch, side="right"):
    """The arguments of the source: one for each of a batch of targets; none for a decoder alone."""
    if not model.config.is_encoder_decoder:
        return {}
    ids, mask = padded([9, 4, 7, 1][:batch], 9, side, seed=7)
    return {"input_ids": ids, "attention_mask": mask}


def target(model, ids, mask=None, **options):
    """The arguments of the target."""
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask, **options}


def new_cache(model):
    if model.config.is_encoder_decoder:
        return luna_mega.LunaSeq2SeqCache(model.config.decoder_config)
    return luna_mega.LunaCache(model.config)
