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
from tests.modeling import contract, decoders, luna, mega
from tests.modeling.contract import CLASSES, MEMBERS, Batch
from tests.modeling.decoders import a_third
from tests.modeling.samples import borders, make_inputs

COMPILER = next(filter(shutil.which, ("g++", "c++", "clang++")), None)
QUICKLY = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # C++ compilation dominates the run time
MODELS = ["luna tied", "luna fixed length", "luna types of choices", "luna ForSequencePairClassification"]
MODELS += ["luna values", "mega ForMaskedLM", "mega one direction, truncated", "mega laplace chunks"]
MODELS += ["mega relu2 simple post-norm", "mega batchnorm, norms around", "mega simple chunks, shift, no ffn"]
MODELS += ["megalodon ForSequenceClassification", *(name for name in CLASSES if name.endswith(("decoder", "seq2seq")))]
MODELS += ["mega: laplace chunks", *(name for name in MEMBERS if name.endswith("no average, no bias"))]


def make(name, **fields):
    return MEMBERS[name].make(torch.float32, **MEMBERS[name].tables(99), num_hidden_layers=1, **fields)


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


def check(way, name, lengths):
    """Check that a program made from texts of these lengths equals the model for other lengths, and without tokens."""
    model = make(name)
    model.config.return_dict = model.config.use_cache = False
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = borders(model.config)[-1]
        program = way(model, make_inputs(model, lengths(last)))
        for others, side in (([2, 1], "right"), ([last - 1 or 1], "right"), ([2 * last + 3, last, 3, 0], "left")):
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
WEEKLY = [pytest.param(*case, marks=pytest.mark.exhaustive) for i, case in enumerate(ONE_EACH) if i % 3]


def test_an_exported_program():
    check(export, "luna decoder", LENGTHS["short"])
    model, ids = make("luna tied", pad_token_id=None), torch.randint(4, 23, (2, 5))  # no mask, fewer tokens than P
    inputs = {"input_ids": ids, "position_ids": torch.arange(5).repeat(2, 1)}
    program = export(model, {name: x[:, :4].clone() for name, x in inputs.items()})
    torch.testing.assert_close(program(**inputs)[0], model(ids)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name, lengths, way", ONE_EACH[::3] + WEEKLY)
def test_programs(name, lengths, way):
    check(WAYS[way], name, LENGTHS[lengths])


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="AOTInductor needs a C++ compiler")
def test_ahead_of_time_packages(tmp_path):
    def packaged(model, sample):
        options = {"package_path": str(tmp_path / "model.pt2"), "inductor_configs": QUICKLY}
        return torch._inductor.aoti_load_package(
            torch._inductor.aoti_compile_and_package(export_program(model, sample), **options)
        )

    # runs in sequence, because the second compilation reuses the precompiled torch headers
    for name in ("luna tied", "mega laplace chunks"):
        check(packaged, name, LENGTHS["long"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["luna tied", "mega batchnorm, norms around"])
def test_a_compiled_training_step(name):
    """It has the outputs, gradients and batch statistics of an eager one."""
    torch.compiler.reset()
    model, batch = make(name, **(luna if "luna" in name else mega).NO_DROPOUT).double().train(), Batch("right")
    program, inputs = copy.deepcopy(model), contract.collate(MEMBERS[name], batch)
    program.compile(fullgraph=True, backend="aot_eager")
    contract.compare(contract.run(program, *inputs), contract.run(model, *inputs))
    torch.testing.assert_close(dict(program.named_buffers()), dict(model.named_buffers()))


@pytest.mark.filterwarnings("ignore")  # warnings of the tracer
@pytest.mark.parametrize("name", a_third(CLASSES))
def test_tracing_raises_an_error(name):
    model = make(name)
    inputs = make_inputs(model, [4, 2])
    with pytest.raises(RuntimeError, match="^`torch.jit.trace` is not supported; use `torch.export.export`$"):
        torch.jit.trace(lambda *given: model(**dict(zip(inputs, given, strict=True))), tuple(inputs.values()))


def compiled_step(model, inputs, name, past):
    torch.compiler.reset()
    return torch.compile(model, backend="eager", fullgraph=True)


def exported_step(model, inputs, name, past):
    return DynamoExporter().export(model, {**inputs, name: past}, DynamoConfig()).program.module()


STEPS = {"compiled": compiled_step, "exported": exported_step}


@torch.no_grad()
@pytest.mark.parametrize("family, way", slow_but([("mega", "compiled")], product(decoders.FAMILIES, STEPS)))
def test_steps_with_a_cache(family, way, monkeypatch):
    """A program of a step has the cache in its inputs and outputs, under either name."""
    # The exporter would convert Megalodon's float64 statistics to the dtype of the model, see docs/ecosystem.md.
    monkeypatch.setattr("transformers.exporters.utils.cast_leaf_tensors", lambda inputs, **_: inputs)
    model, name = make(f"{family} decoder"), "cache" if family == "luna" else "past_key_values"
    past = model(torch.tensor([[5, 9, 4], [7, 7, 8]]), use_cache=True, logits_to_keep=1).cache
    inputs = {"input_ids": torch.tensor([[4], [5]])}
    step = STEPS[way](model, inputs, name, copy.deepcopy(past))
    actual = step(**inputs, **{name: copy.deepcopy(past)})
    expected = model(**inputs, **{name: past})
    torch.testing.assert_close(actual.logits, expected.logits)
    assert actual.cache is actual[name]
    assert way == "exported" or actual.cache.get_seq_length() == 4  # an exported cache contains only tensors
    assert actual.cache.layers[0].tensors.keys() == past.layers[0].tensors.keys()


# Lengths that a chunk divides or does not divide, lengths below a chunk and below l, and a batch of one sequence.
SHAPES = [(2, 17), (1, 19), (2, 16), (3, 5), (1, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("name, training", [("mega laplace chunks", True), ("luna decoder", False)])
def test_two_programs_serve_all_lengths(name, training):
    torch.compiler.reset()
    counter, model = CompileCounter(), make(name).train(training)
    program = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for batch, length in SHAPES:
        lengths = Batch("right", (length, max(1, length - 1), max(1, length // 2))[:batch], extra=0)
        inputs, kept = contract.collate(MEMBERS[name], lengths)
        labels, options = inputs.pop("labels"), {} if "ForMasked" in type(model).__name__ else {"use_cache": False}
        if training:
            program(**inputs, labels=labels, **options).loss.backward()
            continue
        with torch.no_grad():
            expected, actual = (run(**inputs, **options).logits for run in (model, program))
        torch.testing.assert_close(actual[kept], expected[kept], atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name, cache", [("mega: laplace chunks", "dynamic"), ("luna decoder", "static")])
def test_a_compiled_model_generates_the_same_tokens(name, cache):
    torch.compiler.reset()
    counter, model = CompileCounter(), make(name)
    ids, mask = decoders.padded([11, 7], 11, "left")
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    model.compile(backend=counter)
    assert torch.equal(model.generate(ids, **options, cache_implementation=cache), expected)
    assert counter.frame_count < 8  # must be fewer than the 12 steps, two of which end a chunk
