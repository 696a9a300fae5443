"""Check the names of a script's options before its imports, which take seconds. Imports only the standard library."""

import ast
import difflib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def check_names(module: str) -> None:
    """Exit with status 2 and a suggestion if the running script has no option of a name on the command line.

    The names are those of all fields of dataclasses in the script, in `luna_mega.training` and in the arguments of
    `Trainer`, and `SYNONYMS`. The parser of the script also reports synonyms and options of other scripts.

    Args:
        module: `__name__` of the script; nothing is checked if it is imported.
    """
    if module != "__main__":
        return
    known = {"help", "recipe"}.union(*map(_fields, _files()))
    for given in sys.argv[1:]:
        name = given.partition("=")[0].removeprefix("--").replace("-", "_")
        if given.startswith("--") and name and name not in known and name.removeprefix("no_") not in known:
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"; did you mean --{close[0]}?" if close else "; see --help"
            print(f"{Path(sys.argv[0]).name}: error: unknown option --{name}{advice}", file=sys.stderr)
            raise SystemExit(2)


def _files() -> Iterator[Path]:
    """Yield the files with the options of a script; `find_spec` of a package does not import it."""
    yield Path(sys.argv[0])
    for package, pattern in (("luna_mega", "training/*.py"), ("transformers", "training_args*.py")):
        if (spec := find_spec(package)) is not None and spec.origin is not None:
            yield from Path(spec.origin).parent.glob(pattern)


def _fields(path: Path) -> set[str]:
    """Return the names of the annotated fields of all classes in a file, and those in its `SYNONYMS`."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    fields = [part.target for node in classes for part in node.body if isinstance(part, ast.AnnAssign)]
    groups = [
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "SYNONYMS"
    ]
    return {field.id for field in fields if isinstance(field, ast.Name)}.union(*(set().union(*x) for x in groups))
