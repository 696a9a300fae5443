"""The private and undocumented names that the code uses match the table in docs/development.md."""

import ast
import re

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, TokenizersBackend
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from tests.test_import_graph import ROOT, SOURCES, nodes_of

BASES = (PreTrainedModel, GenerationMixin, PreTrainedConfig, TokenizersBackend, Cache, CacheLayerMixin)
BASES += (EncoderDecoderCache, torch.nn.Module)
UNDOCUMENTED = (
    "transformers.convert_slow_tokenizer",
    "transformers.dynamic_module_utils",
    "transformers.modelcard",
    "transformers.models.auto",
    "transformers.utils.import_utils",
    "transformers.utils.output_capturing",
)
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined_names(statement):
    """Return the names that a statement in a class body defines."""
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def undocumented_names(nodes):
    """Return the names of undocumented modules that a file imports, reads from an imported module, or patches."""
    names, modules = set(), set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if f"{node.module}.{alias.name}" in UNDOCUMENTED:
                    modules.add(alias.asname or alias.name)
                if f"{node.module}.{alias.name}".startswith(UNDOCUMENTED):
                    names.add(alias.name)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(UNDOCUMENTED):
            names.add(node.value.rpartition(".")[2])
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    return names | {node.attr for node in attributes if getattr(node.value, "id", None) in modules}


def checked_names(node):
    """Return the private names that a call of `getattr` or `hasattr` reads."""
    is_check = isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "hasattr")
    return {node.args[1].value} if is_check and is_private(str(getattr(node.args[1], "value", ""))) else set()


def used_names():
    files = [nodes_of(source) for module, source in SOURCES.items() if not module.startswith("luna_mega_cli")]
    nodes = [node for file in files for node in file]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
    in_classes = {
        name for node in nodes if isinstance(node, ast.ClassDef) for x in node.body for name in defined_names(x)
    }
    stored = [node for node in attributes if isinstance(node.ctx, ast.Store)]
    stored = {node.attr for node in stored if getattr(node.value, "id", None) == "self" or "luna_mega" in node.attr}
    own = in_classes | stored | NAMED_TUPLE
    inherited = {name for base in BASES for name in dir(base) if is_private(name)}
    read = {node.attr for node in attributes if ast.unparse(node) != "os._exit"}  # `os._exit` is documented
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.module.startswith("luna_mega")]
    read |= {alias.name for node in imports for alias in node.names if is_private(alias.name)}
    read = read.union(*map(checked_names, nodes))
    return ((in_classes | read) & inherited | read - own).union(*map(undocumented_names, files))


def test_table_of_private_names_is_complete():
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    section = page.partition("## Private names")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    assert used_names() == {name for row in rows for name in re.findall(r"`(\w+)`", row)}
