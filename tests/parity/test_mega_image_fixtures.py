"""Converted Mega image models against the original's, by command line and Auto classes.

Patches, every hidden state, moving averages, features, logits, losses and the gradient of every parameter in
evaluation and in training, stochastic depth with the original's draws, and the export back.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForImageClassification

from luna_mega import MegaForImageClassification
from luna_mega_cli import main

CASES = [
    "16_image_batchnorm_linear_nopos_rep",
    "16_image_layernorm_conv",
    "16_image_scalenorm_linear",
]


@pytest.fixture(scope="module", params=CASES)
def fixture(request, parity_folder, tmp_path_factory):
    folder = parity_folder("mega", request.param)
    output = tmp_path_factory.mktemp(request.param) / "model"
    assert main(["convert", str(folder / "checkpoint.pt"), "--output", str(output)]) == 0
    tolerance = json.loads((folder / "meta.json").read_text())["tolerance"]
    return folder, output, load_file(folder / "io.safetensors"), tolerance


def load(output, **fields):
    model, loading = AutoModelForImageClassification.from_pretrained(output, output_loading_info=True, **fields)
    assert type(model) is MegaForImageClassification
    assert not loading["missing_keys"] and not loading["mismatched_keys"] and not loading["unexpected_keys"]
    return model


def check_gradients(parity, output, model, io, tolerance, prefix):
    rows = json.loads((output / "conversion_report.json").read_text())["mapped"]
    parameters = dict(model.named_parameters())
    gradients = {row["source"]: parameters[row["target"]].grad for row in rows if row["target"] in parameters}
    expected = {name.removeprefix(prefix): value for name, value in io.items() if name.startswith(prefix)}
    assert expected.keys() == gradients.keys()
    for name, value in expected.items():
        gradient = gradients[name].reshape(value.shape)  # linear patches are stored as a convolution
        parity.check(prefix + name, gradient, value, atol=tolerance["grad_atol"], rtol=tolerance["grad_rtol"])


def test_evaluation(fixture, parity):
    _, output, io, tolerance = fixture
    model = load(output).eval()
    seen = {}

    def record(name, module, pick=lambda result: result):
        module.register_forward_hook(lambda module, args, result: seen.update({name: pick(result)}))

    record("patches", model.mega.embedding_layer.patch_embeddings)
    record("hidden.0", model.mega.embedding_layer)
    for index, layer in enumerate(model.mega.layers, start=1):
        record(f"ema.{index}", layer.mega_layer.ema_gate)
        record(f"mega.{index}", layer.mega_layer, lambda result: result[0])
        record(f"hidden.{index}", layer)
    record("final_norm", model.mega.final_norm)
    record("out_proj", model.mega.output_projection)
    model.classifier.out_proj.register_forward_hook(lambda module, args, result: seen.update(features=args[0]))
    pixels = io["pixel_values"].requires_grad_()
    outputs = model(pixel_values=pixels, labels=io["labels"])
    width = {"atol": tolerance["atol"], "rtol": tolerance["rtol"]}
    for name, actual in seen.items():
        parity.check(name, actual, io[name], **width)
    parity.check("logits", outputs.logits, io["logits"], **width)
    parity.check("loss", outputs.loss, io["loss"], **width)
    smoothed = cross_entropy(outputs.logits, io["labels"], label_smoothing=0.1)
    parity.check("loss_smoothing", smoothed, io["loss_smoothing"], **width)
    outputs.loss.backward()
    width = {"atol": tolerance["grad_atol"], "rtol": tolerance["grad_rtol"]}
    parity.check("grad_pixel_values", pixels.grad, io["grad_pixel_values"], **width)
    check_gradients(parity, output, model, io, tolerance, "grad.")
    body = AutoModel.from_pretrained(output).eval()
    parity.check("last_hidden_state", body(pixel_values=io["pixel_values"]).last_hidden_state, io["out_proj"])


def test_training(fixture, parity):
    _, output, io, tolerance = fixture
    model = load(output, drop_path_rate=0.0).train()
    logits = model(pixel_values=io["train_pixel_values"]).logits
    loss = cross_entropy(logits, io["train_targets"])
    width = {"atol": tolerance["atol"], "rtol": tolerance["rtol"]}
    parity.check("train_logits", logits, io["train_logits"], **width)
    parity.check("train_loss", loss, io["train_loss"], **width)
    loss.backward()
    check_gradients(parity, output, model, io, tolerance, "train_grad.")
    rows = json.loads((output / "conversion_report.json").read_text())["mapped"]
    names, buffers = {row["source"]: row["target"] for row in rows}, dict(model.named_buffers())
    for name, value in io.items():
        if name.startswith("train_state."):
            ours = buffers[names[name.removeprefix("train_state.")]]
            parity.check(name, ours.float(), value.float(), **width)


def test_stochastic_depth(fixture, parity, monkeypatch):
    """Replace the random factors by the original's."""
    _, output, io, tolerance = fixture
    model = load(output, drop_path_rate=0.5).train()
    for index, layer in enumerate(model.mega.layers):
        for name in ("mega_layer", "nffn"):
            drop_path, factors = getattr(layer, name).drop_path, io.get(f"droppath_mask.{index}.{name}")
            assert drop_path.probability == pytest.approx(0.5 * index / (len(model.mega.layers) - 1))
            if factors is not None:
                monkeypatch.setattr(drop_path, "draw", lambda states, count, kept=factors: kept[:, None])
    logits = model(pixel_values=io["pixel_values"]).logits
    parity.check("droppath_logits", logits, io["droppath_logits"], atol=tolerance["atol"], rtol=tolerance["rtol"])


def test_export_reproduces_the_file(fixture, tmp_path):
    folder, output, _, _ = fixture
    assert main(["export", str(output), "--output", str(tmp_path / "checkpoint.pt")]) == 0
    old, new = (torch.load(path / "checkpoint.pt", weights_only=False) for path in (folder, tmp_path))
    assert list(old["model"]) == list(new["model"]) and old["args"] == new["args"] and old["steps"] == new["steps"]
    for name, tensor in old["model"].items():
        assert tensor.dtype == new["model"][name].dtype and torch.equal(tensor, new["model"][name]), name


def test_every_fixture_is_tested(parity_folder):
    names = parity_folder.names("mega")
    assert {name for name in names if name.startswith("16")} <= set(CASES)
