"""Small models of every class in float32. Maps each name to a function of additional configuration fields."""

from functools import partial

import torch

from . import decoders, luna, mega, megalodon_decoders

ENCODERS = {"luna": luna, "mega": mega}
HEADS = {f"{name} {head}": partial(family.make, head) for name, family in ENCODERS.items() for head in luna.HEADS}
HEADS |= {
    f"megalodon {head}": partial(megalodon_decoders.make, head, torch.float32)
    for head in ("Model", "ForCausalLM", "ForSequenceClassification")
}
DECODERS = {f"{name} decoder": partial(family.make, torch.float32) for name, family in decoders.FAMILIES.items()}
DECODERS["megalodon decoder"] = HEADS["megalodon ForCausalLM"]
SEQ2SEQ = {f"{name} seq2seq": partial(DECODERS[f"{name} decoder"], is_encoder_decoder=True) for name in ENCODERS}
