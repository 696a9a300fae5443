"""A format registered by a user works in convert without changes to the package."""

from dataclasses import replace

import pytest

from luna_mega import MegaConfig, MegaForMultipleChoice
from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.dictionaries import VocabularyAndLabels
from luna_mega.convert.formats import Companions, Facts, Format, Notes, register_format, registry
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.table import Arg, derived
from tests.convert import luna
from tests.convert.contract import save, weights
from tests.convert.folders import find_format, identical
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


def test_conversion(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_FORMATS", registry._FORMATS.copy())
    register_format(TinyFormat())
    model = MegaForMultipleChoice(MegaConfig(**SIZES))
    model.save_pretrained(tmp_path / "model")
    names = {name: name.replace("mega.", "net.", 1).replace("classifier.", "head.", 1) for name in model.state_dict()}
    tensors = {names[name]: tensor for name, tensor in model.state_dict().items()}
    file = save(luna.checkpoint(tensors, drop=0.25), tmp_path)
    report = convert_checkpoint(file, tmp_path / "back")
    assert report.source["layout"] == "tiny" and "tiny of the first code" in str(report) and not report.warnings
    config = MegaConfig.from_pretrained(tmp_path / "back")
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    identical(*map(weights, (tmp_path / "model", tmp_path / "back")))
    with pytest.raises(ConversionError, match="--layer-norm standard: it has one way; omit the option"):
        convert_checkpoint(file, None, layer_norm="standard")


def test_names_and_stacks_are_unique():
    known = find_format("mega_lra")
    with pytest.raises(ValueError, match="format 'mega_lra' is registered already"):
        register_format(type(known)())
    other = type("Other", (type(known),), {"facts": replace(known.facts, name="other")})
    with pytest.raises(ValueError, match="'other' has the same stacks as 'mega_lra'"):
        register_format(other())
