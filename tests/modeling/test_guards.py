"""Argument checks of all classes that have a cache: each invalid input raises the same message in every class."""

import copy
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from tests.marks import diagonal

from . import decoders

CLASSES = {
    "LunaForCausalLM": ("luna", {}),
    "MegaForCausalLM": ("mega", {"use_chunking": True, "chunk_size": 4}),
    "MegalodonForCausalLM": ("megalodon", {}),
    "LunaForConditionalGeneration": ("luna", {"is_encoder_decoder": True}),
    "MegaForConditionalGeneration": ("mega", {"is_encoder_decoder": True}),
}
IDS = torch.tensor([[2, 5, 6, 7, 8], [2, 8, 7, 6, 5]])  # 2 is the decoder start token


@cache
def make(case, **fields):
    family, own = CLASSES[case]
    return decoders.make_plain(family, **own | fields)


def filled(model, ids=IDS, **options):
    """Return a cache that contains `ids`."""
    source = decoders.source(model, len(ids))
    return model(**source, **decoders.target(model, ids), use_cache=True, **options).cache


def generate(model, ids=IDS, mask=None, **options):
    named = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        named = {f"decoder_{name}": value for name, value in named.items()} | decoders.source(model, len(ids))
    named = {name: value for name, value in named.items() if value is not None}
    return model.generate(**named, do_sample=False, max_new_tokens=3, **options)


def run(model, ids=IDS, mask=None, **options):
    return model(**decoders.source(model, len(ids)), **decoders.target(model, ids, mask), **options)


@torch.enable_grad()
def train(model, **options):
    model = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    return run(model.train(), **options)


def ones(*shape):
    return torch.ones(shape, dtype=torch.long)


GENERATE = {
    "no token": ("ha(s|ve) length 0", lambda m: generate(m, IDS[:, :0])),
    "the prompt in the cache": ("contains 5 positions already", lambda m: generate(m, cache=filled(m))),
    "more in the cache": (
        "contains 8 positions already, and .* has 5;",
        lambda m: generate(m, cache=filled(m, torch.cat([IDS, IDS[:, 1:4]], 1))),
    ),
    "a mask of another length": (
        r"must have the shape \[2, 5\] .*, or \[2, 7\] with the 2 positions of .*, got \[2, 9\]",
        lambda m: generate(m, mask=ones(2, 9), cache=filled(m, IDS[:, :2])),
    ),
    "a longer mask": (r"must have the shape \[2, 5\] .*, got \[2, 9\]", lambda m: generate(m, mask=ones(2, 9))),
    "a shorter mask": (r"must have the shape \[2, 5\] .*, got \[2, 3\]", lambda m: generate(m, mask=ones(2, 3))),
    "a mask of one row": (r"must have the shape \[2, 5\] .*, got \[1, 5\]", lambda m: generate(m, mask=ones(1, 5))),
    "an additive mask": ("attention_mask` has values from", lambda m: generate(m, mask=-1.0 * ones(2, 5))),
    "another cache": ("must be a", lambda m: generate(m, cache=DynamicCache())),
    "a cache of one row": (
        "does not fit this model and batch",
        lambda m: generate(m, IDS.repeat(1, 2), cache=filled(m, IDS[:1])),
    ),
    "beams after a cache": (
        "does not fit this model and batch|another source",
        lambda m: generate(m, IDS.repeat(1, 2), cache=filled(m), num_beams=2),
    ),
}
FORWARD = {
    "another cache": ("must be a", lambda m: run(m, cache=DynamicCache())),
    "a cache of one row": (
        "does not fit this model and batch",
        lambda m: run(m, cache=filled(m, IDS[:1])),
    ),
    "a longer mask": (r"must have the shape \[2, 5\]", lambda m: run(m, mask=ones(2, 9))),
    "a mask that a cache does not explain": (
        r"must have the shape \[2, 5\]",
        lambda m: run(m, mask=ones(2, 12), cache=filled(m)),
    ),
    "an additive mask": ("attention_mask` has values from", lambda m: run(m, mask=-1.0 * ones(2, 5))),
    "an unknown argument": ("do not support foo", lambda m: run(m, foo=1)),
    "values": ("input_values|input_type", lambda m: run(m, input_values=torch.zeros(2, 5))),
    "tokens beyond the vocabulary": ("are from 102 to 108", lambda m: run(m, IDS + 100)),
    "tokens below 0": ("are from -98 to -92", lambda m: run(m, IDS - 100)),
    "no token": ("the batch is empty", lambda m: run(m, IDS[:, :0])),
    "labels of another shape": (r"`labels` must have the shape \[2, 5\]", lambda m: run(m, labels=IDS.T)),
    "positions of another length": ("position_ids", lambda m: run(m, position_ids=torch.arange(4))),
    "a cache of a padding-free batch": (
        "a padding-free batch has no cache",
        lambda m: run(m, seq_idx=torch.tensor([[0, 0, 1, 1, 1]] * 2), use_cache=True),
    ),
    "states of an encoder": (
        "(do not support|has no) .*encoder_hidden_states|encoder_hidden_states require a decoder",
        lambda m: run(m, encoder_hidden_states=torch.randn(2, 4, 12)),
    ),
    "a cache with checkpoints": (
        "gradient checkpointing runs a layer twice",
        lambda m: train(m, use_cache=True),
    ),
}
GUARDS = {f"generate: {name}": guard for name, guard in GENERATE.items()}
GUARDS |= {f"forward: {name}": guard for name, guard in FORWARD.items()}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("message, call", GUARDS.values(), ids=GUARDS)
def test_guard(message, call):
    for case in CLASSES:
        with pytest.raises(ValueError, match=message):
            call(make(case))


@torch.no_grad()
@pytest.mark.parametrize("case", [name for name, (_, fields) in CLASSES.items() if "is_encoder_decoder" not in fields])
def test_embeddings_of_a_prompt_in_the_cache(case):
    model = make(case)
    embeddings = model.get_input_embeddings()(IDS)
    with pytest.raises(ValueError, match="contains 5 positions already, and `inputs_embeds` has 5"):
        model.generate(inputs_embeds=embeddings, cache=filled(model), max_new_tokens=3)


@torch.no_grad()
@pytest.mark.parametrize("case", CLASSES)
def test_new_tokens_after_a_cache(case):
    """Generation after a cache accepts the complete text, or new tokens with a mask of the complete text."""
    model = make(case, eos_token_id=None)
    expected = generate(model)
    complete = generate(model, cache=filled(model, IDS[:, :3]))
    assert torch.equal(complete, expected)
    if not model.config.is_encoder_decoder:  # for encoder-decoders, transformers puts a start token before new tokens
        new = generate(model, IDS[:, 3:], ones(2, 5), cache=filled(model, IDS[:, :3]))
        assert torch.equal(new[:, 2:], expected[:, 5:])


@torch.no_grad()
@pytest.mark.parametrize("case, rows", diagonal(CLASSES, [1, 2]))
def test_right_padding_warns(case, rows, messages):
    """Right padding warns once per call; padding on the left or in a source does not warn."""
    model = make(case)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:rows]
    ids = IDS[:rows].masked_fill(mask == 0, 1)
    calls = [{"mask": mask}] if model.config.is_encoder_decoder or rows == 1 else [{"mask": mask}, {}]
    for given in calls:
        messages.clear()
        generate(model, ids, **given)
        assert len([text for text in messages if "padding_side='left'" in text]) == 1
    messages.clear()
    generate(model, ids.flip(1), mask.flip(1))
    generate(model)
    assert not messages
    if not model.config.is_encoder_decoder:
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, max_new_tokens=2)
        assert len(messages) == 1
