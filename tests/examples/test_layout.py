"""A script is one file that one reads from top to bottom, and few beside it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted([*EXAMPLES.rglob("*.py"), *(ROOT / "studies").rglob("*.py")])
SCRIPTS = [*sorted(EXAMPLES.glob("run_*.py")), EXAMPLES / "lra" / "run_lra.py", ROOT / "studies" / "mlm_start.py"]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def way(path: Path) -> set[Path]:
    """Return a script and the files of `common` that it, or one of these, imports at its top."""
    found, left = set(), [path]
    while left:
        found.add(current := left.pop())
        names = [node.module for node in parse(current).body if isinstance(node, ast.ImportFrom)]
        files = {EXAMPLES / f"{name.replace('.', '/')}.py" for name in names if name.startswith("common.")}
        left += files - found
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sizes(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_the_way_through_run_glue():
    """Modules that serve one option are imported where it is set; a reader of the script can leave them out."""
    files = way(EXAMPLES / "run_glue.py")
    assert {path.stem for path in files} == {"run_glue", "arguments", "data", "model", "report", "texts", "training"}
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 1160


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_main_is_visible(path):
    """The script's own `main` calls what it needs, in order; nothing in `common` calls back."""
    main = next(node for node in parse(path).body if isinstance(node, ast.FunctionDef) and node.name == "main")
    calls = [node for node in ast.walk(main) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    names = [getattr(node.func, "attr", getattr(node.func, "id", "")) for node in calls]
    if path.stem == "run_mlm_accelerate":  # a loop of its own
        steps = ["parse_arguments", "make_tokenizer", "Loop", "update", "save_model"]
    elif path.stem == "run_distill":
        steps = ["parse", "begin_run", "make_teacher", "load_data", "make_student", "copy_student", "calibrate_student"]
        steps += ["align_student", "train", "finish"]
    else:
        steps = ["parse", "begin_run", "load_data", "make_model", "train", "finish"]
    places = [names.index(step) for step in steps]
    assert places == sorted(places)
