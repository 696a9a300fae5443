"""Helpers of conversion and export tests: load and save models, edit folders, check that an export fails."""

import argparse
import json

import torch
import transformers

import luna_mega
from luna_mega import MegaConfig
from tests.convert.mega import FIELDS
from tests.convert.translation import luna_seq2seq, mega_seq2seq
from tests.errors import command_error


def load(folder, model_class=None):
    """Return the model of a folder, loaded with its auto class if it has one; check that no weights are missing."""
    name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model_class = model_class or getattr(transformers, f"AutoModel{name[4:]}", None) or getattr(luna_mega, name)
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"], info
    return model.eval()


def save(folder, model):
    """Save a model without a conversion record; all rows and columns of its weights are distinct."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder


def identical(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def half(state):
    """Return the checkpoint in half precision."""
    return state | {"model": {key: x.half() if x.is_floating_point() else x for key, x in state["model"].items()}}


def edit(folder, name="config.json", **changes):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def fails(capsys, folder, output, *options):
    """Return the one-line error of an export; check that it leaves no files."""
    there = output.exists()
    message = command_error(capsys, "export", folder, "--output", output, *options)
    assert output.exists() is there
    return message


def read(path):
    """Return the content of a checkpoint."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)


def dictionary(path, size):
    path.write_text("".join(f"w{index} 1\n" for index in range(size - 4)), encoding="utf-8")
    return path


LUNA = {"num_attention_heads": 4, "projection_length": 6, "max_position_embeddings": 20}
LUNA |= {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
MEGA = FIELDS | {"vocab_size": 17, "max_positions": 20, "normalize_before_mega": False, "normalize_before_ffn": False}
MEGA |= {"hidden_dropout_prob": 0.0, "nffn_activation_dropout_prob": 0.0, "classifier_dropout": 0.1}
MEGA |= {"classifier_activation": "gelu", "classifier_bias": False}
MEGA_LM = FIELDS | {"vocab_size": 40, "max_positions": 20, "is_decoder": True, "bidirectional": False}
MEGA_LM |= {"final_norm": True, "lm_head_bias": False, "add_lm_hidden_dense_layer": False}


def new_model(name, **fields):
    """Return a small model of the class `name`."""
    if name.endswith("ConditionalGeneration"):
        return (luna_seq2seq if name.startswith("Luna") else mega_seq2seq)(**fields)
    if name == "MegaForImageClassification":
        sizes = {"hidden_size": 16, "shared_representation_size": 4, "num_hidden_layers": 1, "num_labels": 3}
        return luna_mega.MegaForImageClassification(MegaConfig.image_base_patch16_224(**sizes | fields))
    if name == "MegaSeq2SeqModel":
        return luna_mega.MegaSeq2SeqModel(mega_seq2seq().config)
    sizes = MEGA_LM if name == "MegaForCausalLM" else LUNA if name.startswith("Luna") else MEGA
    model_class = getattr(luna_mega, name)
    return model_class(model_class.config_class(**sizes | fields))
