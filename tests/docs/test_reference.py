"""The API reference has every field and argument of the heads, and the page of the command line every option."""

import ast
import dataclasses
import importlib.util
import inspect
import re

import pytest

import luna_mega_cli
from luna_mega import LunaConfig, MegaConfig, MegalodonConfig
from tests.docs.blocks import ROOT


def load(name: str):
    """Import a script of docs/site, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docstrings, commands = load("docstrings"), load("commands")
MODULES = [file for file in ROOT.glob("modeling_*/*.py") if "labels: " in file.read_text(encoding="utf-8")]


def classes(file: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module with completed docstrings."""
    source = docstrings.complete_docstrings((ROOT / file).read_text(encoding="utf-8"))
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("config", [LunaConfig, MegaConfig, MegalodonConfig])
def test_fields(config):
    family = config.__name__.removesuffix("Config").lower()
    text = ast.get_docstring(classes(f"modeling_{family}/configuration_{family}.py")[config.__name__])
    described = re.findall(r"^    ((?:\w+, )*\w+) \((.*), defaults to (.*?)\): ", text, re.MULTILINE)
    defaults = {name: values for names, _, values in described for name in names.split(", ")}
    own = inspect.get_annotations(config)
    for field in dataclasses.fields(config):
        if field.name in own:
            assert repr(field.default) in defaults[field.name], field.name


@pytest.mark.parametrize("module", MODULES, ids=lambda file: file.name)
def test_arguments(module):
    for name, node in classes(module.relative_to(ROOT).as_posix()).items():
        for forward in node.body:
            if isinstance(forward, ast.FunctionDef) and forward.name == "forward" and ast.get_docstring(forward):
                arguments = {argument.arg for argument in [*forward.args.args[1:], *forward.args.kwonlyargs]}
                if "labels" in arguments or "start_positions" in arguments:
                    described = re.findall(r"^    (\w+): \S", ast.get_docstring(forward), re.MULTILINE)
                    assert arguments <= set(described), name


def test_page_of_the_command_line(capsys):
    """Every command has a section with the options of its help, its examples and a guide that exists."""
    sections = dict(re.findall(r"^## luna-mega (\w+)\n(.*?)(?=^## |\Z)", commands.make_page(), re.M | re.S))
    assert list(sections) == list(luna_mega_cli.COMMANDS)
    for name, section in sections.items():
        with pytest.raises(SystemExit):
            luna_mega_cli.main([name, "--help"])
        shown = set(re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out.partition("examples:")[0])) - {"--help"}
        assert shown == set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) != set()
        assert re.search(rf"```bash\n(luna-mega {name} .*\n)+```", section)
        assert (ROOT / "docs" / re.search(r"\[\w+\]\((.*?\.md)", section)[1]).is_file()
