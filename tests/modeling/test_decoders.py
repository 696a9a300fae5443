"""Decoders of all families: cached segments match the complete sequence, for any split and padding."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache
from transformers.cache_utils import EncoderDecoderCache

from luna_mega.modeling_common.cache import new_cache
from tests.marks import slow_but
from tests.modeling.decoders import (
    DECODERS,
    FAMILIES,
    PLAIN,
    SOME,
    make,
    make_plain,
    own_cache,
    padded,
    source,
    tables,
    target,
    with_each,
)


@pytest.fixture(params=SOME)
def model(request):
    return make(request.param)


TOTAL, LONGEST = 20, 17
CUTS = [(1,) * TOTAL, (6, 1, 1, 12), (5, 15), (4,) * 5, (19, 1), (1, 19)]
SIDES = ["none", "left", "right", "middle", "gaps"]


@torch.no_grad()
@pytest.mark.parametrize(
    "name, cuts, side, place, attention",
    with_each(DECODERS, CUTS, SIDES, ["host", "device"], ["sdpa", "sdpa", "eager"]),
    indirect=["place"],
)
def test_cached_is_uncached(name, cuts, side, place, attention):
    """Padding may exceed the tables of positions, and rows of padding have no effect."""
    lengths = [TOTAL] * 2 if side == "none" else [LONGEST, 9, 3, 12, 0]
    model = make(name, **tables(name, lengths[0]))
    ids, mask = padded(lengths, TOTAL, side)
    given = source(model, len(ids), "left" if side == "right" else "right")
    expected = model(**given, **target(model, ids, mask), use_cache=False)
    assert expected.cache is None
    model.set_attn_implementation(attention)
    past, start, logits = None, 0, []
    for index, length in enumerate(cuts):
        end = start + length
        # Pass the mask of the segment, or of all positions so far as in `generate`. The cache contains the source
        # states.
        segment = target(model, ids[:, start:end], mask[:, start:end] if index % 2 else mask[:, :end])
        output = model(**given if index % 3 == 0 else {}, **segment, cache=past, use_cache=True)
        past, start = output.cache, end
        logits.append(output.logits)
    assert past.get_seq_length() == TOTAL
    torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], expected.logits[mask.bool()], atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", slow_but(SOME, DECODERS))
def test_gradients_flow_through_the_cache(name):
    """Backpropagation through segments matches the gradients of the complete sequence, including the encoder."""
    model = make(name)
    ids, mask = padded([13, 8], 13, "middle")
    given = source(model, 2, "left")
    model(**given, **target(model, ids, mask), use_cache=False).logits[mask.bool()].sin().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    past, logits = new_cache(model), []
    for index, (a, b) in enumerate(((0, 6), (6, 7), (7, 13))):
        segment = target(model, ids[:, a:b], mask[:, a:b], cache=past, use_cache=True)
        logits.append(model(**{} if index else given, **segment).logits)
    torch.cat(logits, 1)[mask.bool()].sin().sum().backward()
    unused = [name for name, gradient in expected.items() if gradient is None]
    assert all("packed_layer_norm" in name for name in unused)
    relu2 = getattr(model.config, "attention_activation", None) == "relu2"  # scores below 0 have no gradient
    single_key = getattr(model.config, "chunk_size", None) == 1  # the score of a single key has no gradient
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")
        assert name in unused or parameter.grad.abs().max() > 0 or relu2 or single_key, name


def test_detached_cache_stops_gradients():
    for family in FAMILIES:
        model, ids = make_plain(family), padded([9], 9, "none")[0]
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        past = model(inputs_embeds=embeddings[:, :4], use_cache=True).cache
        past.detach()
        model(inputs_embeds=embeddings[:, 4:], cache=past).logits.sum().backward()
        assert not embeddings.grad[:, :4].any() and embeddings.grad[:, 4:].all()


def addresses(past):
    """Return the addresses of the keys of a chunk, or of all tensors of Luna."""
    tensors = [layer.tensors for layer in own_cache(past).layers]
    return [x.data_ptr() for each in tensors for name, x in each.items() if "keys" not in each or name == "keys"]


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["luna: softplus", "luna seq2seq: translation", "mega: laplace chunks", "megalodon: heads"]
)
def test_constant_memory(name):
    model, sizes = make(name), []
    past = new_cache(model)
    for _ in range(4):
        ids = padded([7, 7], 7, "none")[0]
        model(**source(model, 2), **target(model, ids), cache=past, use_cache=True)
        sizes.append((own_cache(past).nbytes, past.nbytes))
    assert sizes[0] == sizes[-1] and past.get_seq_length() == 28
    places = addresses(past)
    for _ in range(20):  # steps write in place
        model(**source(model, 2), **target(model, ids[:, :1]), cache=past)
    assert addresses(past) == places and past.nbytes == sizes[0][1]
    tensors = own_cache(past).layers[0].tensors.values()
    assert sum(x.untyped_storage().nbytes() for x in tensors) < 2 * sum(x.nbytes for x in tensors)


@torch.no_grad()
@pytest.mark.parametrize("name", ["luna: pre-norm", "mega seq2seq: softmax"])
def test_logits_to_keep(name):
    model = make(name)
    ids, mask = padded([7, 3], 7, "left")
    inputs = source(model, 2) | target(model, ids, mask)
    complete = model(**inputs).logits
    for keep, kept in (
        (0, complete),
        (1, complete[:, 6:]),
        (3, complete[:, 4:]),
        (torch.tensor([5, 0]), complete[:, [5, 0]]),
    ):
        torch.testing.assert_close(model(**inputs, logits_to_keep=keep).logits, kept)
    shift = 0 if model.config.is_encoder_decoder else 1
    loss = model(**inputs, labels=ids[:, 4:], logits_to_keep=3).loss
    expected = cross_entropy(complete[:, 4 : 7 - shift].flatten(0, 1), ids[:, 4 + shift :].flatten())
    torch.testing.assert_close(loss, expected, check_dtype=False)
    with pytest.raises(ValueError, match=r"`labels` must have the shape \[2, 3\] .* got \[2, 7\]"):
        model(**inputs, labels=ids, logits_to_keep=3)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_shift_labels(family):
    model = make_plain(family)
    ids, mask = padded([7, 3], 7, "left")
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    loss = model(ids, mask, labels=ids).loss
    for labels in ({}, {"labels": ids}):
        torch.testing.assert_close(model(ids, mask, shift_labels=shifted, **labels).loss, loss)
    one = torch.tensor(1)
    torch.testing.assert_close(model(ids, mask, labels=ids, num_items_in_batch=one).loss, 8 * loss)
    with pytest.raises(ValueError, match=r"`shift_labels` must have the shape \[2, 7\] .* got \[2, 6\]"):
        model(ids, mask, shift_labels=shifted[:, 1:])


@torch.no_grad()
def test_cache_operations(model):
    ids, mask = padded([6, 4, 5], 6, "left")
    given = source(model, 3, "left")
    past = model(**given, **target(model, ids, mask), use_cache=True).cache
    order = torch.tensor([2, 0, 0])
    past.reorder_cache(order)
    next_ids = torch.tensor([[4], [9], [4]])
    ids, mask = torch.cat([ids[order], next_ids], 1), torch.cat([mask[order], torch.ones(3, 1).long()], 1)
    complete = {name: value[order] for name, value in given.items()} | target(model, ids, mask)
    expected = model(**complete).logits
    # No source is passed, because the cache contains its states.
    output = model(**target(model, next_ids), cache=past, use_cache=True)
    torch.testing.assert_close(output.logits[:, -1], expected[:, -1])
    past.batch_repeat_interleave(2)
    past.batch_select_indices(torch.tensor([0, 3, 4, 5]))
    caches = [own_cache(past), *([past.cross_attention_cache] if given else [])]
    assert [layer.batch_size for cache in caches for layer in cache.layers] == [4] * sum(map(len, caches))
    past.crop(past.get_seq_length())
    with pytest.raises(ValueError, match="cannot be cropped from 7 to 3"):
        past.crop(3)
    past.reset()
    assert past.get_seq_length() == 0 and not any(layer.tensors for cache in caches for layer in cache.layers)
    assert {layer.batch_size for cache in caches for layer in cache.layers} == {None}
    torch.testing.assert_close(model(**complete, cache=past).logits, expected)


@pytest.mark.parametrize(("family", "with_encoder"), PLAIN)
def test_use_cache_defaults_to_the_configuration(family, with_encoder):
    """`use_cache` follows changes of the configuration of an existing model; its default is False in training."""
    model = make_plain(family, is_encoder_decoder=with_encoder)
    inputs = source(model, 2) | target(model, padded([5, 5], 5, "none")[0])
    assert type(model(**inputs).cache) is type(new_cache(model))
    assert model.train()(**inputs).cache is None
    model.config.use_cache = False
    assert model.eval()(**inputs).cache is None
    assert model(**inputs, use_cache=True).cache is not None


@torch.no_grad()
@pytest.mark.parametrize(("family", "with_encoder"), PLAIN)
def test_incompatible_caches_raise(family, with_encoder):
    """Caches of a deeper model or of another class raise an error; `test_guards.py` checks the other errors."""
    model, deeper = (make_plain(family, is_encoder_decoder=with_encoder, num_hidden_layers=count) for count in (1, 2))
    inputs = source(model, 2) | target(model, torch.randint(3, 23, (2, 5)))
    past = model(**inputs, use_cache=True).cache
    with pytest.raises(ValueError, match="does not fit this model and batch|another source, of another batch or model"):
        deeper(**inputs, cache=past)
    others = [((),)]
    if not with_encoder:
        others.append(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    else:  # a decoder accepts an empty cache of transformers: `EncoderDecoderModel.generate` creates it
        others += [past.self_attention_cache, EncoderDecoderCache(past.self_attention_cache, DynamicCache())]
    for other in others:
        with pytest.raises(ValueError, match=f"must be a {type(past).__name__}, got a {type(other).__name__}"):
            model(**inputs, cache=other)
