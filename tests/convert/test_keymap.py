import pytest

from luna_mega import LunaConfig, MegaConfig
from luna_mega.convert.evidence import Target
from luna_mega.convert.formats.format import read_model, rename_tensors
from luna_mega.convert.formats.registry import find_format
from luna_mega.convert.keymap import LAYER_NORM, KeyMap, Row
from tests.convert.mega import mega

HEADS = ["sentence_classification_head", "pooling_classification_head", "attention_classification_head"]


def keymap(name, revision="r21", head=None, **fields):
    config = (LunaConfig if name.startswith("luna") else MegaConfig)(**fields)
    found = find_format(name)
    return found.keymap(Target(found.facts.model_classes[0], config, revision, head))


def maps(make):
    yield keymap("luna_bert"), make.bert()
    yield keymap("luna_bert"), make.bert(tied=False)
    for head in HEADS:
        yield keymap("luna_bert", head=head), make.bert(heads=[(head, 3)])
    yield keymap("luna_lra"), make.lra21(depth=3)
    yield keymap("luna_lra", "head"), make.lra23(pre_logits=True)
    yield keymap("luna_lra", "head"), make.lra23(learned=True)
    yield keymap("luna_lra", "head", input_type="values"), make.lra23(image=True)
    yield from mega_maps()


def mega_maps():
    for branch in ("main", "flash"):
        yield (
            keymap("mega_lra", branch, classifier_num_layers=3),
            mega(branch=branch, depth=3, norm_type="scalenorm", embed_norm=True),
        )
        plain, values = keymap("mega_lra", branch), keymap("mega_lra", branch, input_type="values")
        yield plain, mega(branch=branch, rotary=True, norm_type="layernorm", prenorm=True)
        yield values, mega(branch=branch, values=True, norm_type="batchnorm", prenorm=True)
        yield plain, mega(branch=branch, norm_type="batchnorm", embed_norm=True)
        yield plain, mega(branch=branch, norm_type="scalenorm", prenorm=True)


def test_forward_then_backward_is_the_identity(make):
    for found, state in maps(make):
        matches = {key: found.forward(key) for key in state["model"]}
        assert None not in matches.values(), [key for key, match in matches.items() if match is None]
        kept = {key: match.key for key, match in matches.items() if match.key is not None}
        assert {key: found.backward(target).key for key, target in kept.items()} == {key: key for key in kept}
        assert len(set(kept.values())) == len(kept)


def test_transforms_are_the_same_in_both_directions(make):
    for found, state in maps(make):
        for key in state["model"]:
            forward = found.forward(key)
            if forward.key is not None:
                assert found.backward(forward.key).row is forward.row
                is_norm = "layer_norm." in key or "layernorm." in key
                assert (forward.row.transform == LAYER_NORM) == is_norm, key


def test_every_row_is_used_by_some_checkpoint(make):
    rows, used = set(), set()
    for found, state in maps(make):
        rows |= {row.target for row in found.rows}
        used |= {found.forward(key).row.target for key in state["model"]}
    assert rows == used


def test_names_sort_as_the_original_registers_them():
    for found, state in mega_maps():
        names = list(state["model"])
        assert sorted(sorted(names), key=found.position) == names
    with pytest.raises(KeyError):
        keymap("mega_lra", "main").position("encoder.encoder.layers.0.mega_layer.elsewhere")


@pytest.mark.parametrize(
    "key", ["encoder.layers.x.fc1.weight", "encoder.layers.1.fc1.scale", "a.encoder.layers.1.fc1.bias"]
)
def test_mismatched_names_and_shapes(key):
    found = KeyMap([Row("encoder.layers.{layer}.fc1.{part}", "layers.{layer}.up.{part}")])
    assert found.forward("encoder.layers.1.fc1.bias").key == "layers.1.up.bias"
    assert found.forward(key) is None
    assert found.backward(key) is None


def test_dropped_rows_state_a_reason_and_are_not_exported(make):
    state = make.bert(heads=[("a_head", 2)])
    luna_bert = find_format("luna_bert")
    target, _ = read_model(luna_bert, state["model"], vars(state["args"]), "r21")
    found = luna_bert.keymap(target)
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
