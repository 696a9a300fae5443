"""The argument tables: fields of the configuration; `test_damaged.py` has meaningless values."""

import numpy
import pytest
import torch

from luna_mega.convert.evidence import Evidence, flag
from luna_mega.convert.formats import registered_formats
from luna_mega.convert.table import ACTIVATIONS, NOT, Arg, read_fields, typed_args
from luna_mega.errors import ConversionError
from tests.convert import luna
from tests.convert.folders import load
from tests.convert.fuzz import changed
from tests.convert.mega import POSITIONS, mega, mega_image

TABLE = (
    Arg("dim", "width", read=lambda evidence: len(evidence.tensors["w"])),
    Arg("activation_fn", "act", ACTIVATIONS, "relu"),
    Arg("no_scale", "scaled", NOT, False),
    Arg("drop", "rate", default=0.1),
    Arg("drop", "other_rate"),
)


def evidence(**args):
    return Evidence({"w": torch.zeros(8)}, args, "old", {"activation_fn": "relu", "no_scale": False, "drop": 0.1})


def test_fields_of_the_arguments():
    found = evidence(dim=8, activation_fn="gelu_accurate", no_scale=False, drop=0.5, data=".")
    fields = {"width": 8, "act": "gelu_new", "scaled": True, "rate": 0.5, "other_rate": 0.5}
    assert read_fields(TABLE, found) == fields and not found.warnings


def test_defaults_and_tensors_that_win():
    found = evidence(dim=9)
    assert read_fields(TABLE, found) == {"width": 8, "act": "relu", "scaled": True, "rate": 0.1, "other_rate": 0.1}
    assert found.warnings == ["args.dim = 9 but the tensors have 8: using the tensors"]


@pytest.mark.parametrize("value", ["swish", {}, ["gelu"], 3, {"a": "x" * 200}])
def test_an_activation_that_means_nothing(value):
    with pytest.raises(ConversionError, match=r"^args\.activation_fn = .* is not one of gelu, gelu_accurate") as error:
        read_fields(TABLE, evidence(activation_fn=value))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("found", registered_formats(), ids=lambda found: found.facts.name)
def test_every_argument_stands_once(found):
    """Every argument has one row with a type per revision."""
    for revision in found.facts.revisions:
        rows = [row for row in found.table if row.revision in (None, revision)]
        kinds = {(row.name, row.kind) for row in rows if row.name and row.kind is not None}
        assert {name for name, _ in kinds} == {row.name for row in rows} - {""} and len(kinds) == len(dict(kinds))
        assert {name for own in found.facts.architectures.values() for name in own} <= {row.name for row in found.table}


@pytest.mark.parametrize("value", [1, True, numpy.int64(1)])
def test_flags_of_genuine_files(value):
    row = Arg("flag", "scaled", kind=flag)
    assert typed_args((row,), {"flag": value, "other": "kept"}, "old") == {"flag": True, "other": "kept"}
    assert typed_args((row,), {"flag": None}, "old") == {"flag": None}


# Name -> checkpoint, and the fields in which its args contradict the tensors.
CONTRADICTIONS = {
    "luna": (
        lambda: luna.bert(encoder_ffn_embed_dim=99, max_positions=512, untie_luna_kv=True),
        {"intermediate_size": 24, "max_position_embeddings": 20, "tie_key_value": True},
        "encoder_ffn_embed_dim = 99 but the tensors have 24",
    ),
    "mega": (
        lambda: changed(
            mega(norm_type="rmsnorm"), norm_type="scalenorm", z_dim=7, encoder_hidden_dim=25, max_positions=40
        ),
        {"shared_representation_size": 6, "intermediate_size": 24, "max_positions": POSITIONS}
        | {"normalization_type": "rmsnorm"},
        "z_dim = 7 but the tensors have 6",
    ),
    "mega_image": (
        lambda: mega_image(input_size=384, nb_classes=7),
        {"image_size": 12, "num_labels": 5},
        "input_size = 384 but the tensors have 12",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_tensors_win_over_args(convert, kind):
    build, fields, warning = CONTRADICTIONS[kind]
    config = load(convert(build())).config
    assert {name: getattr(config, name) for name in fields} == fields
    assert f"args.{warning}" in convert.screen and convert.screen.count("using the tensors") == len(fields)
