import argparse
import re
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


def test_names_of_revisions():
    years = re.compile("r(..)")
    for known in registered_formats():
        for revision, described in known.facts.revisions.items():
            if year := years.fullmatch(revision):
                assert described == f"20{year[1]} code"


UNSUPPORTED = {
    "ema": (["delta", "alpha", "beta", "gamma", "omega"], "of none of the kinds that are known"),
    "layer": (["move.delta", "move.alpha"], "of none of the kinds that are known"),
    "megalodon_complex_ema": (["encoder.encoder.layers.0.mega_layer.move.theta"], "Megalodon"),
    "megalodon_real_ema": (
        ["encoder.encoder.layers.0.mega_layer.move.delta", "encoder.encoder.layers.0.mega_layer.h_proj.weight"],
        "Megalodon",
    ),
    "megalodon": (["layers.0.attn.cema.alpha", "layers.0.attn.timenorm.prior_mean"], "Megalodon"),
    "roberta_base": (["decoder.sentence_encoder.layers.0.self_attn.k_proj.weight"], "not a Luna or Mega checkpoint"),
    "transformer": (["encoder.layers.0.self_attn.k_proj.weight"], "not a Luna or Mega checkpoint"),
    "flash_lra_imdb": (["encoder.encoder.layers.0.flash_layer.gamma"], "not a Luna or Mega checkpoint"),
}


@pytest.mark.parametrize("arch", UNSUPPORTED)
def test_unsupported_checkpoints_raise(convert, make, arch):
    keys, expected = UNSUPPORTED[arch]
    message = convert.error(make.checkpoint({key: torch.zeros(2) for key in keys}, arch=arch))
    assert expected in message and f"'{arch}'" in message and str(convert.file) in message


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_prefix_of_a_wrapper(convert, make, prefix):
    state = make.bert()
    state["model"] = {f"{prefix}{key}": tensor for key, tensor in state["model"].items()}
    message = convert.error(state)
    assert f"all names start with '{prefix}'" in message and f"save model.{prefix}state_dict()" in message


@pytest.mark.parametrize("field", ["args", "model"])
def test_fields_without_a_value(convert, make, field):
    assert f"field '{field}' is None" in convert.error(make.bert() | {field: None})
