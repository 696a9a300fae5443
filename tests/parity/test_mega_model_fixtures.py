"""Converted Mega checkpoints (LRA, raw speech) against the original, by command line and Auto classes.

The tests compare all hidden states, the sentence representations, logits, the loss and all gradients, with the
tolerance of each `meta.json`.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy

from luna_mega.convert.safe_load.reader import read_checkpoint
from tests.parity.original import originals

CASES = [
    "11_lra_text_cls_prenorm_chunk",
    "11_lra_text_mp_postnorm_softmax",
    "12_lra_image_laplace_batchnorm",
    "12_lra_image_laplace_batchnorm_chunk_trunc",
    "13_lra_retrieval_cls_chunk",
    "13_lra_retrieval_mp",
    "14_sc_raw_base",
]


def record(model):
    """Return lists that collect the states of every encoder call and the input of the classifier.

    The states of a call are `[embeddings, states after each layer, ..., last states]`.
    """
    states, features = [], []
    model.mega.embedding_dropout.register_forward_hook(lambda module, args, output: states.append([output]))
    for layer in model.mega.layers:
        layer.register_forward_hook(lambda module, args, output: states[-1].append(output))
    model.mega.register_forward_hook(lambda module, args, output: states[-1].append(output.last_hidden_state))
    model.classifier.register_forward_hook(lambda module, args, output: features.append(args[0]))
    return states, features


@originals("mega", CASES)
def test_model(original, parity):
    io, model = original.io, original.load()
    states, features = record(model)
    name = "input_ids" if model.config.input_type == "tokens" else "input_values"
    inputs = {name: io["src_tokens"]} | ({f"pair_{name}": io["src1_tokens"]} if "src1_tokens" in io else {})
    logits = model(**inputs).logits
    length = io["src_tokens"].shape[1]
    keep = torch.arange(length) < io["src_lengths"][:, None]  # the original pads the last chunk
    for index, actual in enumerate(states[0]):
        expected = io.get(f"hidden.{index}", io["last_state"])[:, :length]
        parity.check(f"state {index}", actual, expected, keep=keep, scaled=True, **original.tight)
    assert f"hidden.{len(states[0])}" not in io
    representations = [io["sentence_rep1"]] if "sentence_rep1" in io else []
    parity.check(
        "sentence_rep", features[0], torch.cat([*representations, io["sentence_rep"]], dim=-1), **original.tight
    )
    parity.check("logits", logits, io["logits"], **original.tight)
    loss = cross_entropy(logits, io["target"], reduction="sum")
    parity.check("loss_sum", loss, io["loss_sum"], **original.tight)
    loss.backward()
    original.add_gradients(model)
    original.check_gradients(parity)


@originals("mega", ["15_flash_mega_bidir_laplace_simple"])
def test_flash_branch(original, parity, tmp_path):
    """A layer of the flash branch equals the original.

    The branch has no complete model, so the layer is the only one of a checkpoint with its tensor order.
    """
    io, layer = original.io, read_checkpoint(original.folder / "checkpoint.pt").tensors
    width = original.args["embed_dim"]
    prefix = "encoder.encoder"
    tensors = {f"{prefix}.embed_tokens.{part}": torch.randn(width) for part in ("weight", "bias")}
    tensors |= {f"{prefix}.layers.0.mega_layer.{name}": tensor for name, tensor in layer.items()}
    tensors |= {f"{prefix}.final_norm.norm.{part}": torch.ones(width) for part in ("weight", "bias")}
    tensors |= {"sentence_projection_layer.weight": torch.randn(2, width)}
    args = argparse.Namespace(
        arch="mega_sc_raw_base",
        chunk_size=-1,
        max_positions=original.args["max_positions"],
        truncation_length=None,
        attention_activation_fn=original.args["attention_activation"],
        classifier_layers=0,
    )
    torch.save({"args": args, "model": tensors}, tmp_path / "checkpoint.pt")
    original.folder = tmp_path
    model = original.load()
    assert original.report()["decisions"]["ema_convention"] == "flash" and model.config.ema_shift
    states, _ = record(model)
    x = io["x"].transpose(0, 1)
    for name, mask in (("out", None), ("out_padded", 1 - io["padding_mask"].int())):
        model.mega(inputs_embeds=x, attention_mask=mask)
        keep = None if mask is None else mask.bool()
        parity.check(name, states[-1][1], io[name].transpose(0, 1), keep=keep, **original.tight)
