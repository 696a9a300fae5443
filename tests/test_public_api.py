import importlib
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import luna_mega
from luna_mega import _versions
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
    for folder in ("modeling_luna", "modeling_mega", "modeling_megalodon"):
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


def test_another_model_of_the_same_type_is_named():
    """A package may have registered a `luna` of its own, or transformers may get one."""
    others = type("LunaConfig", (transformers.PreTrainedConfig,), {"model_type": "luna", "__module__": "speech.luna"})
    copy = type("LunaConfig", (luna_mega.LunaConfig,), {"__module__": "transformers_modules.x.configuration_luna"})
    try:
        transformers.AutoConfig.register("luna", others, exist_ok=True)
        with pytest.warns(UserWarning, match=r"the model type 'luna' was speech\.luna\.LunaConfig, .* own class"):
            luna_mega.register_auto_classes()
        assert transformers.AutoConfig.for_model("luna").__class__ is luna_mega.LunaConfig
        transformers.AutoConfig.register("luna", copy, exist_ok=True)
    finally:
        with warnings.catch_warnings(action="error"):
            luna_mega.register_auto_classes()


def test_needed_versions_are_those_of_setup(repo_root):
    setup = (repo_root / "setup.cfg").read_text()
    assert f"python_requires = >={'.'.join(map(str, _versions.PYTHON))}\n" in setup
    for name, least in _versions.NEEDED.items():
        assert f"\n    {name}>={least},<" in setup


@pytest.mark.parametrize("name", _versions.NEEDED)
def test_too_old_a_package_is_named(name, monkeypatch):
    monkeypatch.setattr(_versions, "version", lambda asked: "2.9.1+cpu" if asked == name else "99")
    with pytest.raises(ImportError, match=rf"{name} 2\.9\.1\+cpu is installed .*pip install --upgrade '{name}>="):
        _versions.check_versions()


def test_too_old_a_python_is_named_before_anything_is_imported(repo_root):
    code = "import sys; sys.version_info = (3, 9, 2); import luna_mega"
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: luna_mega needs Python 3.11 or later, and this is Python 3.9")


@pytest.mark.parametrize("name", ["LunaModel", "MegaModel"])
def test_tokens_of_another_model_are_named(name):
    family = name[:4]
    config = getattr(luna_mega, f"{family}Config")(
        vocab_size=11, hidden_size=12, num_hidden_layers=1, intermediate_size=8
    )
    ids = torch.tensor([[3, 11, 4]])
    with pytest.raises(ValueError, match="numbers from 3 to 11, and the vocabulary of this model 11 tokens"):
        getattr(luna_mega, name)(config)(ids)


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
