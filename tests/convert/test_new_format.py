"""A format registered by a user works in convert, export and info without changes to the package."""

import argparse

import pytest
import torch

from luna_mega import MegaConfig, MegaForMultipleChoice
from luna_mega.convert import ConversionError, convert_checkpoint, export_checkpoint
from luna_mega.convert.dictionaries import VocabularyAndLabels
from luna_mega.convert.export import Writer, register_writer, writer
from luna_mega.convert.formats import (
    Companions,
    Facts,
    Format,
    Notes,
    Revision,
    register_format,
    registered_formats,
    registry,
)
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.safe_load import read_checkpoint
from luna_mega.convert.table import Arg, derived
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from tests.convert.mega import FIELDS

SIZES = FIELDS | {"vocab_size": 17, "dropout_prob": 0.25}


EMBEDDING = "net.embedding_layer.word_embeddings.weight"


def size(key, axis):
    return lambda evidence: evidence.shape(key, "rows", "columns")[axis]


class TinyFormat(Format):
    """A multiple-choice format that is not fairseq's; its args contain neither widths nor an `arch`."""

    facts = Facts(
        name="tiny",
        revisions={"one": Revision("tiny", "first code", "the tiny code")},
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


class TinyWriter(Writer):
    revisions = ("one",)

    def args(self, spec, args):
        return {"model": "tiny"} | args

    def limits(self, spec):
        return {"normalization_type": ("scalenorm",)}

    def state(self, export):
        return {"args": argparse.Namespace(**export.args), "model": export.tensors, "epoch": 3}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(registry, "_FORMATS", registry._FORMATS.copy())
    monkeypatch.setattr(writer, "_WRITERS", writer._WRITERS.copy())
    register_format(TinyFormat())
    register_writer(TinyFormat)(TinyWriter)


@pytest.fixture
def exported(tmp_path):
    model = MegaForMultipleChoice(MegaConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / "model")
    report = export_checkpoint(tmp_path / "model", tmp_path / "out" / "tiny.pt")
    assert (report.layout, report.head, report.layer_norm, report.warnings) == ("tiny", None, None, [])
    return tmp_path / "out" / "tiny.pt"


def test_there_and_back(tmp_path, exported):
    state = torch.load(exported, weights_only=False)
    assert vars(state["args"]) == {"model": "tiny", "drop": 0.25} and state["epoch"] == 3
    report = convert_checkpoint(exported, tmp_path / "back")
    assert report.source["layout"] == "tiny" and "tiny of the first code" in str(report) and not report.warnings
    config = MegaConfig.from_pretrained(tmp_path / "back")
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    assert compare(tmp_path / "model", tmp_path / "back", tolerance=0.0).within
    again = export_checkpoint(tmp_path / "back", tmp_path / "again.pt")
    assert again.args == report.args
    first, second = read_checkpoint(exported).tensors, read_checkpoint(tmp_path / "again.pt").tensors
    assert list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)


def test_info_describes_it(tmp_path, exported):
    info = describe(exported)
    assert info.written_by == "fairseq: a tiny checkpoint (arch None) of the tiny code"
    assert info.heads == ["MultipleChoice: 2 classes, pooling cls"]


def test_unsupported_models_and_options(tmp_path, exported):
    with pytest.raises(ConversionError, match="--layer-norm standard: it has one way; omit the option"):
        convert_checkpoint(exported, tmp_path / "back", layer_norm="standard")
    with pytest.raises(ConversionError, match="--head a: only luna_bert files have named heads"):
        convert_checkpoint(exported, tmp_path / "back", head="a")
    MegaForMultipleChoice(MegaConfig(**SIZES, normalization_type="rmsnorm")).save_pretrained(tmp_path / "other")
    with pytest.raises(ConversionError, match="tiny cannot express normalization_type = 'rmsnorm'"):
        export_checkpoint(tmp_path / "other", tmp_path / "other.pt")


def test_others_are_still_recognized(convert, make):
    assert '"luna_bert"' in (convert(make.bert()) / "conversion_report.json").read_text(encoding="utf-8")
    convert.output = convert.output.with_name("other")
    assert "not a Luna or Mega checkpoint" in convert.error(make.checkpoint({"x.weight": torch.zeros(2)}, arch="a"))


def test_a_format_without_a_writer(tmp_path, exported, monkeypatch):
    convert_checkpoint(exported, tmp_path / "back")
    monkeypatch.delitem(writer._WRITERS, TinyFormat)
    with pytest.raises(ConversionError, match="format tiny can only be converted; it has no registered writer"):
        export_checkpoint(tmp_path / "back", tmp_path / "model.pt")
    with pytest.raises(ConversionError, match="these can be exported: MegaFor"):
        export_checkpoint(tmp_path / "model", tmp_path / "model.pt")


def test_names_are_unique():
    assert [found.facts.name for found in registered_formats()][-1] == "tiny"
    with pytest.raises(ValueError, match="format 'tiny' is registered already"):
        register_format(TinyFormat())


def test_a_folder_of_a_format_that_is_not_registered(tmp_path, exported, monkeypatch):
    convert_checkpoint(exported, tmp_path / "back")
    monkeypatch.delitem(registry._FORMATS, "tiny")
    with pytest.raises(ConversionError, match="format 'tiny' is not known; this version knows luna_bert, "):
        export_checkpoint(tmp_path / "back", tmp_path / "model.pt")
