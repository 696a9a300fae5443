import pytest

from luna_mega.convert import keymap_luna
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.keymap_mega import mega_lra
from luna_mega.convert.source_detect import canonical
from tests.convert.mega import mega

HEADS = ["sentence_classification_head", "pooling_classification_head", "attention_classification_head"]


def maps(make):
    yield keymap_luna.luna_bert(), make.bert()
    yield keymap_luna.luna_bert(), make.bert(tied=False)
    for head in HEADS:
        yield keymap_luna.luna_bert(head), make.bert(heads=[(head, 3)])
    yield keymap_luna.luna_lra("r21"), make.lra21(depth=3)
    yield keymap_luna.luna_lra("head"), make.lra23(pre_logits=True)
    yield keymap_luna.luna_lra("head"), make.lra23(learned=True)
    yield keymap_luna.luna_lra("head", "values"), make.lra23(image=True)
    yield from mega_maps()


def mega_maps():
    for branch in ("main", "flash"):
        yield (
            mega_lra(branch, classifier_layers=3),
            mega(branch=branch, depth=3, norm_type="scalenorm", embed_norm=True),
        )
        yield mega_lra(branch), mega(branch=branch, rotary=True, norm_type="layernorm", prenorm=True)
        yield mega_lra(branch, "values"), mega(branch=branch, values=True, norm_type="batchnorm", prenorm=True)
        yield mega_lra(branch), mega(branch=branch, norm_type="batchnorm", embed_norm=True)
        yield mega_lra(branch), mega(branch=branch, norm_type="scalenorm", prenorm=True)


def test_forward_then_backward_is_the_identity(make):
    for keymap, state in maps(make):
        matches = {key: keymap.forward(key) for key in state["model"]}
        assert None not in matches.values(), [key for key, match in matches.items() if match is None]
        kept = {key: match.key for key, match in matches.items() if match.key is not None}
        assert {key: keymap.backward(target).key for key, target in kept.items()} == {key: key for key in kept}
        assert len(set(kept.values())) == len(kept)


def test_transforms_are_the_same_in_both_directions(make):
    for keymap, state in maps(make):
        for key in state["model"]:
            forward = keymap.forward(key)
            if forward.key is not None:
                assert keymap.backward(forward.key).row is forward.row
                is_norm = "layer_norm." in key or "layernorm." in key
                assert (forward.row.transform == keymap_luna.LAYER_NORM) == is_norm, key


def test_every_row_is_used_by_some_checkpoint(make):
    rows, used = set(), set()
    for keymap, state in maps(make):
        rows |= {row.target for row in keymap.rows}
        used |= {keymap.forward(key).row.target for key in state["model"]}
    assert rows == used


def test_names_sort_as_the_original_registers_them():
    for keymap, state in mega_maps():
        names = list(state["model"])
        assert sorted(sorted(names), key=keymap.position) == names
    with pytest.raises(KeyError):
        keymap.position("encoder.encoder.layers.0.mega_layer.elsewhere")


@pytest.mark.parametrize(
    "key", ["encoder.layers.x.fc1.weight", "encoder.layers.1.fc1.scale", "a.encoder.layers.1.fc1.bias"]
)
def test_what_does_not_fit(key):
    keymap = KeyMap([Row("encoder.layers.{layer}.fc1.{part}", "layers.{layer}.up.{part}")])
    assert keymap.forward("encoder.layers.1.fc1.bias").key == "layers.1.up.bias"
    assert keymap.forward(key) is None
    assert keymap.backward(key) is None


def test_dropped_rows_have_a_reason_and_no_way_back():
    keymap = keymap_luna.luna_bert(None, ("a_head",))
    match = keymap.forward("classification_heads.a_head.dense.weight")
    assert match.key is None and "--head a_head" in match.row.reason
    assert keymap.backward("classification_heads.a_head.dense.weight") is None


def test_early_prefix(make, tmp_path):
    state = make.bert()
    early = {key.replace("encoder.", "decoder.", 1): tensor for key, tensor in state["model"].items()}

    class Early:
        tensors = early

    assert list(canonical(Early)) == list(state["model"])
