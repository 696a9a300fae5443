import pytest

from luna_mega import LunaConfig, MegaConfig
from luna_mega.convert.evidence import ModelSpec
from luna_mega.convert.formats.format import read_model, rename_tensors
from luna_mega.convert.keymap import KeyMap, Row
from tests.convert.folders import find_format


def keymap(name, revision="r21", head=None, **fields):
    config = (LunaConfig if name.startswith("luna") else MegaConfig)(**fields)
    found = find_format(name)
    return found.keymap(ModelSpec(found.facts.model_classes[0], config, revision, head))


@pytest.mark.parametrize(
    "key", ["encoder.layers.x.fc1.weight", "encoder.layers.1.fc1.scale", "a.encoder.layers.1.fc1.bias"]
)
def test_mismatched_names_and_shapes(key):
    found = KeyMap([Row("encoder.layers.{layer}.fc1.{part}", "layers.{layer}.up.{part}")])
    assert found.forward("encoder.layers.1.fc1.bias").key == "layers.1.up.bias"
    assert found.forward(key) is None
    assert found.backward(key) is None


def test_dropped_rows_state_a_reason(make):
    state = make.bert(heads=[("a_head", 2)])
    luna_bert = find_format("luna_bert")
    spec, _ = read_model(luna_bert, state["model"], vars(state["args"]), "r21")
    found = luna_bert.keymap(spec)
    match = found.forward("classification_heads.a_head.dense.weight")
    assert match.key is None and "--head a_head" in match.reason
    assert keymap("luna_bert", head="a_head").forward("classification_heads.a_head.other.weight") is None
    assert found.backward("classification_heads.a_head.dense.weight") is None


def test_prefix_of_early_checkpoints(make):
    state = make.bert()
    early = {key.replace("encoder.", "decoder.", 1): tensor for key, tensor in state["model"].items()}
    tensors, notes = rename_tensors(find_format("luna_bert"), early)
    assert list(tensors) == list(state["model"]) and "early file" in notes[0]
    assert rename_tensors(find_format("luna_bert"), tensors) == (tensors, [])
