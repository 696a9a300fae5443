import importlib
import re
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto import modeling_auto

import luna_mega
from luna_mega import compat
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


def test_public_names_resolve():
    assert [name for name in luna_mega.__all__ if getattr(luna_mega, name).__name__ != name] == []
    assert set(luna_mega.__all__) <= set(dir(luna_mega))


def test_unknown_name_raises():
    with pytest.raises(AttributeError, match="module 'luna_mega' has no attribute 'LunaForNothing'"):
        _ = luna_mega.LunaForNothing


def test_every_public_class_of_a_model_is_exported(repo_root):
    """`luna_mega.__all__` contains the public names of all modules of the models."""
    for folder in ("modeling_luna", "modeling_mega", "modeling_megalodon"):
        for file in (repo_root / folder).glob("*.py"):
            names = getattr(importlib.import_module(f"luna_mega.{folder}.{file.stem}"), "__all__", [])
            assert set(names) - {"MegaCrossCache"} <= set(luna_mega.__all__), file


def test_config_is_registered_and_registering_again_changes_nothing():
    luna_mega.register_auto_classes()
    assert type(transformers.AutoConfig.for_model("luna")) is luna_mega.LunaConfig


def test_another_model_of_the_same_type_is_named():
    """The warning names another package (or transformers) that registers a model type `luna`."""
    others = type("LunaConfig", (transformers.PreTrainedConfig,), {"model_type": "luna", "__module__": "speech.luna"})
    copy = type("LunaConfig", (luna_mega.LunaConfig,), {"__module__": "transformers_modules.x.configuration_luna"})
    try:
        transformers.AutoConfig.register("luna", others, exist_ok=True)
        with pytest.warns(UserWarning, match=r"luna_mega replaces speech\.luna\.LunaConfig as .* own class"):
            luna_mega.register_auto_classes()
        assert transformers.AutoConfig.for_model("luna").__class__ is luna_mega.LunaConfig
        transformers.AutoConfig.register("luna", copy, exist_ok=True)
    finally:
        with warnings.catch_warnings(action="error"):
            luna_mega.register_auto_classes()


def test_supported_versions_match_setup(repo_root):
    setup = (repo_root / "setup.cfg").read_text(encoding="utf-8")
    assert f"python_requires = >={'.'.join(map(str, compat.PYTHON))}\n" in setup
    for name, (oldest, _) in compat.SUPPORTED.items():
        assert re.search(rf"^    {name}>={oldest}(,<6|; .*)?$", setup, flags=re.MULTILINE), name


@pytest.mark.parametrize(
    ("name", "found"),
    [("torch", "2.10.0+cpu"), ("torch", "99.0"), ("triton", "3.5"), ("triton", "99.0")]
    + [("transformers", "5.22.2"), ("transformers", "5.23.0.dev0"), ("transformers", "99.0")],
)
def test_unsupported_version_is_one_warning(name, found, monkeypatch, caplog):
    supported = {other: oldest for other, (oldest, _) in compat.SUPPORTED.items()}
    monkeypatch.setattr(compat, "version", (supported | {name: found}).__getitem__)
    compat.check_versions()
    oldest, untested = compat.SUPPORTED[name]
    (record,) = caplog.records
    assert f"{name} {found} is installed, tested is {name}>={oldest},<{untested}." in record.getMessage()


def test_supported_versions_do_not_warn(monkeypatch, caplog):
    for versions in ({"torch": "2.15.1+cu130", "transformers": "5.24.1.dev0", "triton": "3.9.0"}, {}):
        monkeypatch.setattr(compat, "installed", lambda name, known=versions: known.get(name) and Version(known[name]))
        compat.check_versions()
    assert not caplog.records


def test_old_python_raises_before_any_import(repo_root):
    code = "import sys; sys.version_info = (3, 9, 2); import luna_mega"
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, encoding="utf-8")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: luna_mega requires Python 3.11 or later, but this is Python 3.9")


@pytest.mark.parametrize("name", ["LunaModel", "MegaModel"])
def test_tokens_of_another_model_are_named(name):
    family = name[:4]
    config = getattr(luna_mega, f"{family}Config")(
        vocab_size=11, hidden_size=12, num_hidden_layers=1, intermediate_size=8
    )
    ids = torch.tensor([[3, 11, 4]])
    with pytest.raises(ValueError, match="are from 3 to 11, but the vocabulary of this model has 11 tokens"):
        getattr(luna_mega, name)(config)(ids)


@pytest.mark.parametrize(("auto", "name"), AUTO_TO_CLASS.items())
def test_saved_model_loads_through_auto_class(auto, name, tmp_path):
    cls = getattr(luna_mega, name)
    assert name in vars(modeling_auto)[luna_mega._register._AUTO_CLASSES[auto][1]].values()
    saved = getattr(transformers, auto).from_config(tiny_config()).eval()
    assert type(saved) is cls
    saved.save_pretrained(tmp_path)
    loaded, info = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is cls
    assert not any(info.values()), info
    for key, tensor in saved.state_dict().items():
        assert tensor.equal(loaded.state_dict()[key]), key
