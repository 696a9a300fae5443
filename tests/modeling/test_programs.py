"""Programs of every kind equal the model for texts shorter and longer than the example, P and a chunk."""

import shutil
import warnings

import pytest
import torch

from tests.modeling.samples import borders, make_inputs

from . import classes, luna, mega, megalodon_decoders
from .decoders import a_third, make, weekly_but

COMPILER = next(filter(shutil.which, ("g++", "c++", "clang++")), None)
QUICKLY = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # C++ compilation dominates the run time
CHUNKS, SIMPLE = mega.VARIANTS["laplace chunks"], mega.VARIANTS["relu2 simple post-norm"]
CLASSES = {**classes.HEADS, **classes.DECODERS, **classes.SEQ2SEQ}
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
