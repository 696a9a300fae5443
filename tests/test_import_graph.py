"""Import rules (see docs/development.md), checked in the source without importing it."""

import ast
import configparser
import graphlib
import re
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

TRAINING = set(
    "datasets huggingface_hub matplotlib numpy PIL pyarrow pytorch_optimizer "
    "safetensors timm tokenizers torch tqdm transformers yaml".split()
)
# Layer -> the packages that it may import in addition to the standard library. A layer may also import itself and the
# layers above it in this list. A module belongs to the layer with the longest name that is a prefix of its own.
LAYERS = {
    "luna_mega.compat": {"packaging"},
    "luna_mega.escaping": set(),
    "luna_mega.errors": set(),
    "luna_mega.convert.safe_load": {"numpy", "torch", "tqdm"},
    "luna_mega.kernels": {"numpy", "torch", "triton"},
    "luna_mega.modeling_common": {"huggingface_hub", "torch", "transformers"},
    "luna_mega.modeling_luna": {"torch", "transformers"},
    "luna_mega.modeling_mega": {"torch", "transformers"},
    "luna_mega.modeling_megalodon": {"torch", "transformers"},
    "luna_mega": {"huggingface_hub", "packaging", "transformers"},
    "luna_mega.hub": {"huggingface_hub", "safetensors", "torch", "transformers", "yaml"},
    "luna_mega.convert": {"huggingface_hub", "numpy", "safetensors", "tokenizers", "torch", "tqdm", "transformers"},
    "luna_mega.inspection": {"safetensors", "torch", "tqdm", "transformers"},
    "luna_mega.training": TRAINING,
    "luna_mega_cli": {"argcomplete", "torch", "transformers"},
}
APART = {"luna_mega.modeling_luna", "luna_mega.modeling_mega", "luna_mega.modeling_megalodon"}
OPTIONAL = {"triton", "argcomplete", "matplotlib", "timm", "pytorch_optimizer"}
# Other packages import operators and helpers from these modules.
DOORS = ("luna_mega.kernels.api.", "luna_mega.kernels.for_models.")
FORMATS = "luna_mega.convert.formats."


class Import(NamedTuple):
    """An imported name with its module, whether a function imports it, and whether the import is relative."""

    name: str
    in_function: bool = False
    relative: bool = False


def imports(module: str, source: str) -> Iterator[Import]:
    """Yield the imports of a module, also those by `import_module` with a string."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = "." * node.level + (node.module or "")
            home = resolve_name(home, module.rpartition(".")[0]) if node.level else home
            # `from luna_mega import kernels` imports luna_mega.kernels. For other packages, only the package is listed.
            ours = home.split(".")[0] in ("luna_mega", "luna_mega_cli")
            names = [f"{home}.{alias.name}" for alias in node.names] if ours else [home]
            yield from (Import(name, node in inside, node.level > 0) for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            names = [value.value for value in node.args if isinstance(getattr(value, "value", None), str)]
            yield from (Import(name, True) for name in names)


def installed_files() -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of every installed module."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for row in setup["options"]["package_dir"].strip().split("\n"):
        package, folder = row.split(" = ")
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), file


def layer_of(name: str) -> str | None:
    layers = [layer for layer in LAYERS if f"{name}.".startswith(f"{layer}.")]
    return max(layers, key=len, default=None)


def faults(module: str, found: Import) -> Iterator[str]:
    """Yield the rules that an import of a module violates."""
    name, own, layer, order = found.name, layer_of(module), layer_of(found.name), list(LAYERS)
    top = name.split(".")[0]
    if layer is None:
        if top not in LAYERS[own] | sys.stdlib_module_names:
            yield "a package that the layer does not use"
    elif order.index(layer) > order.index(own) or layer != own and {layer, own} <= APART:
        yield "a higher layer"
    if own == "luna_mega_cli":  # `luna-mega --help` does not import torch
        if not found.in_function and top not in sys.stdlib_module_names | {"luna_mega_cli"}:
            yield "at module level"
    elif found.in_function and top not in OPTIONAL and "triton" not in name:
        yield "in a function"
    if layer == "luna_mega.kernels":
        # They also work as a package of their own, and in the folders of models.
        if not (found.relative if own == layer else f"{name}.".startswith(DOORS)):
            yield "not through the doors of the kernels"
    if name.startswith(FORMATS) and not module.startswith(FORMATS):
        if not re.match(r"[A-Z]|(format|registry|register_format|registered_formats)\b", name.removeprefix(FORMATS)):
            yield "a format, which only the registry imports"


FOUND = {module: set(imports(module, file.read_text("utf-8"))) for module, file in installed_files()}


def test_rules():
    wrong = [(module, found.name, *faults(module, found)) for module in FOUND for found in FOUND[module]]
    assert [row for row in wrong if row[2:]] == []
    assert list(faults("luna_mega.hub.x", Import("luna_mega_cli.main")))
    assert list(faults("luna_mega.hub.x", Import("numpy"))) and len(FOUND) > 100


def test_no_import_cycles():
    graph = {
        module: {found.name if found.name in FOUND else found.name.rpartition(".")[0] for found in FOUND[module]}
        for module in FOUND
    }
    graphlib.TopologicalSorter({module: names & FOUND.keys() for module, names in graph.items()}).prepare()
    assert "luna_mega.convert.importer" in graph["luna_mega_cli.convert"]
