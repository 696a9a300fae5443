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
    "modeling_common": {"luna_mega.kernels", "torch", "transformers"},
    "modeling_luna": {"huggingface_hub", "luna_mega.kernels", "luna_mega.modeling_common", "torch", "transformers"},
    "modeling_mega": {"huggingface_hub", "luna_mega.kernels", "luna_mega.modeling_common", "torch", "transformers"},
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
        ("modeling_common", "from luna_mega.modeling_luna.configuration_luna import LunaConfig"),
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
        ("modeling_mega", "from luna_mega.modeling_common.configuration import SharedConfig"),
        ("convert", "from luna_mega import LunaConfig"),
    ],
)
def test_a_right_import_passes(folder, line):
    assert not violations(folder, line)


def module_of(file: Path) -> str:
    """Dotted name under which a file of a packaged folder is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "luna_mega" else ("luna_mega", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(file: Path, modules: set[str]) -> set[str]:
    """The modules of this package that a file imports when it is imported itself."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names <= modules else {node.module}
    return found & modules


def test_no_circles():
    """Apart from the package itself, which imports everything and which nothing of a model or a kernel imports."""
    files = {module_of(file): file for folder in packaged_folders() - {"luna_mega"} for file in python_files(folder)}
    graph = {module: imported_modules(file, set(files)) for module, file in files.items()}
    while free := {module for module, needed in graph.items() if not needed - {module}}:
        graph = {module: needed - free for module, needed in graph.items() if module not in free}
    assert not graph


@pytest.mark.parametrize("folder", ["modeling_common", "modeling_luna", "modeling_mega", "luna_mega"])
def test_no_import_inside_a_function(folder):
    for file in python_files(folder):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert not [
            node.lineno
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        ], file
