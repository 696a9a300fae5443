"""Helpers of conversion tests: load models, edit folders, write dictionaries, find formats."""

import json

import torch
import transformers

import luna_mega
from luna_mega.convert.formats import registered_formats


def load(folder, model_class=None):
    """Return the model of a folder, loaded with its auto class if it has one; check that no weights are missing."""
    name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model_class = model_class or getattr(transformers, f"AutoModel{name[4:]}", None) or getattr(luna_mega, name)
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"], info
    return model.eval()


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


def lines(symbols):
    """Return the text of a dictionary."""
    return "".join(f"{symbol} 1\n" for symbol in symbols)


def words(count, prefix="w"):
    """Return the text of a dictionary with so many symbols."""
    return lines(f"{prefix}{index}" for index in range(count))


def find_format(name):
    """Return the format with a name, the `layout` of a conversion report."""
    return {found.facts.name: found for found in registered_formats()}[name]
