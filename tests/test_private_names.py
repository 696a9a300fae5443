"""Names of transformers and torch that are no documented interface exist.

`make test-newest` runs this file first, without `luna_mega` and the fixtures: its messages name what a new version has
removed. It finds imports and used attributes in the syntax trees of the packages.
"""

import argparse
import ast
import importlib
import inspect
import re
from pathlib import Path

import torch
import transformers
from transformers.generation.utils import GenerationMixin

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "modeling_common", "modeling_luna", "modeling_mega", "modeling_megalodon", "luna_mega", "convert")
# Classes that the code derives from or reads, and modules with private functions that it calls.
OWNERS = [
    transformers.PreTrainedModel,
    GenerationMixin,
    transformers.PreTrainedConfig,
    transformers.TokenizersBackend,
    transformers.Trainer,
    transformers.TrainingArguments,
    transformers.HfArgumentParser,
    argparse.ArgumentParser(),
    torch.nn.Module,
    torch.Tensor,
    torch.ops.aten,
    torch,
    torch._C,
    torch._C._functorch,
    torch.autograd.forward_ad,
    torch.compiler,
    torch.distributed.distributed_c10d,
]
PRIVATE = re.compile(r"_[a-zA-Z]\w+")


FILES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
TEXT = "\n".join(file.read_text(encoding="utf-8") for file in FILES)
NODES = [node for file in FILES for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


def exists(module: str, name: str) -> bool:
    """Return whether a module has a name or a sub-module of this name."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        return False


def listed() -> set[str]:
    """Return the names with an underscore in the table of docs/development.md."""
    section = (ROOT / "docs" / "development.md").read_text(encoding="utf-8").split("## Private names")[1]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", " ".join(row)) if PRIVATE.fullmatch(name)}


def used() -> set[str]:
    """Return the private names that the code reads as attributes, or defines in classes."""
    names = {node.attr for node in NODES if isinstance(node, ast.Attribute)}
    for item in (item for node in NODES if isinstance(node, ast.ClassDef) for item in node.body):
        names |= {item.name} if isinstance(item, ast.FunctionDef) else set()
        names |= {x.id for x in ast.walk(item) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return {name for name in names if PRIVATE.fullmatch(name)}


def test_imports_exist():
    found = [node for node in NODES if isinstance(node, ast.ImportFrom) and str(node.module).startswith("transformers")]
    missing = {f"{node.module}.{x.name}" for node in found for x in node.names if not exists(node.module, x.name)}
    assert found and not missing, f"transformers {transformers.__version__} does not have {sorted(missing)}"


def test_private_names_exist():
    # Names that only instances have, or that HfArgumentParser reads. Importing the compiler would take seconds.
    sources = [inspect.getsource(cls) for cls in OWNERS if inspect.isclass(cls) and "transformers" in cls.__module__]
    sources.append(Path(torch.__file__).with_name("_dynamo").joinpath("decorators.py").read_text(encoding="utf-8"))
    missing = {name for name in listed() if not any(hasattr(owner, name) for owner in OWNERS)}
    missing = {name for name in missing if not re.search(rf"\.{name} =|dtype\.{name}", " ".join(sources))}
    assert not missing, f"transformers {transformers.__version__}, torch {torch.__version__} do not have {missing}"


def test_private_names_are_listed():
    """The table in docs/development.md has the private names that the code uses, and no others."""
    names = {name for name in used() if any(hasattr(owner, name) for owner in OWNERS)}
    assert names <= listed(), sorted(names - listed())
    assert [name for name in listed() if not re.search(rf"\b{name}\b", TEXT)] == []
