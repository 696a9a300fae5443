"""Small decoders of all families, with and without an encoder, with a common interface."""

import torch

from tests.marks import slow_but
from tests.modeling import luna_decoders, mega_decoders, megalodon_decoders

FAMILIES = {"luna": luna_decoders, "mega": mega_decoders, "megalodon": megalodon_decoders}
TRANSLATING = [family for family, module in FAMILIES.items() if module.WITH_ENCODER]
PLAIN = [(family, False) for family in FAMILIES] + [(family, True) for family in TRANSLATING]
DECODER_ONLY = {
    f"{family}: {name}": (family, name) for family, module in FAMILIES.items() for name in module.DECODER_ONLY
}
WITH_ENCODER = {
    f"{family} seq2seq: {name}": (family, name) for family, module in FAMILIES.items() for name in module.WITH_ENCODER
}
DECODERS = DECODER_ONLY | WITH_ENCODER
# The cases that fast tests run; all families share them.
SOME = [
    *("luna: elu, untied", "luna: pre-norm", "luna seq2seq: translation"),
    *("mega: laplace chunks", "mega: truncated", "mega seq2seq: softmax", "megalodon: one head, gated, tied"),
]


def a_third(values):
    """Return the values of a parameter, or tuples of several; a third of them is fast, and the others are slow."""
    values = list(values)
    return slow_but(values[::3], values)


def with_each(names, *others, slow=2, fast=None):
    """Return tuples of a name and a value of each of the others.

    Every name (or those in `fast`) has a fast tuple; every name has `slow` others, which are slow.
    """
    names, others = list(names), [list(values) for values in others]
    rows = [
        (name, *(values[number % len(values)] for values in others))
        for shift in range(slow + 1)
        for number, name in enumerate(names, start=shift)
    ]
    return slow_but([row for row in rows[: len(names)] if fast is None or row[0] in fast], dict.fromkeys(rows))


def make(name, **fields):
    """Return the model with this name in `DECODERS`; `fields` override its configuration."""
    family, shape = DECODERS[name]
    module = FAMILIES[family]
    if name in WITH_ENCODER:
        return module.make(is_encoder_decoder=True, **module.WITH_ENCODER[shape] | fields)
    return module.make(**module.DECODER_ONLY[shape] | fields)


def make_plain(family, **fields):
    """Return a model of a family with the default configuration."""
    return FAMILIES[family].make(**fields)


def padded(lengths, total, side, seed=0):
    """Return tokens and mask `[B, total]` of sequences of these lengths.

    Padding is on `side` ("left" or "right"), after the first two tokens if `side` is "middle", or anywhere ("gaps").
    """
    ids, mask = torch.ones(len(lengths), total, dtype=torch.long), torch.zeros(len(lengths), total, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, total - length if side == "left" else 0 : total if side == "left" else length] = 1
        if side == "middle":
            mask[row] = torch.cat([mask[row, :2], mask[row, 2:].flip(0)])
        generator = torch.Generator().manual_seed(seed + row)
        if side == "gaps":
            mask[row] = mask[row, torch.randperm(total, generator=generator)]
        ids[row, mask[row].bool()] = torch.randint(3, 23, (length,), generator=generator)
    return ids, mask


def source(model, batch, side="right"):
    """Return the source arguments for a batch of targets, or an empty dict for a decoder-only model."""
    if not model.config.is_encoder_decoder:
        return {}
    ids, mask = padded([13, 4, 9, 1, 5][:batch], 13, side, seed=7)
    return {"input_ids": ids, "attention_mask": mask}


def target(model, ids, mask=None, **options):
    """Return the arguments of the target under the names that the model uses."""
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask, **options}


def prompt(model, ids, mask):
    """Return the inputs of `generate`: the sources, or the tokens if the model has no encoder."""
    return source(model, len(ids)) or {"input_ids": ids, "attention_mask": mask}


def own_cache(past):
    """Return the part of a cache that belongs to the target."""
    return getattr(past, "self_attention_cache", past)


@torch.no_grad()
def check_names_of_the_cache(model, ids):
    """Check that a decoder, also with an adapter, accepts its cache under either name, in a call and in `generate`."""
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    logits, text = model(input_ids=ids).logits[:, -1:], model.generate(input_ids=ids, **options)
    for name in ("cache", "past_key_values"):
        caches = [model(input_ids=ids[:, :-1], use_cache=True).cache for _ in range(2)]
        torch.testing.assert_close(model(input_ids=ids[:, -1:], **{name: caches[0]}).logits, logits)
        assert torch.equal(model.generate(input_ids=ids, **{name: caches[1]}, **options), text)
