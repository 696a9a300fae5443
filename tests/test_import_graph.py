"""Who may import whom (the rules are in CONTRIBUTING.md), read from the source without running it."""

import ast
import configparser
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Folder -> what its files may import besides the standard library and their own package.
ALLOWED = {
    "kernels": {"numpy", "torch", "triton"},
    "modeling_luna": {"huggingface_hub", "luna_mega.kernels", "torch", "transformers"},
    "modeling_mega": {"huggingface_hub", "luna_mega.kernels", "torch", "transformers"},
    "convert": {
        "huggingface_hub",
        "luna_mega",
        "numpy",
        "safetensors",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
    },
    "luna_mega": {"luna_mega", "transformers"},
}
NEVER_IMPORTED = {"examples", "benchmarks", "tests"}


def imports(source: str) -> Iterator[str]:
    """Dotted names that the source imports anywhere, inside functions too; a relative import keeps its dots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from luna_mega import kernels` imports luna_mega.kernels; of any other package only the package counts.
            yield from (f"{module}.{alias.name}" if module == "luna_mega" else module for alias in node.names)


def violations(folder: str, source: str) -> list[str]:
    own = "luna_mega" if folder == "luna_mega" else f"luna_mega.{folder}"
    allowed = ALLOWED[folder] | {own}
    return [
        name
        for name in imports(source)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == entry or name.startswith(f"{entry}.") for entry in allowed)
    ]


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def packaged_folders() -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rows = setup["options"]["package_dir"].split("\n")
    return {row.split("=")[1].strip() for row in rows if row}


@pytest.mark.parametrize("folder", sorted(packaged_folders()))
def test_package_imports_only_what_its_layer_may(folder):
    files = python_files(folder)
    assert files
    found = {str(file.relative_to(ROOT)): violations(folder, file.read_text(encoding="utf-8")) for file in files}
    assert not {file: names for file, names in found.items() if names}


@pytest.mark.parametrize("folder", sorted({*packaged_folders(), *NEVER_IMPORTED} - {"tests"}))
def test_nothing_imports_tests_nor_packages_the_scripts(folder):
    """Scripts may import within their own folder; nothing but a test imports another one's."""
    forbidden = NEVER_IMPORTED - {folder}
    for file in python_files(folder):
        tops = {name.split(".")[0] for name in imports(file.read_text(encoding="utf-8"))}
        assert not tops & forbidden, file


@pytest.mark.parametrize("folder", sorted(packaged_folders()))
def test_no_postponed_annotations(folder):
    """transformers reads the annotation `config: LunaConfig` as a class; postponed it is a string and Auto* fails."""
    for file in python_files(folder):
        assert "__future__" not in set(imports(file.read_text(encoding="utf-8"))), file


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("kernels", "import transformers"),
        ("kernels", "def f():\n    from transformers.utils import logging"),
        ("kernels", "from luna_mega.modeling_luna.configuration_luna import LunaConfig"),
        ("kernels", "from luna_mega import LunaModel"),
        ("modeling_luna", "from luna_mega.modeling_mega.configuration_mega import MegaConfig"),
        ("modeling_luna", "from luna_mega import convert"),
        ("modeling_luna", "from .configuration_luna import LunaConfig"),
        ("modeling_luna", "from kernels import api"),
        ("convert", "import fairseq.models"),
        ("convert", "import tests.helpers"),
        ("luna_mega", "import torch"),
        ("luna_mega", "import luna_megalodon"),
    ],
)
def test_a_wrong_import_is_seen(folder, line):
    assert violations(folder, line)


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("kernels", "from luna_mega.kernels import _op\nimport math, os.path"),
        ("modeling_luna", "from luna_mega.kernels.api import luna_attention"),
        ("convert", "from luna_mega import LunaConfig"),
    ],
)
def test_a_right_import_passes(folder, line):
    assert not violations(folder, line)
