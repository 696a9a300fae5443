"""Equations do not use process groups: a rule for the syntax trees of layers, norms, heads and pooling."""

import ast

import pytest

WORDS = {"shard", "sharded", "group", "rank", "ranks", "dist", "distributed"}
EQUATIONS = (
    "modeling_common/heads.py",
    "modeling_common/labels.py",
    "modeling_common/pooled_heads.py",
    "modeling_common/pooling.py",
    "modeling_luna/heads_luna.py",
    "modeling_luna/modeling_luna.py",
    "modeling_mega/adaptive.py",
    "modeling_mega/batch_norm_mega.py",
    "modeling_mega/cross_attention.py",
    "modeling_mega/heads_mega.py",
    "modeling_mega/modeling_mega.py",
    "modeling_mega/layers_mega.py",
    "modeling_mega/patches_mega.py",
    "modeling_megalodon/attention_megalodon.py",
    "modeling_megalodon/heads_megalodon.py",
    "modeling_megalodon/modeling_megalodon.py",
)
# The arguments of a model include its group of processes, which is passed to `prepare`.
MODELS = {"LunaModel", "MegaModel", "MegalodonModel"}


def names(tree):
    """Yield the identifiers of a tree and their lines, except in the classes of complete models."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and node.name in MODELS:
            continue
        for field in ("name", "id", "attr", "arg", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield name, getattr(node, "lineno", 0)
        yield from names(node)


@pytest.mark.parametrize("path", EQUATIONS)
def test_equations_do_not_depend_on_process_groups(repo_root, path):
    tree = ast.parse((repo_root / path).read_text(encoding="utf-8"))
    found = [(name, line) for name, line in names(tree) if WORDS & set(name.replace(".", "_").split("_"))]
    # Imported for annotations of complete models.
    assert [entry for entry in found if entry[0] != "torch.distributed"] == []
