"""`cache` is also accepted, and accessible in outputs, under its earlier name `past_key_values`."""

import copy
import inspect

import pytest
import torch
from transformers.exporters import DynamoConfig, DynamoExporter
from transformers.utils import ModelOutput

from tests.marks import diagonal, slow_but

from . import luna, mega
from .decoders import FAMILIES, PLAIN, make_plain, own_cache, padded, prompt, source, target

NAMES = ["cache", "past_key_values"]
BOTH = "Both `past_key_values` and `cache` are set .* Pass only `cache`"
plain = pytest.mark.parametrize(("family", "translates"), PLAIN)
# tests of code that all models share
two = pytest.mark.parametrize(("family", "translates"), [("luna", False), ("mega", True)])


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def model(family, translates):
    return make_plain(family, is_encoder_decoder=True) if translates else make_plain(family)


def first_pass(model, **options):
    ids, mask = padded([7, 7], 7, "right")
    return model(**source(model, 2), **target(model, ids, mask), use_cache=True, **options)


def step(model, **options):
    return model(**source(model, 2), **target(model, torch.tensor([[4], [5]])), **options)


def same_cache(output):
    """Return the cache of an output after checking that both names return it."""
    cache = output["cache"]
    assert cache is not None
    for name in NAMES:
        assert getattr(output, name) is output[name] is cache
    return cache


@plain
def test_forward(model):
    cache = same_cache(first_pass(model))
    same_cache(first_pass(model.base_model))
    expected = step(model, cache=copy.deepcopy(cache))
    assert own_cache(same_cache(expected)).get_seq_length() == 8
    for name in NAMES:
        actual = step(model, **{name: copy.deepcopy(cache)})
        assert torch.equal(actual.logits, expected.logits)
        base = step(model.base_model, **{name: copy.deepcopy(cache)})
        assert own_cache(same_cache(base)).get_seq_length() == 8
    for part in (model, model.base_model):
        with pytest.raises(ValueError, match=BOTH):
            step(part, cache=cache, past_key_values=cache)
        parameters = inspect.signature(part.forward).parameters
        assert [name for name in NAMES if name in parameters] == ["cache"]
    ids = torch.full((2, 8), 5)
    for name in NAMES:
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **{name: cache})
        assert inputs["cache"] is cache
        assert [x for x in NAMES if x in inputs] == ["cache"]
    with pytest.raises(ValueError, match=BOTH):
        model.prepare_inputs_for_generation(ids, cache=cache, past_key_values=cache)


@pytest.mark.parametrize("family", [luna, mega], ids=["luna", "mega"])
def test_models_without_a_cache(family):
    """Classes without a cache accept both names, including subclasses whose `forward` passes them on."""
    cache = first_pass(make_plain(family.__name__.split(".")[-1]))["cache"]
    for name, head in diagonal(NAMES, ("Model", "ForMaskedLM", "ForSequenceClassification")):
        with pytest.raises(ValueError, match="require a decoder"):
            family.make(head)(torch.full((2, 1), 5), **{name: cache})


@two
def test_generate(model):
    ids, mask = padded([7, 7], 7, "right")
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "return_dict_in_generate": True, "do_sample": False}
    first = model.generate(**prompt(model, ids, mask), **options)
    assert isinstance(first, ModelOutput)
    cache, results = same_cache(first), []
    for name in NAMES:
        sequences, kept = first.sequences, torch.ones_like(first.sequences)
        given = {**source(model, 2), **target(model, sequences, kept)}
        results.append(model.generate(**given, **{name: copy.deepcopy(cache)}, **options))
        assert own_cache(same_cache(results[-1])).get_seq_length() == sequences.shape[1] + 2
    assert torch.equal(*(result.sequences for result in results))


@pytest.mark.parametrize(("family", "name"), slow_but([("mega", "past_key_values")], diagonal(FAMILIES, NAMES)))
def test_compile(family, name):
    """Dynamo traces both names of argument and output without a graph break."""
    torch.compiler.reset()
    model = make_plain(family, num_hidden_layers=1).float()
    cache = first_pass(model)["cache"]
    inputs = {"input_ids": torch.tensor([[4], [5]])}

    def run(cache):
        output = model(**inputs, **{name: cache})
        return output.logits, output[name] is output.past_key_values, name in output, output.cache

    logits, same, contained, returned = torch.compile(run, backend="eager", fullgraph=True)(copy.deepcopy(cache))
    expected = step(model, **{name: copy.deepcopy(cache)}).logits
    torch.testing.assert_close(logits, expected)
    assert same and contained
    assert own_cache(returned).get_seq_length() == 8


@pytest.mark.slow
@pytest.mark.parametrize("family", ["luna", "megalodon"])
def test_export(family, monkeypatch):
    """An exported step has the cache in its inputs and outputs."""
    # The exporter would convert Megalodon's float64 statistics to the dtype of the model, see docs/export.md.
    monkeypatch.setattr("transformers.exporters.utils.cast_leaf_tensors", lambda inputs, **_: inputs)
    model = make_plain(family, num_hidden_layers=1).float()
    cache = first_pass(model, logits_to_keep=1)["cache"]
    inputs = {"input_ids": torch.tensor([[4], [5]])}
    program = DynamoExporter().export(model, {**inputs, "cache": copy.deepcopy(cache)}, DynamoConfig())
    actual = program.program.module()(**inputs, cache=copy.deepcopy(cache))
    expected = step(model, past_key_values=cache)
    torch.testing.assert_close(actual.logits, expected.logits)
    assert own_cache(same_cache(actual)).layers[0].tensors.keys() == own_cache(cache).layers[0].tensors.keys()


@two
def test_generation_in_training_mode(model):
    """A model in training mode can use a cache: without gradients, checkpointing runs each layer once."""
    ids, mask = padded([7, 7], 7, "right")
    model.gradient_checkpointing_enable()
    model.train()
    assert model.generate(**prompt(model, ids, mask), max_new_tokens=3).shape[0] == 2
    with torch.enable_grad(), pytest.raises(ValueError, match="gradient checkpointing runs a layer twice"):
        first_pass(model)
