"""Import rules (see docs/development.md), checked in the source without importing it."""

import ast
import configparser
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

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


def setup() -> configparser.SectionProxy:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser["options"]


def packaged_files() -> dict[str, Path]:
    """Return the file of every installed module."""
    found = {}
    for row in setup()["package_dir"].strip().split("\n"):
        package, folder = row.split(" = ")
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


def with_absolute_imports(module: str, file: Path) -> str:
    """Return the text of a file of kernels/ with absolute imports, and of other files unchanged."""
    text = file.read_text(encoding="utf-8")
    if not module.startswith("luna_mega.kernels."):
        return text
    package = module.rpartition(".")[0]
    return re.sub(
        r"^(\s*)from (\.+[\w.]*) import",
        lambda found: f"{found[1]}from {resolve_name(found[2], package)} import",
        text,
        flags=re.MULTILINE,
    )


FILES = packaged_files()
SOURCES = {module: with_absolute_imports(module, file) for module, file in sorted(FILES.items())}


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def imports(source: str) -> Iterator[str]:
    """Yield the dotted names that the source imports, including in functions; relative imports keep their dots."""
    yield from imported_names(nodes_of(source))


def targets(source: str) -> Iterator[str]:
    """Yield the dotted names that the source passes to `import_module` as strings."""
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            yield from (value.value for value in node.args if isinstance(getattr(value, "value", None), str))


def imported_names(nodes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from luna_mega import kernels` imports luna_mega.kernels. For other packages, only the package is listed.
            ours = module.split(".")[0] in ("luna_mega", "luna_mega_cli")
            yield from (f"{module}.{alias.name}" if ours else module for alias in node.names)


def layer_of(name: str) -> str | None:
    layers = [layer for layer in LAYERS if f"{name}.".startswith(f"{layer}.")]
    return max(layers, key=len, default=None)


def violations(module: str, source: str) -> list[str]:
    own, order = layer_of(module), list(LAYERS)
    wrong = []
    for name in imports(source):
        layer = layer_of(name)
        if layer is None:
            allowed = name.split(".")[0] in LAYERS[own] | sys.stdlib_module_names
        else:
            allowed = order.index(layer) <= order.index(own) and (layer == own or not {layer, own} <= APART)
        if not allowed:
            wrong.append(name)
    return wrong


def inside_functions(source: str) -> list[str]:
    """Return the names that are imported in functions, except optional packages and modules that need them."""
    functions = [node for node in nodes_of(source) if isinstance(node, ast.FunctionDef)]
    names = imported_names(inner for function in functions for inner in ast.walk(function))
    return [name for name in names if name.split(".")[0] not in OPTIONAL and "triton" not in name]


def test_every_package_is_listed_and_has_a_layer():
    listed = set(setup()["packages"].split())
    packages = {module if file.name == "__init__.py" else module.rpartition(".")[0] for module, file in FILES.items()}
    assert packages - {""} == listed
    assert all(layer_of(module) for module in FILES)


def test_modules_import_only_from_lower_layers():
    assert {module: wrong for module, source in SOURCES.items() if (wrong := violations(module, source))} == {}


def exists(name: str) -> bool:
    """Return whether a name in a package of this repository is a module, a package, or an attribute of a module."""
    home, _, last = name.rpartition(".")
    is_module = name in FILES or any(module.startswith(f"{name}.") for module in FILES)
    found = home in FILES if last == "*" else re.search(rf"\b{last}\b", SOURCES.get(home, ""))
    return is_module or bool(found)


def test_imported_names_of_the_package_exist():
    """All imported names exist; an editable install of another checkout would hide a missing module."""
    ours = {(module, name) for module, source in SOURCES.items() for name in imports(source) if layer_of(name)}
    assert {(module, name) for module, name in ours if not exists(name)} == set()


def test_only_the_registry_imports_formats_by_name():
    """Only the registry imports formats by name."""
    public = {"", "format", "registry"}
    for module, source in SOURCES.items():
        if not module.startswith("luna_mega.convert.formats."):
            homes = [name for name in imports(source) if name.startswith("luna_mega.convert.formats.")]
            parts = {part for name in homes if (part := name.split(".")[3])[0].islower()}
            assert parts - {"register_format", "registered_formats"} <= public, module


def test_kernels_are_imported_through_their_doors():
    """Other packages import operators from `kernels.api` and helpers from `kernels.support`."""
    doors = ("luna_mega.kernels.api.", "luna_mega.kernels.support.")
    others = {module: source for module, source in SOURCES.items() if layer_of(module) != "luna_mega.kernels"}
    names = {(module, name) for module, source in others.items() for name in imports(source)}
    inside = {(module, name) for module, name in names if f"{name}.".startswith("luna_mega.kernels.")}
    assert {(module, name) for module, name in inside if not name.startswith(doors)} == set()
    assert ("luna_mega.modeling_luna.modeling_luna", "luna_mega.kernels.api.luna_pack") in inside


def test_kernels_import_each_other_with_relative_imports():
    """The kernels also work under another name: as a package of their own, and in the folders of models."""
    names = {name for module in FILES for name in imports(FILES[module].read_text(encoding="utf-8"))
             if layer_of(module) == "luna_mega.kernels"}  # fmt: skip
    assert {name for name in names if name.startswith("luna_mega")} == set() and "..varlen" in names


def test_no_import_cycles():
    graph = {}
    for module, source in SOURCES.items():
        names = {*imports(source), *targets(source)}
        graph[module] = {name if name in FILES else name.rpartition(".")[0] for name in names} & FILES.keys()
    graphlib.TopologicalSorter(graph).prepare()
    assert "luna_mega.convert.importer" in graph["luna_mega_cli.convert"]


def test_command_line_only_imports_the_standard_library_at_module_level():
    """`luna-mega --help` does not import torch."""
    for module in filter(lambda name: layer_of(name) == "luna_mega_cli", SOURCES):
        names = imported_names(ast.parse(SOURCES[module]).body)
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"luna_mega_cli"}, module


def test_no_import_inside_a_function():
    """Only the command line imports in functions: a command imports its modules when it runs."""
    modules = {module for module, source in SOURCES.items() if inside_functions(source)}
    assert {module for module in modules if layer_of(module) != "luna_mega_cli"} == set()


def test_nothing_imports_tests_or_scripts():
    """Scripts import only from their own folder; only tests import scripts of other folders.

    The exception is `make gpu`, which imports its checks from the tests.
    """
    files = {file: folder for folder in NEVER_IMPORTED - {"tests"} for file in (ROOT / folder).rglob("*.py")}
    found = {file: (imports(file.read_text(encoding="utf-8")), folder) for file, folder in files.items()}
    found |= {module: (imports(source), None) for module, source in SOURCES.items()}
    tops = {(place, name.split(".")[0], own) for place, (names, own) in found.items() for name in names}
    found = {(place, top) for place, top, own in tops if top in NEVER_IMPORTED - {own}}
    assert found == {(ROOT / "benchmarks" / "gpu_jobs.py", "tests")}


def test_no_postponed_annotations():
    """Annotations are not postponed: Auto classes need `config: LunaConfig` to be a class, not a string."""
    assert {module for module, source in SOURCES.items() if "__future__" in imports(source)} == set()


INVALID = [
    ("luna_mega_cli", "import numpy"),
    ("luna_mega.convert.importer", "from luna_mega_cli import main"),
    ("luna_mega.convert.safe_load.reader", "import transformers"),
    ("luna_mega.convert.safe_load.reader", "from luna_mega.convert.keymap import KeyMap"),
    ("luna_mega.kernels.api", "def f():\n    from transformers.utils import logging"),
    ("luna_mega.kernels.api", "from luna_mega import LunaModel"),
    ("luna_mega.modeling_common.inputs", "from luna_mega.modeling_luna.configuration_luna import LunaConfig"),
    ("luna_mega.modeling_luna.x", "from luna_mega.modeling_mega.configuration_mega import MegaConfig"),
    ("luna_mega.modeling_luna.x", "from luna_mega import convert"),
    ("luna_mega.modeling_luna.x", "from .configuration_luna import LunaConfig"),
    ("luna_mega.modeling_luna.x", "from kernels import api"),
    ("luna_mega", "from luna_mega.hub.card import conversion_card"),
    ("luna_mega", "import luna_megalodon"),
    ("luna_mega.convert.importer", "import tests.helpers"),
    ("luna_mega.convert.importer", "from luna_mega.inspection.verify import verify"),
]
VALID = [
    ("luna_mega.kernels.api", "from luna_mega.kernels import _dispatch\nimport math, os.path"),
    ("luna_mega.modeling_luna.x", "from luna_mega.kernels.api import luna_attention"),
    ("luna_mega.convert.importer", "from luna_mega.hub.folder import read_folder"),
]


def test_invalid_imports_are_detected():
    assert [case for case in INVALID if not violations(*case)] == [case for case in VALID if violations(*case)] == []
    assert inside_functions("class A:\n    def f(self):\n        if self:\n            import torch") == ["torch"]
    assert not inside_functions("import torch\ndef f():\n    from luna_mega.kernels.x import triton_ops\n")
    assert list(targets('import importlib\nimportlib.import_module("luna_mega.a").run()')) == ["luna_mega.a"]
