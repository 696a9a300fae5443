"""Converted checkpoints against the original models, through the command line and the Auto classes.

Every hidden and packed state, logits, losses and the gradient of every parameter, to the tolerance of each `meta.json`.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

import luna_mega
from luna_mega_cli import main

BERT = [
    "bert_fixlen",
    "bert_heads",
    "bert_ranking_fp16",
    "bert_tied",
    "bert_untied",
    "bert_untied_lm_weight",
    "head_bert_tied",
]
LRA = [
    "lra21_cls",
    "lra21_listops_tied_layers",
    "lra21_meanpool",
    "lra21_retrieval",
    "lra21_use_p",
    "lra23_cls",
    "lra23_image",
    "lra23_learnedpos",
    "lra23_meanpool_tied_layers",
    "lra23_retrieval",
    "lra23_use_p",
]


class Fixture:
    """A fixture folder, its checkpoint converted once for every head."""

    def __init__(self, folder, tmp_path):
        self.folder, self.tmp_path = folder, tmp_path
        self.meta = json.loads((folder / "meta.json").read_text())
        self.io = load_file(folder / "io.safetensors")
        self.tolerance = self.meta["tolerance"]
        self.gradients = {}

    def convert(self, head=None):
        output = self.tmp_path / (head or "default")
        if not output.exists():
            options = ["--head", head] if head else []
            assert main(["convert", str(self.folder / "checkpoint.pt"), "--output", str(output), *options]) == 0
        return output

    def load(self, head=None, auto=None):
        """The converted model in the class that its `config.json` names, or by an Auto class."""
        output = self.convert(head)
        if auto is None:
            auto = getattr(luna_mega, AutoConfig.from_pretrained(output).architectures[0])
        model, report = auto.from_pretrained(output, output_loading_info=True)
        assert not report["missing_keys"] and not report["mismatched_keys"]
        return model.eval()

    def add_gradients(self, model, head=None):
        """Add the gradients of `model` to the sums by the original's parameter names."""
        report = json.loads((self.convert(head) / "conversion_report.json").read_text())
        parameters = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
        for entry in report["mapped"]:
            gradient = parameters.get(entry["target"])
            if gradient is not None:
                self.gradients[entry["source"]] = self.gradients.get(entry["source"], 0) + gradient

    def check_gradients(self, parity):
        expected = {name.removeprefix("grad."): value for name, value in self.io.items() if name.startswith("grad.")}
        assert expected
        for name, value in expected.items():
            parity.check(f"grad.{name}", self.gradients[name], value, **self.tolerance)
        for name in self.meta["params_without_grad_in_objective"]:
            assert torch.count_nonzero(torch.as_tensor(self.gradients.get(name, 0.0))) == 0, name


@pytest.fixture
def fixture(request, parity_folder, tmp_path):
    return Fixture(parity_folder("luna", request.param), tmp_path)


def check_states(parity, fixture, prefix, output):
    keep = fixture.io[f"{prefix}.x_padding_mask"] == 0
    packed_keep = fixture.io[f"{prefix}.p_padding_mask"] == 0
    for index, (tokens, packed) in enumerate(zip(output.hidden_states, output.packed_hidden_states, strict=True)):
        name = f"{prefix}.hidden.{index}"
        parity.check(f"{name}.x", tokens, fixture.io[f"{name}.x"], keep=keep, **fixture.tolerance)
        parity.check(f"{name}.p", packed, fixture.io[f"{name}.p"], keep=packed_keep, **fixture.tolerance)
    assert f"{prefix}.hidden.{index + 1}.x" not in fixture.io


def options_of(tokens, model):
    """A multiple-choice model scores every sequence of a batch as a question with one option."""
    return tokens[:, None] if isinstance(model, luna_mega.LunaForMultipleChoice) else tokens


@pytest.mark.parametrize("fixture", BERT, indirect=True)
def test_bert(fixture, parity):
    io, heads = fixture.io, list(fixture.meta["heads"])
    auto = AutoModelForMaskedLM if heads else None
    head = heads[0] if heads else None
    language_model, encoder = fixture.load(head, auto), fixture.load(head, AutoModel)
    for batch in fixture.meta["batches"]:
        tokens = io[f"{batch}.src_tokens"]
        keep = io[f"{batch}.x_padding_mask"] == 0
        with torch.no_grad():
            check_states(parity, fixture, batch, encoder(tokens, output_hidden_states=True))
            parity.check(
                f"{batch}.logits", language_model(tokens).logits, io[f"{batch}.logits"], keep=keep, **fixture.tolerance
            )
    for head_name in heads:
        model = fixture.load(head_name)
        for batch in fixture.meta["batches"]:
            with torch.no_grad():
                logits = model(options_of(io[f"{batch}.src_tokens"], model)).logits
            parity.check(f"{batch}.head.{head_name}", logits, io[f"{batch}.head.{head_name}"], **fixture.tolerance)
    loss = bert_objective(fixture, language_model, head)
    for head_name in heads:
        model = fixture.load(head_name)
        target = io[f"A.obj.head_target.{head_name}"]
        logits = model(options_of(io["A.src_tokens"], model)).logits
        head_loss = cross_entropy(logits, target)
        head_loss.backward()
        loss = loss + head_loss.detach()
        fixture.add_gradients(model, head_name)
    parity.check("A.obj.loss", loss.reshape(1), io["A.obj.loss"], **fixture.tolerance)
    fixture.check_gradients(parity)


def bert_objective(fixture, model, head):
    """The masked-LM part of `meta.json["objective"]`; its gradients are added to the fixture's."""
    io = fixture.io
    model.requires_grad_()  # this objective uses P after the last layer, unlike the model's own loss
    output = model(io["A.src_tokens"], output_hidden_states=True)
    masked = io["A.obj.masked"].bool()
    tokens = (io["A.obj.wx"] * output.hidden_states[-1])[io["A.x_padding_mask"] == 0].sum() / 10
    packed = (io["A.obj.wp"] * output.packed_hidden_states[-1])[io["A.p_padding_mask"] == 0].sum() / 10
    loss = cross_entropy(output.logits[masked], io["A.obj.targets"][masked]) + tokens + packed
    loss.backward()
    fixture.add_gradients(model, head)
    return loss.detach()


@pytest.mark.parametrize("fixture", LRA, indirect=True)
def test_lra(fixture, parity):
    io, model = fixture.io, fixture.load()
    for batch, towers in fixture.meta["batches"].items():
        inputs = lra_inputs(fixture, batch)
        with torch.no_grad():
            output = model(**inputs, output_hidden_states=True)
            check_states(parity, fixture, f"{batch}.0", output)
            if "1" in towers:
                second = model.luna(inputs["pair_input_ids"], output_hidden_states=True)
                check_states(parity, fixture, f"{batch}.1", second)
        parity.check(f"{batch}.logits", output.logits, io[f"{batch}.logits"], **fixture.tolerance)
    loss = model(**lra_inputs(fixture, "A"), labels=io["A.obj.target"]).loss
    loss.backward()
    fixture.add_gradients(model)
    parity.check("A.obj.loss", loss.reshape(1), io["A.obj.loss"], **fixture.tolerance)
    fixture.check_gradients(parity)


def lra_inputs(fixture, batch):
    first = fixture.io[f"{batch}.0.src_tokens"]
    inputs = {"input_values" if fixture.meta["image"] else "input_ids": first}
    if fixture.meta["pair"]:
        inputs["pair_input_ids"] = fixture.io[f"{batch}.1.src_tokens"]
    return inputs


def test_every_fixture_is_tested(parity_folder):
    names = parity_folder.names("luna")
    assert {name for name in names if name.startswith(("bert_", "head_bert_", "lra"))} <= {*BERT, *LRA}
