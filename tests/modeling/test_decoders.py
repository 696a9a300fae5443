"""Decoders of all families: a cache, however it is filled and changed, gives each text its logits."""

import copy

import pytest
import torch
from hypothesis import given
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from luna_mega.modeling_common.cache import new_cache
from tests.marks import slow_but
from tests.modeling import contract, decoders
from tests.modeling.contract import CLASSES, MEMBERS, Division
from tests.modeling.decoders import DECODERS, FAMILIES, PLAIN, SOME, make, make_plain, own_cache, padded, source, target

STEPS = (1,) * 14
DIVISIONS = {  # padding exceeds the tables of positions, which are as long as the longest text
    "steps": Division((1,) * 20, changes={4: "reorder", 9: "copy", 15: "drop"}),
    "calls": Division((6, 1, 1, 12), changes={2: "repeat", 3: "select"}, eager=True),
    "two": Division((19, 1), changes={1: "crop"}, device=True),
    "equal": Division((4,) * 5, changes={2: "pickle", 4: "reorder"}),
    "static": Division((6, *STEPS), static=1, changes={2: "reorder", 5: "copy", 8: "drop", 11: "pickle"}),
    "late": Division((1, 3, 2, *STEPS), static=4, eager=True, device=True),
    "no padding": Division((5, 15), (20, 20)),
}
SIDES = ["left", "right", "gaps", "middle"]


@pytest.mark.parametrize("name, division, side", decoders.with_each(DECODERS, DIVISIONS, SIDES))
def test_cached_is_uncached(name, division, side):
    member, division = MEMBERS[name], DIVISIONS[division]._replace(side=side)
    contract.check_division(member.make(**member.tables(max(division.lengths))), division)


@given(contract.language_models(), contract.divisions())
def test_random_decoders(member, division):
    contract.check_division(member.make(), division)


@pytest.mark.parametrize("name", slow_but(SOME, DECODERS))
def test_gradients_flow_through_the_cache(name):
    contract.check_gradients(MEMBERS[name].make(), Division((6, 1, 6), (13, 8), "middle"))


@pytest.mark.parametrize("family", FAMILIES)
def test_autograd_and_a_cache(family):
    """`detach` stops gradients, and steps do not overwrite tensors that autograd saved."""
    model, ids = make_plain(family), padded([9], 9, "none")[0]
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    detached, saved = (model(inputs_embeds=embeddings[:, :4], use_cache=True) for _ in range(2))
    detached.cache.detach()
    model(inputs_embeds=embeddings[:, 4:], cache=detached.cache).logits.sum().backward()
    assert not embeddings.grad[:, :4].any() and embeddings.grad[:, 4:].all()
    with torch.no_grad():
        model(ids[:, :1], cache=saved.cache)
    found = torch.autograd.grad(saved.logits.sum(), embeddings)
    expected = torch.autograd.grad(model(inputs_embeds=embeddings[:, :4], use_cache=False).logits.sum(), embeddings)
    torch.testing.assert_close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["luna: softplus", "luna seq2seq: translation", "mega: laplace chunks", "megalodon: heads"]
)
def test_constant_memory(name):
    model, sizes = make(name), []
    past = new_cache(model)
    ids = padded([7, 7], 7, "none")[0]
    for _ in range(4):
        model(**source(model, 2), **target(model, ids), cache=past, use_cache=True)
        sizes.append((own_cache(past).nbytes, past.nbytes))
    assert sizes[0] == sizes[-1] and past.get_seq_length() == 28
    tensors = own_cache(past).layers[0].tensors
    names = ["keys"] if "keys" in tensors else [*tensors]  # of a chunk, or all of Luna
    places = [tensors[name].data_ptr() for name in names]
    for _ in range(20):  # steps write in place
        model(**source(model, 2), **target(model, ids[:, :1]), cache=past)
    tensors = own_cache(past).layers[0].tensors
    assert [tensors[name].data_ptr() for name in names] == places and past.nbytes == sizes[0][1]
    assert sum(x.untyped_storage().nbytes() for x in tensors.values()) < 2 * sum(x.nbytes for x in tensors.values())


@torch.no_grad()
@pytest.mark.parametrize("name", ["luna: pre-norm", "mega seq2seq: softmax"])
def test_logits_to_keep(name):
    model, (ids, mask) = make(name), padded([7, 3], 7, "left")
    inputs = source(model, 2) | target(model, ids, mask)
    complete = model(**inputs).logits
    kept = {0: complete, 1: complete[:, 6:], 3: complete[:, 4:], torch.tensor([5, 0]): complete[:, [5, 0]]}
    for keep, logits in kept.items():
        torch.testing.assert_close(model(**inputs, logits_to_keep=keep).logits, logits)
    shift = 0 if model.config.is_encoder_decoder else 1
    loss = model(**inputs, labels=ids[:, 4:], logits_to_keep=3).loss
    expected = cross_entropy(complete[:, 4 : 7 - shift].flatten(0, 1), ids[:, 4 + shift :].flatten())
    torch.testing.assert_close(loss, expected, check_dtype=False)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_shift_labels(family):
    model, (ids, mask) = make_plain(family), padded([7, 3], 7, "left")
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    loss = model(ids, mask, labels=ids).loss
    for labels in ({}, {"labels": ids}):
        torch.testing.assert_close(model(ids, mask, shift_labels=shifted, **labels).loss, loss)
    one = torch.tensor(1)
    torch.testing.assert_close(model(ids, mask, labels=ids, num_items_in_batch=one).loss, 8 * loss)


NAMES = ("cache", "past_key_values")


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize(("family", "with_encoder"), PLAIN)
def test_defaults_names_and_methods_of_a_cache(family, with_encoder):
    """`use_cache` follows the configuration, except in training; `cache` is also called `past_key_values`."""
    model = make_plain(family, is_encoder_decoder=with_encoder)
    ids = padded([5, 5], 5, "none")[0]
    inputs, step = (source(model, 2) | target(model, x) for x in (ids, ids[:, :1]))
    for part in (model, model.base_model):
        output = part(**inputs)
        cache = output.cache
        assert type(cache) is type(new_cache(model)) and output["past_key_values"] is output.past_key_values is cache
        results = [part(**step, **{name: copy.deepcopy(cache)})[0] for name in NAMES]
        assert torch.equal(*results)
    given = source(model, 2) | target(model, ids, 0 * ids + 1)
    texts, options = [], {"max_new_tokens": 3, "return_dict_in_generate": True, "do_sample": False}
    for name in NAMES:
        begun = model(**source(model, 2), **target(model, ids[:, :3])).cache
        texts.append(model.generate(**given, **{name: begun}, **options))
        assert texts[-1].cache is texts[-1].past_key_values is texts[-1]["cache"]
    assert torch.equal(*(text.sequences for text in texts))
    model.gradient_checkpointing_enable()
    again = model.train().generate(**given, **options)
    assert again.sequences.shape == texts[0].sequences.shape
    assert model(**inputs).cache is None
    model.config.use_cache = False
    assert model.eval()(**inputs).cache is None
    assert model(**inputs, use_cache=True).cache is not None
    cache.reset()
    parts = [own_cache(cache), *([cache.cross_attention_cache] if with_encoder else [])]
    assert (cache.get_mask_sizes(2, 0), cache.get_max_length()) == ((2, 0), -1)
    assert cache.get_seq_length() == 0 and not any(layer.tensors for part in parts for layer in part.layers)
    torch.testing.assert_close(model(**inputs, cache=cache).logits, model(**inputs).logits)


CHANGED = {  # of weights
    "optimized": lambda model: torch.optim.AdamW(model.parameters(), 0.05, fused=True).step(),
    "written": lambda model: [weight.data.mul_(0.7) for weight in model.parameters()],
    "replaced": lambda model: vector_to_parameters(0.8 * parameters_to_vector(model.parameters()), model.parameters()),
    "loaded": lambda model: model.load_state_dict({name: 0.8 * x for name, x in model.state_dict().items()}),
    "assigned": lambda model: model.load_state_dict({k: 0.8 * x for k, x in model.state_dict().items()}, assign=True),
    "pruned": lambda model: [
        prune.random_unstructured(module, name, amount=0.5)
        for module in model.modules()
        for name in {"kernel_projection_matrix", "gamma", "alpha"} & module._parameters.keys()
    ],
}


@pytest.mark.parametrize("name", ["mega decoder", "mega seq2seq", "megalodon decoder"])
def test_a_cache_continues_with_the_current_weights(name):
    """Dynamic evaluation: steps, each after a change of the weights."""
    model = CLASSES[name].make(torch.float32)
    ids, mask = padded([5, 3], 5, "left")
    inputs = source(model, 2) | target(model, ids, mask, use_cache=True)
    with torch.no_grad():
        past = model(**inputs).cache
    for change in CHANGED.values():
        step = source(model, 2) | target(model, torch.randint(3, 23, (2, 1)))
        with torch.no_grad():
            model(**step, cache=past)
            new = copy.deepcopy(past)
        model(**inputs | {"use_cache": False}).logits.square().mean().backward()
        change(model)
        with torch.no_grad():
            results = [model(**step, cache=cache).logits for cache in (past, new)]
        torch.testing.assert_close(*results, rtol=0, atol=0)
