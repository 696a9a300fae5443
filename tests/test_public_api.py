import importlib
import sys
import types

import pytest
import transformers
from transformers.models.auto import modeling_auto

import luna_mega
from luna_mega import cli

AUTO_TO_CLASS = {
    "AutoModel": "LunaModel",
    "AutoModelForPreTraining": "LunaForMaskedLM",
    "AutoModelForMaskedLM": "LunaForMaskedLM",
    "AutoModelForSequenceClassification": "LunaForSequenceClassification",
    "AutoModelForMultipleChoice": "LunaForMultipleChoice",
    "AutoModelForTokenClassification": "LunaForTokenClassification",
    "AutoModelForQuestionAnswering": "LunaForQuestionAnswering",
}


def tiny_config():
    return luna_mega.LunaConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        projection_length=4,
        max_position_embeddings=12,
    )


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


def run(argv, capsys):
    try:
        status = cli.main(argv)
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr()


def test_help_lists_commands_that_exist(capsys):
    status, output = run(["--help"], capsys)
    assert status == 0
    for name, (module, _) in cli._COMMANDS.items():
        assert name in output.out
        assert callable(importlib.import_module(module).main)


def test_version_option(capsys):
    status, output = run(["--version"], capsys)
    assert (status, output.out) == (0, f"luna-mega {luna_mega.__version__}\n")


@pytest.mark.parametrize(
    ("argv", "named"), [([], "COMMAND"), (["transmogrify", "x"], "transmogrify"), (["-q"], "COMMAND")]
)
def test_wrong_usage_exits_with_2(argv, named, capsys):
    status, output = run(argv, capsys)
    assert status == 2
    assert named in output.err


def test_command_gets_all_its_arguments_and_its_status_is_returned(monkeypatch):
    received = []
    fake = types.SimpleNamespace(main=lambda argv: received.append(argv) or 1)
    monkeypatch.setitem(sys.modules, "luna_mega.convert.cli", fake)
    assert cli.main(["convert", "--head", "mnli", "model.pt", "--help"]) == 1
    assert received == [["--head", "mnli", "model.pt", "--help"]]
