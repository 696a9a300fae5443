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
NEVER_IMPORTED = {"examples", "benchmarks", "tests"}


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


def installed_files() -> dict[str, Path]:
    """Return the file of every installed module."""
    setup, found = configparser.ConfigParser(), {}
    setup.read(ROOT / "setup.cfg")
    for row in setup["options"]["package_dir"].strip().split("\n"):
        package, folder = row.split(" = ")
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


def layer_of(name: str) -> str | None:
    layers = [layer for layer in LAYERS if f"{name}.".startswith(f"{layer}.")]
    return max(layers, key=len, default=None)


FILES = installed_files()
FOUND = {module: set(imports(module, file.read_text(encoding="utf-8"))) for module, file in FILES.items()}


def is_allowed(module: str, name: str) -> bool:
    own, layer, order = layer_of(module), layer_of(name), list(LAYERS)
    if layer is None:
        return name.split(".")[0] in LAYERS[own] | sys.stdlib_module_names
    return order.index(layer) <= order.index(own) and (layer == own or not {layer, own} <= APART)


def test_modules_import_only_from_lower_layers():
    wrong = {(module, found.name) for module in FILES for found in FOUND[module] if not is_allowed(module, found.name)}
    assert wrong == set()
    assert not is_allowed("luna_mega.hub.x", "luna_mega_cli.main") and not is_allowed("luna_mega.hub.x", "numpy")


def test_no_import_cycles():
    graph = {
        module: {found.name if found.name in FILES else found.name.rpartition(".")[0] for found in FOUND[module]}
        for module in FILES
    }
    graphlib.TopologicalSorter({module: names & FILES.keys() for module, names in graph.items()}).prepare()
    assert "luna_mega.convert.importer" in graph["luna_mega_cli.convert"]


def test_only_the_command_line_imports_in_functions():
    """`luna-mega --help` does not import torch; elsewhere, only optional packages are imported in functions."""
    for module in FILES:
        for found in FOUND[module]:
            top, ours = found.name.split(".")[0], layer_of(module) == "luna_mega_cli"
            if ours:
                assert found.in_function or top in sys.stdlib_module_names | {"luna_mega_cli"}, (module, found)
            else:
                assert not found.in_function or top in OPTIONAL or "triton" in found.name, (module, found)


def test_kernels_are_imported_through_their_doors():
    """Other packages import operators from `kernels.api` and helpers from `kernels.support`.

    The kernels import each other with relative imports: they also work as a package of their own, and in the folders of
    models.
    """
    doors = ("luna_mega.kernels.api.", "luna_mega.kernels.support.")
    for module in FILES:
        for found in FOUND[module]:
            if layer_of(found.name) == "luna_mega.kernels":
                ours = layer_of(module) == "luna_mega.kernels"
                assert found.relative if ours else f"{found.name}.".startswith(doors), (module, found)


def test_only_the_registry_imports_formats_by_name():
    formats = "luna_mega.convert.formats."
    for module in FILES:
        if not module.startswith(formats):
            homes = {found.name.removeprefix(formats) for found in FOUND[module] if found.name.startswith(formats)}
            assert all(
                re.match(r"[A-Z]|(format|registry|register_format|registered_formats)\b", home) for home in homes
            )


def test_nothing_imports_tests_or_scripts():
    """Scripts import only from their own folder, except `make gpu`, which imports its checks from the tests."""
    found = {(file, found.name.split(".")[0]) for file, names in FOUND.items() for found in names}
    for folder in NEVER_IMPORTED - {"tests"}:
        for file in (ROOT / folder).rglob("*.py"):
            names = {found.name.split(".")[0] for found in imports("", file.read_text(encoding="utf-8"))}
            found |= {(file, name) for name in names - {folder}}
    assert {row for row in found if row[1] in NEVER_IMPORTED} == {(ROOT / "benchmarks" / "gpu_jobs.py", "tests")}
