"""Converted Mega image models against the original, through the command line and the Auto classes.

The tests compare patches, hidden states, moving averages, features, logits, losses and gradients in evaluation and in
training, and stochastic depth with the original's random draws.
"""

import pytest
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForImageClassification

from tests.parity.original import originals

CASES = [
    "16_image_batchnorm_linear_nopos_rep",
    "16_image_layernorm_conv",
    "16_image_scalenorm_linear",
]


cases = originals("mega", CASES)


@cases
def test_evaluation(original, parity):
    io, seen = original.io, {}
    model = original.load(AutoModelForImageClassification)

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
    for name, actual in seen.items():
        parity.check(name, actual, io[name], **original.tight)
    parity.check("logits", outputs.logits, io["logits"], **original.tight)
    parity.check("loss", outputs.loss, io["loss"], **original.tight)
    smoothed = cross_entropy(outputs.logits, io["labels"], label_smoothing=0.1)
    parity.check("loss_smoothing", smoothed, io["loss_smoothing"], **original.tight)
    outputs.loss.backward()
    parity.check("grad_pixel_values", pixels.grad, io["grad_pixel_values"], **original.loose)
    original.add_gradients(model)
    original.check_gradients(parity)
    body = original.load(AutoModel)
    parity.check("last_hidden_state", body(pixel_values=io["pixel_values"]).last_hidden_state, io["out_proj"])


@cases
def test_training(original, parity):
    io, model = original.io, original.load(drop_path_rate=0.0).train()
    logits = model(pixel_values=io["train_pixel_values"]).logits
    loss = cross_entropy(logits, io["train_targets"])
    parity.check("train_logits", logits, io["train_logits"], **original.tight)
    parity.check("train_loss", loss, io["train_loss"], **original.tight)
    loss.backward()
    original.add_gradients(model)
    original.check_gradients(parity, "train_grad.")
    names = {row["source"]: row["target"] for row in original.report()["mapped"]}
    buffers = dict(model.named_buffers())
    for name, value in original.starting_with("train_state.").items():
        parity.check(name, buffers[names[name]].float(), value.float(), **original.tight)


@cases
def test_stochastic_depth(original, parity, monkeypatch):
    """Logits equal the original's if the random factors are replaced by the original's."""
    io, model = original.io, original.load(drop_path_rate=0.5).train()
    for index, layer in enumerate(model.mega.layers):
        for name in ("mega_layer", "nffn"):
            drop_path, factors = getattr(layer, name).drop_path, io.get(f"droppath_mask.{index}.{name}")
            assert drop_path.p == pytest.approx(0.5 * index / (len(model.mega.layers) - 1))
            if factors is not None:
                monkeypatch.setattr(drop_path, "draw", lambda states, count, kept=factors: kept[:, None])
    logits = model(pixel_values=io["pixel_values"]).logits
    parity.check("droppath_logits", logits, io["droppath_logits"], **original.tight)
