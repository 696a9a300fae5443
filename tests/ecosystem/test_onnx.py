"""ONNX: results of onnxruntime equal the model's, for lengths and batch sizes that the export did not use."""

import json

import pytest
import torch
from tokenizers import processors

from luna_mega import MegaConfig, MegaForImageClassification
from luna_mega.modeling_common.cache import new_cache
from tests.ecosystem.programs import batches, compare, export_onnx
from tests.modeling import luna, mega, megalodon_decoders
from tests.modeling.decoders import make
from tests.modeling.samples import make_inputs

onnx_ir = pytest.importorskip("onnx_ir", reason="onnxscript is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
quantization = pytest.importorskip("onnxruntime.quantization", reason="onnxruntime is not installed")

ENCODERS = {
    "luna without a head": lambda: luna.make("Model", num_hidden_layers=1),  # the program also returns the mask
    "luna": lambda: luna.make("ForMaskedLM", num_hidden_layers=1),
    "mega chunks": lambda: mega.make(
        "ForSequenceClassification", num_hidden_layers=1, **mega.VARIANTS["laplace chunks"]
    ),
    "mega truncated": lambda: mega.make(
        "ForTokenClassification", num_hidden_layers=1, **mega.VARIANTS["one direction, truncated"]
    ),
    "megalodon": lambda: megalodon_decoders.make("ForSequenceClassification", torch.float32, num_hidden_layers=1),
}
DECODERS = {
    "luna": lambda: make("luna: softplus", num_hidden_layers=1).float(),
    "mega": lambda: make("mega: softmax", num_hidden_layers=1).float(),
    "mega chunks": lambda: make("mega: laplace chunks", num_hidden_layers=1).float(),
    "mega with an encoder": lambda: make("mega seq2seq: softmax", num_hidden_layers=1).float(),
}


def write(model, sample, path):
    """Export a model as one program, write it, and return its `ExportedModel`."""
    exported = export_onnx(model, sample)
    onnx_ir.save(exported.program, str(path))
    return exported


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name, tmp_path):
    model, file = ENCODERS[name]().float().eval(), tmp_path / "model.onnx"
    sample, *others = batches(model)
    runners = write(model, sample, file).to(device="cpu").runners
    assert all(compare(model, runners, inputs) <= 1e-4 for inputs in others)
    names = [x.name.removeprefix("input.") for x in onnxruntime.InferenceSession(str(file)).get_inputs()]
    assert names == ["input_ids", "attention_mask"]  # the exporter renames an input that is also an output
    assert {"CustomOp", "DFT", "Loop"}.isdisjoint(node.op_type for node in onnx_ir.load(file).graph.all_nodes())


@pytest.mark.parametrize("types", [0, 2])
def test_programs_read_what_the_tokenizer_returns(types, tmp_path, tokenizer):
    """Exported programs accept the tokenizer's inputs, in float32 and in int8; models without types read zeros."""
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_input_names = names if types else names[::2]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    model = luna.make("ForSequenceClassification", num_hidden_layers=1, type_vocab_size=types).float().eval()
    file = tmp_path / "a.onnx"
    program = write(model, batches(model, tokenizer)[0], file).program
    for weight in program.graph.initializers.values():  # quantization changes weights, and fails if shapes are recorded
        weight.shape = weight.type = None
        weight.metadata_props.clear()
    onnx_ir.save(program, str(file))
    quantization.quantize_dynamic(file, tmp_path / "int8.onnx")
    for texts in (["w1"], ["w1 w2 w3 w4 w5 w6", "w7 w8 w9"], ["w1 w2", "w3"]):
        inputs = tokenizer([texts[0]] * 2, [texts[-1]] * 2, return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs).logits
        for path, tolerance in ((file, 1e-5), (tmp_path / "int8.onnx", 0.1)):
            session = onnxruntime.InferenceSession(str(path))
            (logits,) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
            torch.testing.assert_close(torch.tensor(logits), expected, atol=tolerance, rtol=tolerance)


def test_answers(tmp_path):
    """Scores at padding are the lowest number in the exported program too."""
    model, output = luna.make("ForQuestionAnswering", num_hidden_layers=1).float().eval(), tmp_path / "model.onnx"
    write(model, batches(model)[0], output)
    inputs = luna.tokens([9, 4], "left", 12)
    found = onnxruntime.InferenceSession(str(output)).run(None, {name: x.numpy() for name, x in inputs.items()})
    with torch.no_grad():
        expected = model(**inputs)
    for logits, scores in zip((expected.start_logits, expected.end_logits), map(torch.tensor, found), strict=True):
        kept = inputs["attention_mask"].bool()
        torch.testing.assert_close(scores[kept], logits[kept], rtol=1e-4, atol=1e-4)
        assert (scores[~kept] == torch.finfo(torch.float32).min).all()


def test_images(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "nffn_hidden_size": 20, "shared_representation_size": 8}
    config = MegaConfig.image_base_patch16_224(**sizes, num_hidden_layers=1, image_size=32, patch_size=8, num_labels=3)
    model = MegaForImageClassification(config).eval()
    write(model, batches(model)[0], tmp_path / "model.onnx")
    images = torch.randn(5, 3, 32, 32)
    (logits,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"pixel_values": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), model(images).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, tmp_path):
    model = DECODERS[name]().eval()
    sample, *others = batches(model)
    exported = export_onnx(model, sample)
    exported.save_pretrained(tmp_path / "out")
    parts = {"prefill", "decode"} | ({"encoder"} if model.config.is_encoder_decoder else set())
    runners = exported.to(device="cpu").runners
    assert set(exported.components) == parts
    assert 0 < max(compare(model, runners, inputs) for inputs in others) <= 1e-5
    assert set(json.loads((tmp_path / "out" / "export.json").read_text(encoding="utf-8"))["components"]) == parts


def test_steps_continue_from_the_model_cache():
    """Steps from a model's cache give the tokens of `generate`, for caches of one position to more than a chunk."""
    model = DECODERS["mega chunks"]()
    runners = export_onnx(model, make_inputs(model, [9, 5], "left")).to(device="cpu").runners

    def run(part, ids, mask, past):
        output = runners[part](input_ids=ids, attention_mask=mask, cache=past)
        return output.logits, output["cache"]

    ids, past, logits = torch.randint(3, 23, (3, 13)), new_cache(model), []
    for end in range(1, 14):
        part = "prefill" if end == 1 else "decode"
        scores, past = run(part, ids[:, end - 1 : end], torch.ones_like(ids[:, :end]), past)
        logits.append(scores)
    with torch.no_grad():
        expected = model(ids, torch.ones_like(ids), use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-5, rtol=1e-5)

    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    scores, past = run("prefill", ids, mask, new_cache(model))
    for _ in range(6):
        ids, mask = torch.cat([ids, scores[:, -1:].argmax(-1)], 1), torch.cat([mask, mask[:, -1:]], 1)
        scores, past = run("decode", ids[:, -1:], mask, past)
    assert ids.equal(generated)
