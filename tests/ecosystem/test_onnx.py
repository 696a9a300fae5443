"""ONNX: results of onnxruntime equal the model's, for lengths and batch sizes that the export did not use."""

import json

import pytest
import torch
from tokenizers import processors

from luna_mega import MegaConfig, MegaForImageClassification
from luna_mega.hub import onnx
from luna_mega.hub.samples import make_inputs
from luna_mega.modeling_common.cache import new_cache
from luna_mega_cli import main
from tests.errors import command_error
from tests.modeling import luna, mega, megalodon_decoders
from tests.modeling.decoders import make

pytest.importorskip("onnxscript", reason="onnxscript is not installed")
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
    "megalodon": lambda: megalodon_decoders.make("ForCausalLM", torch.float32, num_hidden_layers=1),
    "mega with an encoder": lambda: make("mega seq2seq: softmax", num_hidden_layers=1).float(),
}


def saved(path, model):
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name, tmp_path, capsys):
    output = tmp_path / "out" / "model.onnx"
    assert main(["onnx", str(saved(tmp_path / "model", ENCODERS[name]())), "--output", str(output)]) == 0
    assert "largest difference" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(output))
    assert [x.name for x in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert {"CustomOp", "DFT", "Loop"}.isdisjoint(_operators(output)) and list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("types", [0, 2])
def test_programs_read_what_the_tokenizer_returns(types, tmp_path, tokenizer, capsys):
    """Exported programs accept the tokenizer's inputs, in float32 and in int8; models without types read zeros."""
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_input_names = names if types else names[::2]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    model, file = (
        luna.make("ForSequenceClassification", num_hidden_layers=1, type_vocab_size=types),
        tmp_path / "a.onnx",
    )
    folder = saved(tmp_path / "model", model)
    tokenizer.save_pretrained(folder)
    assert main(["onnx", str(folder), "--output", str(file)]) == 0
    quantization.quantize_dynamic(file, tmp_path / "int8.onnx")
    for texts in (["w1"], ["w1 w2 w3 w4 w5 w6", "w7 w8 w9"], ["w1 w2", "w3"]):
        inputs = tokenizer([texts[0]] * 2, [texts[-1]] * 2, return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs).logits
        for path, tolerance in ((file, 1e-5), (tmp_path / "int8.onnx", 0.1)):
            session = onnxruntime.InferenceSession(str(path))
            (logits,) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
            torch.testing.assert_close(torch.tensor(logits), expected, atol=tolerance, rtol=tolerance)


def test_answers(tmp_path, capsys):
    """Scores at padding are the lowest number in the exported program too."""
    model, output = luna.make("ForQuestionAnswering", num_hidden_layers=1), tmp_path / "model.onnx"
    assert main(["onnx", str(saved(tmp_path / "model", model)), "--output", str(output)]) == 0
    capsys.readouterr()
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
    folder = saved(tmp_path / "model", model)
    assert main(["onnx", str(folder), "--output", str(tmp_path / "model.onnx")]) == 0
    images = torch.randn(5, 3, 32, 32)
    (logits,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"pixel_values": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), model(images).logits, rtol=1e-4, atol=1e-5)


def _operators(path):
    import onnx_ir

    return {node.op_type for node in onnx_ir.load(path).graph.all_nodes()}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, tmp_path):
    model = DECODERS[name]()
    report = onnx.export_onnx(saved(tmp_path / "model", model), tmp_path / "out")
    parts = {"prefill", "decode"} | ({"encoder"} if model.config.is_encoder_decoder else set())
    assert set(report.programs) == parts and 0 < report.difference <= 1e-5
    assert set(json.loads((tmp_path / "out" / "export.json").read_text(encoding="utf-8"))["components"]) == parts


@pytest.mark.parametrize("name", ["mega chunks", "megalodon"])
def test_steps_continue_from_the_model_cache(name):
    """Steps from a model's cache give the tokens of `generate`, for caches of one position to more than a chunk."""
    model = DECODERS[name]()
    with onnx._quiet():
        exported = onnx._export(model, make_inputs(model, [9, 5], "left"), None)
    runners = exported.to(device="cpu").runners

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


WITHOUT_RUNTIME = "find_spec", lambda name: None if name == "onnxruntime" else name
ERRORS = {  # model, options, output, replaced function of the module, part of the message
    "opset": ("luna", ["--opset", 11], "out", None, "--opset 11"),
    "no folder": (None, [], "out", None, "no such folder"),
    "one file": ("luna", [], "out.onnx", None, "--output"),
    "package": (
        "luna",
        [],
        "out",
        ("find_spec", lambda name: None if name == "onnxruntime" else name),
        "onnxruntime not",
    ),
    "wrong": ("encoder", [], "out", ("compare", lambda *_: float("nan")), "differs from the model by nan"),
    "failure": ("luna", [], "out", ("_export", lambda *_: 1 / 0), "division by zero"),
    "runtime": ("encoder", [], "out.onnx", ("compare", lambda *_: 1 / 0), "onnxruntime"),
    "adaptive": ("adaptive", [], "out", None, "adaptive_input_cutoffs"),
}


@pytest.mark.parametrize(("name", "options", "output", "replaced", "named"), ERRORS.values(), ids=ERRORS)
def test_errors_leave_no_files(name, options, output, replaced, named, tmp_path, monkeypatch, capsys):
    bands = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20]}
    bands |= {"adaptive_input_factor": 2, "adaptive_softmax_factor": 2}
    models = {"luna": DECODERS["luna"], "encoder": ENCODERS["luna"]}
    models["adaptive"] = lambda: make("mega: softmax", **bands).float()
    if name is not None:
        saved(tmp_path / "model", models[name]())
    if replaced is not None:
        monkeypatch.setattr(onnx, *replaced)
    assert named in command_error(capsys, "onnx", tmp_path / "model", "--output", tmp_path / output, *options)
    assert {path.name for path in tmp_path.iterdir()} <= {"model"}
