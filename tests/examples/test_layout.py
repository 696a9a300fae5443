"""Scripts are single files that can be read from top to bottom, with few helper modules."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))
SCRIPTS = [*sorted(EXAMPLES.glob("run_*.py")), EXAMPLES / "lra" / "run_lra.py"]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_sizes():
    for path in FILES:
        limit = 340 if path in SCRIPTS else 350
        assert len(path.read_text(encoding="utf-8").splitlines()) <= limit, path
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, (path, node.name)


def test_a_script_imports_no_other_script():
    names = {file.stem for file in FILES} | {"common"}
    for path in EXAMPLES.glob("run_*.py"):
        for node in ast.walk(parse(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {module.partition(".")[0] for module in modules} & names, path


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_main_is_visible(path):
    """The script's own `main` calls its functions in order."""
    main = next(node for node in parse(path).body if isinstance(node, ast.FunctionDef) and node.name == "main")
    calls = [node for node in ast.walk(main) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    names = [getattr(node.func, "attr", getattr(node.func, "id", "")) for node in calls]
    places = [names.index(step) for step in ("parse", "begin_run", "load_data", "make_model", "train", "publish")]
    assert places == sorted(places)
