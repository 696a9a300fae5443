"""Converted checkpoints against the original models, through the command line and the Auto classes.

The tests compare all hidden and packed states, logits, losses and gradients, with the tolerance of each `meta.json`.
"""

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForMaskedLM

import luna_mega
from tests.parity.original import originals

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
    "lra21_listops_tied_layers",
    "lra21_retrieval",
    "lra21_use_p",
    "lra23_cls",
    "lra23_image",
    "lra23_learnedpos",
    "lra23_meanpool_tied_layers",
    "lra21_cls",
    "lra21_meanpool",
    "lra23_retrieval",
    "lra23_use_p",
]


def check_states(parity, original, prefix, output):
    keep = original.io[f"{prefix}.x_padding_mask"] == 0
    packed_keep = original.io[f"{prefix}.p_padding_mask"] == 0
    for index, (tokens, packed) in enumerate(zip(output.hidden_states, output.packed_hidden_states, strict=True)):
        name = f"{prefix}.hidden.{index}"
        parity.check(f"{name}.x", tokens, original.io[f"{name}.x"], keep=keep, **original.tight)
        parity.check(f"{name}.p", packed, original.io[f"{name}.p"], keep=packed_keep, **original.tight)
    assert f"{prefix}.hidden.{index + 1}.x" not in original.io


def options_of(tokens, model):
    """Return the tokens; for a multiple-choice model, each sequence becomes a question with one option."""
    return tokens[:, None] if isinstance(model, luna_mega.LunaForMultipleChoice) else tokens


@originals("luna", BERT)
def test_bert(original, parity):
    io, heads = original.io, list(original.meta["heads"])
    auto = AutoModelForMaskedLM if heads else None
    head = heads[0] if heads else None
    language_model, encoder = original.load(auto, head), original.load(AutoModel, head)
    for batch in original.meta["batches"]:
        tokens = io[f"{batch}.src_tokens"]
        keep = io[f"{batch}.x_padding_mask"] == 0
        with torch.no_grad():
            check_states(parity, original, batch, encoder(tokens, output_hidden_states=True))
            parity.check(
                f"{batch}.logits", language_model(tokens).logits, io[f"{batch}.logits"], keep=keep, **original.tight
            )
    for head_name in heads:
        model = original.load(head=head_name)
        for batch in original.meta["batches"]:
            with torch.no_grad():
                logits = model(options_of(io[f"{batch}.src_tokens"], model)).logits
            parity.check(f"{batch}.head.{head_name}", logits, io[f"{batch}.head.{head_name}"], **original.tight)
    loss = bert_objective(original, language_model, head)
    for head_name in heads:
        model = original.load(head=head_name)
        target = io[f"A.obj.head_target.{head_name}"]
        logits = model(options_of(io["A.src_tokens"], model)).logits
        head_loss = cross_entropy(logits, target)
        head_loss.backward()
        loss = loss + head_loss.detach()
        original.add_gradients(model, head_name)
    parity.check("A.obj.loss", loss.reshape(1), io["A.obj.loss"], **original.tight)
    original.check_gradients(parity)


def bert_objective(original, model, head):
    """Return the masked-LM part of `meta.json["objective"]`, and add its gradients to the original's."""
    io = original.io
    model.requires_grad_()  # this objective uses P after the last layer, in contrast to the model's own loss
    output = model(io["A.src_tokens"], output_hidden_states=True)
    masked = io["A.obj.masked"].bool()
    tokens = (io["A.obj.wx"] * output.hidden_states[-1])[io["A.x_padding_mask"] == 0].sum() / 10
    packed = (io["A.obj.wp"] * output.packed_hidden_states[-1])[io["A.p_padding_mask"] == 0].sum() / 10
    loss = cross_entropy(output.logits[masked], io["A.obj.targets"][masked]) + tokens + packed
    loss.backward()
    original.add_gradients(model, head)
    return loss.detach()


@originals("luna", LRA, fast=7)
def test_lra(original, parity):
    io, model = original.io, original.load()
    for batch, towers in original.meta["batches"].items():
        inputs = lra_inputs(original, batch)
        with torch.no_grad():
            output = model(**inputs, output_hidden_states=True)
            check_states(parity, original, f"{batch}.0", output)
            if "1" in towers:
                second = model.luna(inputs["pair_input_ids"], output_hidden_states=True)
                check_states(parity, original, f"{batch}.1", second)
        parity.check(f"{batch}.logits", output.logits, io[f"{batch}.logits"], **original.tight)
    loss = model(**lra_inputs(original, "A"), labels=io["A.obj.target"]).loss
    loss.backward()
    original.add_gradients(model)
    parity.check("A.obj.loss", loss.reshape(1), io["A.obj.loss"], **original.tight)
    original.check_gradients(parity)


def lra_inputs(original, batch):
    first = original.io[f"{batch}.0.src_tokens"]
    inputs = {"input_values" if original.meta["image"] else "input_ids": first}
    if original.meta["pair"]:
        inputs["pair_input_ids"] = original.io[f"{batch}.1.src_tokens"]
    return inputs
