import argparse
from dataclasses import replace

import pytest
import torch

from luna_mega.convert.formats.registry import detect, register_format, registered_formats
from luna_mega.convert.safe_load.reader import Checkpoint
from tests.convert.folders import find_format


def source(state):
    """Return the name and revision of the format that recognizes a checkpoint."""
    found, revision, *_ = detect(Checkpoint(None, "", "zip", vars(state["args"]), state["model"], None))
    return found.facts.name, revision


def test_early_luna_bert(convert, make):
    state = make.bert()
    state["model"] = {key.replace("encoder.", "decoder.", 1): tensor for key, tensor in state["model"].items()}
    convert(state)
    assert "'decoder.' is today's 'encoder.'" in convert.screen


@pytest.mark.parametrize("branch", ["main", "flash"])
def test_mega_translation(branch):
    names = ("delta", "alpha") if branch == "main" else ("alpha", "delta")
    keys = [f"{side}.layers.0.mega_layer.move.{name}" for side in ("encoder", "decoder") for name in names]
    state = {"args": argparse.Namespace(arch="mega"), "model": dict.fromkeys(keys, torch.zeros(2))}
    assert source(state) == ("mega_seq2seq", branch)


def test_signatures_are_disjoint():
    signatures = [fmt.facts.stacks for fmt in registered_formats()]
    assert len(set(signatures)) == len(signatures) and all(signatures)
    assert find_format("luna_seq2seq").facts.stacks == {("luna", "encoder"), ("luna", "decoder")}


def test_overlapping_formats_raise():
    class Other(type(find_format("mega_lra"))):
        facts = replace(find_format("mega_lra").facts, name="other")

    with pytest.raises(ValueError, match="'other' has the same stacks as 'mega_lra'"):
        register_format(Other())


@pytest.mark.parametrize("field", ["args", "model"])
def test_fields_without_a_value(convert, make, field):
    assert f"field '{field}' is None" in convert.error(make.bert() | {field: None})
