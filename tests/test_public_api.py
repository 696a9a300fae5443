import ast
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


# Files without these texts are not parsed.
SUSPECT = re.compile(r"packaging|version_info|__version__|version\(|(hasattr|getattr)\(\s*[\w.]+,\s*['\"]")


def version_checks(source):
    """Return the lines that compare versions, import functions that do so, or check whether a package has a name."""
    lines, nodes = [], [*ast.walk(ast.parse(source))]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    packages = re.compile("torch|transformers|triton")
    names = {
        alias.asname or alias.name.partition(".")[0]
        for node in imports
        for alias in node.names
        if packages.match(getattr(node, "module", None) or alias.name)
    }
    for node in nodes:
        imported = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        imported += " ".join(alias.name for alias in node.names) if isinstance(node, ast.Import) else ""
        ordered = isinstance(node, ast.Compare) and any(
            isinstance(x, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for x in node.ops
        )
        compared = ast.unparse(node) if ordered else ""
        function = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        optional = function == "hasattr" or function == "getattr" and len(node.args) == 3
        # Computed names are excluded, and operators, which native libraries register.
        owner = ast.unparse(node.args[0]) if optional and isinstance(node.args[1], ast.Constant) else ""
        checked = re.fullmatch(r"[\w.]+", owner) and not owner.startswith("torch.ops.")
        checked = checked and owner.partition(".")[0] in names
        compared_version = re.search(r"\b(version_info|__version__|version\()", compared)
        if "packaging" in imported.split(".") or compared_version or checked:
            lines.append(node.lineno)
    return lines


def test_only_compat_checks_versions(sources):
    """No other module compares versions, or checks whether a package has a name."""
    others = sources.keys() - {"luna_mega/compat.py", "tests/test_public_api.py"}
    suspects = {name: sources[name] for name in others if SUSPECT.search(sources[name])}
    assert {name: lines for name, source in suspects.items() if (lines := version_checks(source))} == {}


def test_version_checks_are_found():
    lines = (
        "from packaging.version import Version",
        "import sys\nif sys.version_info >= (3, 12): pass",
        "import torch\nnew = torch.__version__ >= '2.14'",
        "from importlib.metadata import version\nnew = version('torch') > '2'",
        "from transformers.utils import generic\nnew = getattr(generic, 'name', None)",
        "import torch\nnew = hasattr(torch.nn.functional, 'name')",
    )
    assert all(SUSPECT.search(line) and version_checks(line) for line in lines)


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
