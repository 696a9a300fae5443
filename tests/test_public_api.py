import importlib

import pytest
import transformers
from transformers.models.auto import modeling_auto

import luna_mega
from tests.modeling.luna import tiny_config

AUTO_TO_CLASS = {
    "AutoModel": "LunaModel",
    "AutoModelForPreTraining": "LunaForMaskedLM",
    "AutoModelForMaskedLM": "LunaForMaskedLM",
    "AutoModelForSequenceClassification": "LunaForSequenceClassification",
    "AutoModelForMultipleChoice": "LunaForMultipleChoice",
    "AutoModelForTokenClassification": "LunaForTokenClassification",
    "AutoModelForQuestionAnswering": "LunaForQuestionAnswering",
}


@pytest.mark.parametrize("name", luna_mega.__all__)
def test_public_name_resolves(name):
    value = getattr(luna_mega, name)
    assert value.__name__ == name
    assert name in dir(luna_mega)


def test_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'luna_mega' has no attribute 'LunaForNothing'"):
        _ = luna_mega.LunaForNothing


def test_every_public_class_of_a_model_is_exported(repo_root):
    """The imports of the package are the only list of its names: what a model's module makes public stands there."""
    for folder in ("modeling_luna", "modeling_mega"):
        for file in (repo_root / folder).glob("*.py"):
            names = getattr(importlib.import_module(f"luna_mega.{folder}.{file.stem}"), "__all__", [])
            assert set(names) - {"MegaCrossCache"} <= set(luna_mega.__all__), file


@pytest.mark.parametrize(("auto", "name"), AUTO_TO_CLASS.items())
def test_auto_class_builds_our_class(auto, name):
    model = getattr(transformers, auto).from_config(tiny_config())
    assert type(model) is getattr(luna_mega, name)
    assert name in vars(modeling_auto)[luna_mega._register._AUTO_CLASSES[auto][1]].values()


def test_config_is_registered_and_registering_again_changes_nothing():
    luna_mega.register_auto_classes()
    assert type(transformers.AutoConfig.for_model("luna")) is luna_mega.LunaConfig


@pytest.mark.parametrize(("auto", "name"), AUTO_TO_CLASS.items())
def test_saved_model_loads_through_auto_class(auto, name, tmp_path):
    cls = getattr(luna_mega, name)
    saved = cls(tiny_config()).eval()
    saved.save_pretrained(tmp_path)
    loaded, info = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is cls
    assert not any(info.values()), info
    for key, tensor in saved.state_dict().items():
        assert tensor.equal(loaded.state_dict()[key]), key
