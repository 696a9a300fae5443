"""Programs of every kind equal the model for texts shorter and longer than the example, P and a chunk."""

import copy
import shutil
import warnings
from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.exporters import DynamoConfig, DynamoExporter

from tests.marks import slow_but
from tests.modeling.contract import FACTORIES
from tests.modeling.samples import borders, make_inputs

from . import decoders, luna, mega, megalodon_decoders
from .decoders import a_third, make, weekly_but

COMPILER = next(filter(shutil.which, ("g++", "c++", "clang++")), None)
QUICKLY = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # C++ compilation dominates the run time
CHUNKS, SIMPLE = mega.VARIANTS["laplace chunks"], mega.VARIANTS["relu2 simple post-norm"]
CLASSES = FACTORIES
MODELS = {
    "luna": lambda: luna.make("ForMaskedLM"),
    "luna, fixed P": lambda: luna.make("Model", dynamic_projection_length=False, position_embedding_type="sinusoidal"),
    "luna, types": lambda: luna.make("ForMultipleChoice", type_vocab_size=2),
    "luna, pairs": lambda: luna.make("ForSequencePairClassification"),
    "luna, values": lambda: luna.make("ForSequenceClassification", **luna.VALUES),
    "mega": lambda: mega.make("ForMaskedLM"),
    "mega, truncated": lambda: mega.make("ForTokenClassification", **mega.VARIANTS["one direction, truncated"]),
    "mega, chunks": lambda: mega.make("ForQuestionAnswering", **CHUNKS),
    "mega, simple": lambda: mega.make("Model", **SIMPLE | {"max_positions": 99}),
    "mega, batch norm": lambda: mega.make("ForSequenceClassification", **mega.VARIANTS["batchnorm, norms around"]),
    "mega, shift": lambda: mega.make("ForMaskedLM", **mega.VARIANTS["simple chunks, shift, no ffn"]),
    "megalodon": lambda: megalodon_decoders.make("ForSequenceClassification", torch.float32, num_hidden_layers=1),
    "luna decoder": lambda: make("luna: softplus", num_hidden_layers=1).float(),
    "mega decoder": lambda: make("mega: softmax", num_hidden_layers=1).float(),
    "mega decoder, chunks": lambda: make("mega: laplace chunks", num_hidden_layers=1).float(),
    "megalodon decoder": lambda: make("megalodon: heads", num_hidden_layers=1).float(),
    "luna seq2seq": lambda: make("luna seq2seq: translation", num_hidden_layers=1).float(),
    "mega seq2seq": lambda: make("mega seq2seq: softmax", num_hidden_layers=1).float(),
    "mega, no average": lambda: mega.make("ForMaskedLM", **mega.VARIANTS["no average, no bias"]),
    "mega decoder, no average": lambda: make("mega: laplace chunks, no average, no bias", num_hidden_layers=1).float(),
    "mega seq2seq, no average": lambda: make("mega seq2seq: no average, no bias", num_hidden_layers=1).float(),
}


def export_program(model, sample):
    shapes = {name: dict.fromkeys(range(x.dim()), torch.export.Dim.DYNAMIC) for name, x in sample.items()}
    program = torch.export.export(model, (), sample, dynamic_shapes=shapes, strict=False)
    assert "luna_mega" not in program.graph_module.code
    return program


def export(model, sample):
    return export_program(model, sample).module()


def compiled(model, sample):
    torch.compiler.reset()
    program = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    program(**sample)
    return program


def check(way, name, lengths, attention=None):
    """Check that a program made from texts of these lengths equals the model for other lengths."""
    model = MODELS[name]().eval()
    if attention is not None:
        model.set_attn_implementation(attention)
    model.config.return_dict = model.config.use_cache = False
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = borders(model.config)[-1]
        program = way(model, make_inputs(model, lengths(last)))
        for others, side in (([2, 1], "right"), ([last - 1 or 1], "right"), ([2 * last + 3, last, 3], "left")):
            inputs = make_inputs(model, others, side, gaps=len(others) > 2, seed=1)
            actual, expected = program(**inputs)[0], model(**inputs)[0]
            mask = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
            if actual.shape[: mask.dim()] == mask.shape:
                actual, expected = actual[mask], expected[mask]
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


LENGTHS = {"short": lambda last: [3, 2], "long": lambda last: [last + 2, 2]}
WAYS = {"exported": export, "compiled": compiled}
# One case for each model, a third of which is slow; the others are checked every week.
ONE_EACH = [(name, [*LENGTHS][i % 2], [*WAYS][i // 2 % 2]) for i, name in enumerate(MODELS)]


def test_an_exported_program():
    check(export, "luna decoder", LENGTHS["short"])


@pytest.mark.slow
@pytest.mark.parametrize("name, lengths, way", weekly_but(ONE_EACH[::3], ONE_EACH))
def test_programs(name, lengths, way):
    check(WAYS[way], name, LENGTHS[lengths])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lengths"), [("luna, fixed P", "short"), ("mega", "long")])
def test_exported_programs_with_eager_attention(name, lengths):
    check(export, name, LENGTHS[lengths], "eager")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="AOTInductor needs a C++ compiler")
def test_ahead_of_time_packages(tmp_path):
    def packaged(model, sample):
        options = {"package_path": str(tmp_path / "model.pt2"), "inductor_configs": QUICKLY}
        return torch._inductor.aoti_load_package(
            torch._inductor.aoti_compile_and_package(export_program(model, sample), **options)
        )

    # runs in sequence, because the second compilation reuses the precompiled torch headers
    for name in ("luna", "mega, chunks"):
        check(packaged, name, LENGTHS["long"])


@pytest.mark.filterwarnings("ignore")  # warnings of the tracer
@pytest.mark.parametrize("name", a_third(CLASSES))
def test_tracing_raises_an_error(name):
    model = CLASSES[name]()
    inputs = make_inputs(model, [4, 2])
    with pytest.raises(RuntimeError, match="^`torch.jit.trace` is not supported; use `torch.export.export`$"):
        torch.jit.trace(lambda *given: model(**dict(zip(inputs, given, strict=True))), tuple(inputs.values()))


def compiled_step(model, inputs, name, past):
    torch.compiler.reset()
    return torch.compile(model, backend="eager", fullgraph=True)


def exported_step(model, inputs, name, past):
    return DynamoExporter().export(model, {**inputs, name: past}, DynamoConfig()).program.module()


STEPS = {"compiled": compiled_step, "exported": exported_step}
NAMES = ["cache", "past_key_values"]
# Each family in both ways, under one of the names.
CACHED = [(*pair, NAMES[(i + i // 2) % 2]) for i, pair in enumerate(product(decoders.FAMILIES, STEPS))]


@torch.no_grad()
@pytest.mark.parametrize("family, way, name", slow_but([("mega", "compiled", "past_key_values")], CACHED))
def test_steps_with_a_cache(family, way, name, monkeypatch):
    """A program of a step has the cache in its inputs and outputs, under either name."""
    # The exporter would convert Megalodon's float64 statistics to the dtype of the model, see docs/export.md.
    monkeypatch.setattr("transformers.exporters.utils.cast_leaf_tensors", lambda inputs, **_: inputs)
    model = decoders.make_plain(family, num_hidden_layers=1).float()
    past = model(torch.tensor([[5, 9, 4], [7, 7, 8]]), use_cache=True, logits_to_keep=1).cache
    inputs = {"input_ids": torch.tensor([[4], [5]])}
    step = STEPS[way](model, inputs, name, copy.deepcopy(past))
    actual = step(**inputs, **{name: copy.deepcopy(past)})
    expected = model(**inputs, **{name: past})
    torch.testing.assert_close(actual.logits, expected.logits)
    assert actual.cache is actual[name]
    assert way == "exported" or actual.cache.get_seq_length() == 4  # an exported cache contains only tensors
    assert actual.cache.layers[0].tensors.keys() == past.layers[0].tensors.keys()


EIGHTS = {"use_chunking": True, "chunk_size": 8}
COUNTED = {
    "mega chunks": lambda: mega.make("ForMaskedLM", num_hidden_layers=1, **EIGHTS),
    "luna decoder": lambda: make("luna: softplus", num_hidden_layers=1).float(),
    "luna seq2seq": lambda: make("luna seq2seq: translation", num_hidden_layers=1).float(),
    "mega decoder, chunks": lambda: make("mega: laplace chunks", num_hidden_layers=1).float(),
    "megalodon": lambda: make("megalodon: heads", num_hidden_layers=1).float(),
}

# Lengths that a chunk divides or does not divide, lengths below a chunk and below l, and a batch of one sequence.
SHAPES = [(2, 17), (1, 19), (2, 16), (3, 5), (1, 3)]
# Model and whether it is trained; one case of each kind is slow, and the others are checked every week.
COMPILED = [("mega chunks", True), ("luna decoder", False)]


@pytest.mark.slow
@pytest.mark.parametrize("name, training", decoders.weekly_but(COMPILED, product(COUNTED, [False, True])))
def test_two_programs_serve_all_lengths(name, training):
    torch.compiler.reset()
    counter, model = CompileCounter(), COUNTED[name]().train(training)
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for batch, length in SHAPES:
        inputs = luna.tokens([length, max(1, length - 1), max(1, length // 2)][:batch])
        inputs = {key: value.clamp(max=29) for key, value in inputs.items()}
        if training:
            compiled(**inputs, labels=inputs["input_ids"]).loss.backward()
            continue
        options = {"use_cache": False} if model.config.is_decoder else {}
        if model.config.is_encoder_decoder:
            options = {"use_cache": False, "decoder_input_ids": inputs["input_ids"]}
        with torch.no_grad():
            expected, actual = (run(**inputs, **options).logits for run in (model, compiled))
        kept = inputs["attention_mask"].bool()
        torch.testing.assert_close(actual[kept], expected[kept], atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", decoders.weekly_but(["mega decoder, chunks"], ["luna decoder", "mega decoder, chunks", "megalodon"])
)
def test_a_compiled_model_generates_the_same_tokens(name):
    torch.compiler.reset()
    counter, model = CompileCounter(), COUNTED[name]().eval()
    inputs = {key: value.clamp(max=29) for key, value in luna.tokens([11, 7]).items()}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    model.compile(backend=counter)
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert counter.frame_count < 8  # must be fewer than the 12 steps, two of which end a chunk


@pytest.mark.slow
def test_programs_clear_empty_rows():
    model = luna.make("ForSequenceClassification", num_hidden_layers=1)
    program = torch.export.export(model, (), luna.tokens([3, 9]), strict=False).module()
    for lengths in ([0, 9], [0, 4]):
        inputs = luna.tokens(lengths, width=9)
        inputs["input_ids"][0] = 7
        torch.testing.assert_close(program(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-5)
