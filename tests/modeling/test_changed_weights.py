"""Caches that survive a change of the weights, and values that `generate` computes once."""

import copy
import random
import threading

import pytest
import torch
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from luna_mega.modeling_mega import modeling_mega
from luna_mega.modeling_megalodon import modeling_megalodon
from tests.modeling import decoders

NAMES = [name for name in decoders.DECODERS if not name.startswith("luna")]


def optimize(model, rng, loss):
    kind = rng.choice([torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
    loss.backward()
    kind(model.parameters(), 0.05, fused=True).step()


def write_data(model, rng, loss):
    for weight in model.parameters():
        weight.data.mul_(rng.choice([0.7, 1.3]))


def replace_storage(model, rng, loss):
    vector_to_parameters(0.8 * parameters_to_vector(model.parameters()), model.parameters())


def load(model, rng, loss):
    model.load_state_dict({name: 0.8 * x for name, x in model.state_dict().items()}, assign=rng.random() < 0.5)


def prune_averages(model, rng, loss):
    for module in model.modules():
        for name in ("kernel_projection_matrix", "gamma", "alpha"):
            if isinstance(getattr(module, name, None), torch.Tensor) and name in module._parameters:
                prune.random_unstructured(module, name, amount=0.5)


CHANGES = [optimize, write_data, replace_storage, load, prune_averages]


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_continues_with_the_current_weights(name):
    """Dynamic evaluation: steps, each after a change of the weights."""
    rng, model = random.Random(name), decoders.make(name, dtype=torch.float32)
    ids, mask = decoders.padded([5, 3], 5, "left")
    inputs = decoders.source(model, 2) | decoders.target(model, ids, mask, use_cache=True)
    with torch.no_grad():
        past = model(**inputs).cache
    for change in rng.choices(CHANGES, k=4):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        step = decoders.source(model, 2) | decoders.target(model, torch.randint(3, 23, (2, 1)), mask)
        with torch.no_grad():
            model(**step, cache=past)
            new = copy.deepcopy(past)
        change(model, rng, model(**inputs | {"use_cache": False}).logits.square().mean())
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        step = decoders.source(model, 2) | decoders.target(model, torch.randint(3, 23, (2, 1)), mask)
        with torch.no_grad():
            torch.testing.assert_close(
                model(**step, cache=past).logits, model(**step, cache=new).logits, rtol=0, atol=0
            )


@pytest.fixture
def computed(monkeypatch):
    """Return a list of the names of computed coefficients and biases."""
    names = []

    def record(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **options: names.append(name) or function(*given, **options))

    record(modeling_mega, "ema_coefficients")
    record(modeling_megalodon, "complex_ema_coefficients")
    record(modeling_mega.MegaRotaryRelativeBias, "forward")
    return names


KEPT = {"mega: laplace chunks": ["ema_coefficients", "forward"], "megalodon: heads": ["complex_ema_coefficients"]}
OPTIONS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
}


class StopError(Exception):
    pass


def stop(ids, scores):
    if ids.shape[1] == 7:
        raise StopError
    return scores


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", KEPT)
def test_generate_computes_coefficients_once(name, options, computed):
    model, ids = decoders.make(name, dtype=torch.float32), torch.randint(3, 23, (2, 4))
    run = {"eos_token_id": None, "max_new_tokens": 8, "return_dict_in_generate": True, **OPTIONS[options]}
    for _ in range(2):
        computed.clear()
        past = model.generate(ids, **run).past_key_values
        # The prompt has a bias, too.
        assert sorted(computed) == sorted(KEPT[name] * 2 + ["forward"] * 2 * ("forward" in KEPT[name]))
    with pytest.raises(StopError):
        model.generate(ids, **run, logits_processor=[stop])
    inputs = {"input_ids": ids[:1].repeat(past.layers[0].batch_size, 1)[:, :1]}
    past = past if options == "greedy" else copy.deepcopy(past)
    computed.clear()
    with torch.no_grad():
        for _ in range(2):
            model(**inputs, cache=past)
    assert {name: computed.count(name) for name in computed} in ({}, {"forward": 4})  # the op computes coefficients


def test_only_generate_of_the_same_thread_keeps_coefficients(computed):
    model, ids = decoders.make("megalodon: heads", dtype=torch.float32), torch.randint(3, 23, (2, 4))
    with torch.no_grad():
        past = model(ids, use_cache=True).cache
    inner = []

    def step():
        with torch.no_grad():
            model(ids[:, :1], cache=past)

    def observe(ids, scores):
        computed.clear()
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        inner.append(list(computed))
        return scores

    expected = model.generate(ids, eos_token_id=None, max_new_tokens=5)
    actual = model.generate(ids, eos_token_id=None, max_new_tokens=5, logits_processor=[observe])
    assert torch.equal(actual, expected) and inner == [[]] * 5


def test_a_function_that_generates_may_change_weights():
    model, ids = decoders.make("mega: softmax", dtype=torch.float32), torch.randint(3, 23, (2, 4))

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, cache=None, **given):
        model(input_ids, cache=cache)
        for _ in range(3):
            new = copy.deepcopy(cache)
            step = torch.randint(3, 23, (2, 1))
            torch.testing.assert_close(model(step, cache=cache).logits, model(step, cache=new).logits, rtol=0, atol=0)
            write_data(model, random.Random(0), None)
        return input_ids

    model.generate(ids, custom_generate=loop, max_new_tokens=3)
