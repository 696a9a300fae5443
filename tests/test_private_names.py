"""Names of transformers and torch that are no documented interface exist, with the signatures that the code relies on.

`make test-newest` runs this file first, without `luna_mega` and the fixtures: its messages name what a new version has
removed. It finds imports, overridden methods and used attributes in the syntax trees of the packages.
"""

import argparse
import ast
import functools
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


@functools.cache
def trees() -> dict[str, ast.Module]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return the local names of a file that are imported from sub-modules of transformers -> (module, name)."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("transformers")
        for alias in node.names
    }


def find(module: str, name: str):
    """Return an imported object, or None if it does not exist."""
    try:
        found = getattr(importlib.import_module(module), name, None)
        return importlib.import_module(f"{module}.{name}") if found is None else found
    except ImportError:
        return None


@functools.cache
def sources() -> dict[type, str]:
    """Return the sources of the classes of transformers, whose instances have further names."""
    classes = [owner for owner in OWNERS if inspect.isclass(owner) and owner.__module__.startswith("transformers")]
    return {cls: inspect.getsource(cls) for cls in classes}


def owner_of(name: str):
    """Return the class or module that has a private name, also one that only instances have; or None."""
    if (owner := next((owner for owner in OWNERS if hasattr(owner, name)), None)) is not None:
        return owner
    # HfArgumentParser reads names of data classes.
    return next((cls for cls, text in sources().items() if f"self.{name} =" in text or f"dtype.{name}" in text), None)


def listed() -> set[str]:
    """Return the names with an underscore in the table of docs/development.md."""
    section = (ROOT / "docs" / "development.md").read_text(encoding="utf-8").split("## Private names")[1]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", " ".join(row)) if PRIVATE.fullmatch(name)}


def methods() -> list[tuple[str, ast.FunctionDef]]:
    """Return the methods of all classes, with their place."""
    return [
        (f"{file}: {node.name}.{item.name}", item)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    ]


def is_set(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def used() -> set[str]:
    """Return the private names that the code reads as attributes, or defines in classes."""
    names = {item.name for _, item in methods()}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                names |= {x.id for item in node.body for x in ast.walk(item) if is_set(x)}
    return {name for name in names if PRIVATE.fullmatch(name)}


def test_imports_exist():
    missing = {
        f"{module}.{name} ({file})"
        for file, tree in trees().items()
        for module, name in imports(tree).values()
        if find(module, name) is None
    }
    assert not missing, f"transformers {transformers.__version__} does not have {sorted(missing)}"


def test_calls_of_imported_names_fit():
    """Functions and classes of transformers accept the keyword arguments of our calls."""
    wrong = []
    for file, tree in trees().items():
        known = imports(tree)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known):
                continue
            parameters = inspect.signature(find(*known[node.func.id])).parameters.values()
            names = {parameter.name for parameter in parameters}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                wrong += [f"{file}: {node.func.id}({x.arg}=)" for x in node.keywords if x.arg and x.arg not in names]
    assert not wrong, wrong


def test_private_names_exist():
    # Importing the compiler would take seconds.
    compiler = Path(torch.__file__).with_name("_dynamo").joinpath("decorators.py").read_text(encoding="utf-8")
    missing = sorted(name for name in listed() if owner_of(name) is None and f".{name} =" not in compiler)
    assert not missing, f"transformers {transformers.__version__} with torch {torch.__version__} do not have {missing}"


def test_private_names_are_listed():
    """The table in docs/development.md has the private names that the code uses, and no others."""
    names = {name for name in used() if next((owner for owner in OWNERS if hasattr(owner, name)), None) is not None}
    assert names <= listed(), sorted(names - listed())
    source = " ".join((ROOT / file).read_text(encoding="utf-8") for file in trees())
    unused = sorted(name for name in listed() if not re.search(rf"\b{name}\b", source))
    assert not unused, unused


def test_overridden_methods_fit():
    """A private method accepts the arguments of the method that it overrides, and expects no others."""
    wrong, checked = [], 0
    for place, method in methods():
        owner = owner_of(method.name) if method.name in listed() else None
        if owner is None or not inspect.isfunction(theirs := inspect.unwrap(getattr(owner, method.name))):
            continue
        checked += 1
        ours, parameters = method.args, [*inspect.signature(theirs).parameters.values()]
        positional = [x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        keywords = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY or x in positional}
        needed = len(ours.args) - len(ours.defaults)
        if needed > len(positional) or (
            ours.vararg is None and not ours.kwonlyargs and len(ours.args) < len(positional)
        ):
            wrong.append(f"{place} overrides {inspect.signature(theirs)}")
        if unknown := sorted({x.arg for x in ours.kwonlyargs} - keywords):
            wrong.append(f"{place} expects {unknown}, but overrides {inspect.signature(theirs)}")
    assert not wrong, wrong
    assert checked >= 10
