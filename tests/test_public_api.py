"""Public names, registration with transformers, and messages about versions."""

import importlib
import subprocess
import sys
import warnings

import pytest
import transformers
from transformers.models.auto import modeling_auto

import luna_mega
from luna_mega import compat
from luna_mega._register import _AUTO_CLASSES, CONFIGS, auto_classes

SUPPORTED = ("2.15.1+cu130", "5.24.1.dev0", "3.9.0")


def test_public_names(repo_root):
    """`luna_mega.__all__` contains the public names of all modules of the models, and each exists."""
    assert [name for name in luna_mega.__all__ if getattr(luna_mega, name).__name__ != name] == []
    assert set(luna_mega.__all__) <= set(dir(luna_mega))
    for folder in ("modeling_luna", "modeling_mega", "modeling_megalodon"):
        for file in (repo_root / folder).glob("*.py"):
            names = getattr(importlib.import_module(f"luna_mega.{folder}.{file.stem}"), "__all__", [])
            assert set(names) - {"MegaCrossCache"} <= set(luna_mega.__all__), file
    with pytest.raises(AttributeError, match="module 'luna_mega' has no attribute 'LunaForNothing'"):
        _ = luna_mega.LunaForNothing


@pytest.mark.parametrize("config", CONFIGS.values())
def test_every_class_is_registered(config):
    """All models are registered, also in the tables of names that Trainer and pipelines read."""
    luna_mega.register_auto_classes()  # again: changes nothing
    assert type(transformers.AutoConfig.for_model(config.model_type)) is config
    classes = auto_classes(config)
    assert len(classes) == {"luna": 9, "mega": 10, "megalodon": 4}.get(config.model_type, 2)
    for auto_class, model_class in classes.items():
        assert getattr(transformers, auto_class)._model_mapping[config] is model_class
        assert vars(modeling_auto)[_AUTO_CLASSES[auto_class][1]][config.model_type] == model_class.__name__


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


@pytest.mark.parametrize(
    ("name", "found"),
    [("torch", "2.10.0+cpu"), ("torch", "99.0"), ("triton", "3.5"), ("transformers", "5.23.0.dev0")]
    + list(zip(("torch", "transformers", "triton"), SUPPORTED, strict=True)),
)
def test_unsupported_version_is_one_warning(name, found, monkeypatch, caplog):
    oldest, untested = compat.SUPPORTED[name]
    supported = {other: oldest for other, (oldest, _) in compat.SUPPORTED.items()}
    monkeypatch.setattr(compat, "version", (supported | {name: found}).__getitem__)
    compat.check_versions()
    message = f"{name} {found} is installed, tested is {name}>={oldest},<{untested}."
    assert [message in record.getMessage() for record in caplog.records] == [True] * (found not in SUPPORTED)


def test_old_python_raises_before_any_import(repo_root):
    code = "import sys; sys.version_info = (3, 9, 2); import luna_mega"
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, encoding="utf-8")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: luna_mega requires Python 3.11 or later, but this is Python 3.9")
