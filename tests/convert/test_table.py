"""The argument tables: fields of the configuration, and errors for meaningless values."""

import functools

import numpy
import pytest
import torch

from luna_mega.convert.evidence import Evidence, flag
from luna_mega.convert.formats import registered_formats
from luna_mega.convert.table import ACTIVATIONS, NOT, Arg, read_fields, typed_args
from luna_mega.errors import ConversionError, shown
from tests.convert import luna
from tests.convert.folders import load
from tests.convert.fuzz import changed
from tests.convert.mega import BODY, POSITIONS, mega, mega_image
from tests.convert.mega_lm import KINDS, mega_lm
from tests.marks import diagonal

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


FAULTS = {
    "bert": {
        "encoder_layerdrop": [1e9, -0.1, {}],
        "dropout": [-0.5, 1.5, "much", {}],
        "activation_fn": [{}, []],
        "encoder_attention_heads": [{}, 2.5, 3],
        "pooler_activation_fn": [{"a": 1}],
    },
    "lra21": {"layer_type": [{}, {"luna": 1}, 3], "sen_rep_type": [{}, "first"], "act_dropout": [2, -1]},
    "mega": {
        "layer_type": [{}],
        "activation_fn": [{}],
        "attention_activation_fn": [{}, "gelu"],
        "chunk_size": [{}, "wide"],
        "truncation_length": ["all", [1]],
        "classifier_layers": [{}, "two"],
        "dropout": [-0.1, 1.5],
        "feature_dropout": ["yes"],
    },
    "mega_lm": {"hidden_dropout": [1.0], "adaptive_softmax_dropout": [7], "decoder_chunk_size": [{}]},
}
MEANINGLESS_FLAGS = ["False", "no", [0], {"a"}, 2, -1, 0.0, float("nan"), {}, b"1"]
FLAGS = [
    ("lra21", "use_p"),
    ("lra21", "tie_kv"),
    ("bert", "untie_weights_luna"),
    ("mega", "normalize_embedding"),
    ("mega_lm", "tie_adaptive_proj"),
    ("mega_lm", "no_scale_embedding"),
]
FAULTS_OF_TYPE = {
    "mega": {
        "dropout": [True, float("nan"), float("inf"), "0.1", 10**400],
        "encoder_embed_dim": [-16, 0, "16", True, 2**31, 16.0],
        "chunk_size": [10**18, 4.0, True],
        "truncation_length": [10**18, "1024", True],
        "pixel_normalization": ["0.5", [0.5], [0.5, float("nan")]],
        "sen_rep_type": [["mp"], "m\np"],
    },
    "bert": {"arch": [{}, "mega\n# head"]},
    "mega_lm": {"adaptive_softmax_cutoff": ["12;20", "9" * 12, 12.5, [True], {}]},
}
CASES = [
    (kind, name, value)
    for faults in (FAULTS, FAULTS_OF_TYPE)
    for kind, names in faults.items()
    for name, values in names.items()
    for value in values
] + [(*flag, value) for flag, value in diagonal(FLAGS, MEANINGLESS_FLAGS)]


@pytest.mark.parametrize("value", [1, True, numpy.int64(1)])
def test_flags_of_genuine_files(value):
    row = Arg("flag", "scaled", kind=flag)
    assert typed_args((row,), {"flag": value, "other": "kept"}, "old") == {"flag": True, "other": "kept"}
    assert typed_args((row,), {"flag": None}, "old") == {"flag": None}


@functools.cache
def built(kind):
    return {"bert": luna.bert, "lra21": luna.lra21, "mega": mega, "mega_lm": lambda: mega_lm(**KINDS["adaptive"])}[
        kind
    ]()


@pytest.mark.parametrize(("kind", "name", "value"), CASES, ids=lambda value: str(value)[:40])
def test_faults_name_the_argument(convert, kind, name, value):
    message = convert.error(changed(built(kind), **{name: value}))
    assert f"args.{name} = {shown(value)}" in message and str(convert.file) in message


@pytest.mark.parametrize(
    ("dtype", "key"),
    diagonal(
        [torch.complex64, torch.int64, torch.bool, torch.uint8],
        ["layers.0.mega_layer.v_proj.weight", "layers.1.nffn.norm.norm.bias"],
    ),
)
def test_weights_that_are_not_real(convert, dtype, key):
    state = mega()
    key = f"{BODY}.{key}"
    state["model"][key] = state["model"][key].to(dtype)
    assert f"tensor {key!r} has dtype {str(dtype)[6:]}" in convert.error(state)


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
