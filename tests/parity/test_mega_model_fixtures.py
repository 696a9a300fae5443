"""Converted Mega checkpoints (LRA, raw speech) against the original models, by command line and Auto classes.

Every hidden state, the sentence representations, logits, the loss and the gradient of every parameter, to the tolerance
of each `meta.json`.
"""

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

from luna_mega import MegaForSequencePairClassification
from luna_mega.convert.safe_load.reader import read_checkpoint
from luna_mega_cli import main

CASES = [
    "11_lra_text_cls_prenorm_chunk",
    "11_lra_text_mp_postnorm_softmax",
    "12_lra_image_laplace_batchnorm",
    "12_lra_image_laplace_batchnorm_chunk_trunc",
    "13_lra_retrieval_cls_chunk",
    "13_lra_retrieval_mp",
    "14_sc_raw_base",
]


def convert(folder, output):
    assert main(["convert", str(folder / "checkpoint.pt"), "--output", str(output)]) == 0
    report = json.loads((output / "conversion_report.json").read_text())
    pair = report["model_class"] == "MegaForSequencePairClassification"
    auto = MegaForSequencePairClassification if pair else AutoModelForSequenceClassification
    model, loading = auto.from_pretrained(output, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"] and not loading["unexpected_keys"]
    return model.eval(), report


def record(model):
    """The states of every encoder call, `[embeddings, after each layer, ..., last]`, and the classifier's input."""
    states, features = [], []
    model.mega.embedding_dropout.register_forward_hook(lambda module, args, output: states.append([output]))
    for layer in model.mega.layers:
        layer.register_forward_hook(lambda module, args, output: states[-1].append(output))
    model.mega.register_forward_hook(lambda module, args, output: states[-1].append(output.last_hidden_state))
    model.classifier.register_forward_hook(lambda module, args, output: features.append(args[0]))
    return states, features


@pytest.mark.parametrize("case", CASES)
def test_model(parity_folder, parity, tmp_path, case):
    folder = parity_folder("mega", case)
    io, tolerance = load_file(folder / "io.safetensors"), json.loads((folder / "meta.json").read_text())["tolerance"]
    model, report = convert(folder, tmp_path / "model")
    states, features = record(model)
    name = "input_ids" if model.config.input_type == "tokens" else "input_values"
    inputs = {name: io["src_tokens"]} | ({f"pair_{name}": io["src1_tokens"]} if "src1_tokens" in io else {})
    logits = model(**inputs).logits
    width = {"atol": tolerance["atol"], "rtol": tolerance["rtol"]}
    length = io["src_tokens"].shape[1]
    keep = torch.arange(length) < io["src_lengths"][:, None]  # the original fills chunks up with padding
    for index, actual in enumerate(states[0]):
        expected = io.get(f"hidden.{index}", io["last_state"])[:, :length]
        parity.check(f"state {index}", actual, expected, keep=keep, scaled=True, **width)
    assert f"hidden.{len(states[0])}" not in io
    representations = [io["sentence_rep1"]] if "sentence_rep1" in io else []
    parity.check("sentence_rep", features[0], torch.cat([*representations, io["sentence_rep"]], dim=-1), **width)
    parity.check("logits", logits, io["logits"], **width)
    loss = cross_entropy(logits, io["target"], reduction="sum")
    parity.check("loss_sum", loss, io["loss_sum"], **width)
    loss.backward()
    check_gradients(parity, model, report, io, tolerance)


def check_gradients(parity, model, report, io, tolerance):
    expected = {name.removeprefix("grad."): value for name, value in io.items() if name.startswith("grad.")}
    gradients, parameters = {}, dict(model.named_parameters())
    for row in report["mapped"]:
        if row["target"] in parameters:
            gradients[row["source"]] = parameters[row["target"]].grad
    assert expected.keys() == gradients.keys()
    for name, value in expected.items():
        parity.check(f"grad.{name}", gradients[name], value, atol=tolerance["grad_atol"], rtol=tolerance["grad_rtol"])


def test_flash_branch(parity_folder, parity, tmp_path):
    """This branch has only a layer, not a model: test it as the only layer of a checkpoint, in its tensor order."""
    folder = parity_folder("mega", "15_flash_mega_bidir_laplace_simple")
    io, meta = load_file(folder / "io.safetensors"), json.loads((folder / "meta.json").read_text())
    layer, width = read_checkpoint(folder / "checkpoint.pt").tensors, meta["args"]["embed_dim"]
    prefix = "encoder.encoder"
    tensors = {f"{prefix}.embed_tokens.{part}": torch.randn(width) for part in ("weight", "bias")}
    tensors |= {f"{prefix}.layers.0.mega_layer.{name}": tensor for name, tensor in layer.items()}
    tensors |= {f"{prefix}.final_norm.norm.{part}": torch.ones(width) for part in ("weight", "bias")}
    tensors |= {"sentence_projection_layer.weight": torch.randn(2, width)}
    args = argparse.Namespace(
        arch="mega_sc_raw_base",
        chunk_size=-1,
        max_positions=meta["args"]["max_positions"],
        truncation_length=None,
        attention_activation_fn=meta["args"]["attention_activation"],
        classifier_layers=0,
    )
    torch.save({"args": args, "model": tensors}, tmp_path / "checkpoint.pt")
    model, report = convert(tmp_path, tmp_path / "model")
    assert report["decisions"]["ema_convention"] == "flash" and model.config.ema_shift
    states, _ = record(model)
    tolerance = {name: meta["tolerance"][name] for name in ("atol", "rtol")}
    x = io["x"].transpose(0, 1)
    for name, mask in (("out", None), ("out_padded", 1 - io["padding_mask"].int())):
        model.mega(inputs_embeds=x, attention_mask=mask)
        keep = None if mask is None else mask.bool()
        parity.check(name, states[-1][1], io[name].transpose(0, 1), keep=keep, **tolerance)


def test_every_fixture_is_tested(parity_folder):
    names = parity_folder.names("mega")
    assert {name for name in names if name[:2] in ("11", "12", "13", "14")} <= set(CASES)
