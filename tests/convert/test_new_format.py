"""A format registered by a user works in convert without changes to the package."""

import argparse

import pytest
import torch
from safetensors.torch import load_file

from luna_mega import MegaConfig, MegaForMultipleChoice
from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.dictionaries import VocabularyAndLabels
from luna_mega.convert.formats import (
    Companions,
    Facts,
    Format,
    Notes,
    register_format,
    registered_formats,
    registry,
)
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.table import Arg, derived
from tests.convert.folders import identical
from tests.convert.mega import FIELDS

SIZES = FIELDS | {"vocab_size": 17, "dropout_prob": 0.25}


EMBEDDING = "net.embedding_layer.word_embeddings.weight"


def size(key, axis):
    return lambda evidence: evidence.shape(key, "rows", "columns")[axis]


class TinyFormat(Format):
    """A multiple-choice format that is not fairseq's; its args contain neither widths nor an `arch`."""

    facts = Facts(
        name="tiny",
        revisions={"one": "first code"},
        config_class=MegaConfig,
        model_classes=(MegaForMultipleChoice,),
        unsupported_options={"layer-norm": "it has one way", "ema-convention": "it has no branches"},
    )
    table = (
        Arg("drop", "dropout_prob", default=0.1),
        derived("hidden_size", size(EMBEDDING, 1)),
        derived("vocab_size", size(EMBEDDING, 0)),
        derived("num_hidden_layers", lambda evidence: evidence.layers("net.layers")),
        derived("intermediate_size", size("net.layers.0.mega_layer.v_proj.weight", 0)),
        derived("shared_representation_size", size("net.layers.0.mega_layer.qk_weight", 1)),
        derived("ema_projection_size", size("net.layers.0.mega_layer.ema_gate.kernel_projection_matrix", 1)),
        derived("nffn_hidden_size", size("net.layers.0.nffn.fc1.weight", 0)),
    )

    def recognize(self, file):
        return "one" if all(key.startswith(("net.", "head.")) for key in file.tensors) else None

    def keymap(self, spec):
        return KeyMap([Row("net.{rest}", "mega.{rest}"), Row("head.{rest}", "classifier.{rest}")])

    def companions(self, spec, evidence):
        return Companions(VocabularyAndLabels(spec.config.vocab_size, None, None))

    def report(self, spec, evidence):
        return Notes()


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(registry, "_FORMATS", registry._FORMATS.copy())
    register_format(TinyFormat())


@pytest.fixture
def checkpoint(tmp_path):
    """Return a checkpoint of the format; `model` is a folder with its model."""
    model = MegaForMultipleChoice(MegaConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / "model")
    prefixes = {"mega": "net", "classifier": "head"}
    names = {name: ".".join([prefixes[name.split(".")[0]], *name.split(".")[1:]]) for name in model.state_dict()}
    tensors = {names[name]: tensor for name, tensor in model.state_dict().items()}
    torch.save({"args": argparse.Namespace(drop=0.25), "model": tensors}, tmp_path / "tiny.pt")
    return tmp_path / "tiny.pt"


def test_conversion(tmp_path, checkpoint):
    report = convert_checkpoint(checkpoint, tmp_path / "back")
    assert report.source["layout"] == "tiny" and "tiny of the first code" in str(report) and not report.warnings
    config = MegaConfig.from_pretrained(tmp_path / "back")
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    identical(*(load_file(tmp_path / name / "model.safetensors") for name in ("model", "back")))


def test_unsupported_options(tmp_path, checkpoint):
    with pytest.raises(ConversionError, match="--layer-norm standard: it has one way; omit the option"):
        convert_checkpoint(checkpoint, tmp_path / "back", layer_norm="standard")
    with pytest.raises(ConversionError, match="--head a: only luna_bert files have named heads"):
        convert_checkpoint(checkpoint, tmp_path / "back", head="a")


def test_names_are_unique():
    assert [found.facts.name for found in registered_formats()][-1] == "tiny"
    with pytest.raises(ValueError, match="format 'tiny' is registered already"):
        register_format(TinyFormat())
