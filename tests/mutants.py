"""Change one token of the source in a copy of the checkout, and report whether the fast tests of its room notice.

    python tests/mutants.py models 30 5b1d1953             # 30 mutants of a room, the seed is a commit
    python tests/mutants.py operators/timestep_norm 8 1     # 8 mutants of one folder of the room
    python tests/mutants.py models 30 5b1d1953 --at 3 17    # only these of them

Requires pytest-cov. Only tests that execute the changed line run, or all tests of the room for a line that is executed
when its module is imported. A mutant that is not noticed within the limit counts as a survivor.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {  # the sources and the tests of a room
    "operators": ("kernels", "tests/kernels"),
    "models": ("modeling_common modeling_luna modeling_mega modeling_megalodon", "tests/modeling"),
    "convert": ("convert", "tests/convert"),
    "scripts": ("luna_mega/training examples", "tests/examples"),
    "rest": ("luna_mega luna_mega_cli docs/site", "tests/hub tests/inspection tests/docs tests/test_*.py"),
}
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not"}
COMPARISONS |= {ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.FloorDiv: "*"}
OPERATOR = re.compile(r"\s*(<=|>=|==|!=|<|>|is not|is|not in|in|\+|-|\*|//|and|or)\s*")


class Mutant(NamedTuple):
    """One change: the file, its first and last offset in bytes, the line, and the old and new text."""

    file: str
    start: int
    end: int
    line: int
    old: str
    new: str


def changes(file: str) -> Iterator[Mutant]:
    """Yield all changes of a file: comparisons, arithmetic, integers, booleans, `and` and `or`; not in errors."""
    data = (ROOT / file).read_bytes()
    tree, starts = ast.parse(data), [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(start: tuple[int, int], end: tuple[int, int], new: str) -> Mutant:
        first, last = (starts[line - 1] + column for line, column in (start, end))
        return Mutant(file, first, last, data[:first].count(b"\n") + 1, data[first:last].decode(), new)

    def between(left: ast.expr, right: ast.expr, new: str) -> Iterator[Mutant]:
        found = change((left.end_lineno, left.end_col_offset), (right.lineno, right.col_offset), f" {new} ")
        if OPERATOR.fullmatch(found.old):
            yield found

    in_errors = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Raise) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in in_errors:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            yield from between(node.left, node.right, ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            yield from between(*node.values, "or" if isinstance(node.op, ast.And) else "and")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            new = node.value + 1 if type(node.value) is int else not node.value
            yield change((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), str(new))


def choose(sources: list[str], number: int, seed: str) -> list[Mutant]:
    """Return mutants of random files, which do not depend on anything but the sources and the seed."""
    listed = subprocess.run(
        ["git", "ls-files", *sources], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    ).stdout
    files = [file for file in listed.split() if file.endswith(".py") and "__init__" not in file]
    rng, chosen = random.Random(seed), []
    while len(chosen) < number:
        found = sorted(changes(rng.choice(files)))
        if found and (mutant := rng.choice(found)) not in chosen:
            chosen.append(mutant)
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that MUTANT_TESTS lists: first one case of each function, then another, and so on."""
    if "MUTANT_TESTS" not in os.environ:
        return
    chosen = set(json.loads(Path(os.environ["MUTANT_TESTS"]).read_text(encoding="utf-8")))
    rounds: dict[str, int] = defaultdict(int)
    order = {}
    for item in items:
        if item.nodeid in chosen:
            function = item.nodeid.partition("[")[0]
            order[item] = rounds[function]
            rounds[function] += 1
    config.hook.pytest_deselected(items=[item for item in items if item not in order])
    items[:] = sorted(order, key=order.get)


def run_pytest(checkout: Path, *options: str, **variables: str) -> subprocess.Popen:
    """Start the fast tests of a checkout."""
    variables |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    variables["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant has the size and often the second of the original
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    return subprocess.Popen(command, cwd=checkout, env=os.environ | variables, start_new_session=True, **pipes)


def contexts(tests: list[str], file: Path) -> tuple[dict[tuple[str, int], set[str]], set[str]]:
    """Return the tests that execute each line, and all tests, from a file that is written if it does not exist."""
    from coverage import CoverageData

    if not file.exists():
        sources = [f"--cov={path.name}" for path in ROOT.iterdir() if any(path.glob("*.py")) and path.name != "tests"]
        options = ["-n", "2", "--dist", "worksteal", *sources, "--cov-report=", "--cov-context=test", *tests]
        file.parent.mkdir(parents=True, exist_ok=True)
        process = run_pytest(ROOT, *options, COVERAGE_FILE=str(file))
        print(process.communicate()[0][-2000:], flush=True)
    data = CoverageData(str(file))
    data.read()
    lines, names = {}, set()
    for measured in data.measured_files():
        name = os.path.relpath(os.path.realpath(measured), ROOT)
        for line, found in data.contexts_by_lineno(measured).items():
            lines[name, line] = {context.partition("|")[0] for context in found} - {""}
            names |= lines[name, line]
    return lines, names


def copy(folder: Path) -> Path:
    """Return a copy of the files of the checkout as they are, with the C library."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout
    libraries = [path.relative_to(ROOT) for path in (ROOT / "kernels").rglob("*.so")]
    for name in [*listed.splitlines(), *libraries]:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    if (ROOT / ".git").exists():  # tests of the repository ask git
        (folder / ".git").symlink_to(ROOT / ".git")
    return folder


def try_mutant(checkout: Path, mutant: Mutant, chosen: set[str], limit: float) -> tuple[bool, str]:
    """Return whether the tests notice a mutant, and the first test that fails or why none does."""
    if not chosen:
        return False, "no test executes the line"
    file = checkout / mutant.file
    data = file.read_bytes()
    file.write_bytes(data[: mutant.start] + mutant.new.encode() + data[mutant.end :])
    (listed := checkout / "chosen.json").write_text(json.dumps(sorted(chosen)), encoding="utf-8")
    tests = sorted({name.partition("::")[0] for name in chosen})
    options = ["-x", "-p", "no:xdist", "-p", "tests.mutants", "--tb=no", "--hypothesis-profile=unreduced", *tests]
    process = run_pytest(checkout, *options, MUTANT_TESTS=str(listed))
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return False, f"{len(chosen)} tests, {limit:.0f} s were not enough"
    finally:
        file.write_bytes(data)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return process.returncode != 0, failed[0][:140] if failed else f"{len(chosen)} tests"


def main() -> None:
    """Print one line per mutant, and how many were noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", help=", ".join(ROOMS) + ", or a folder of the first source of one: operators/NAME")
    parser.add_argument("number", type=int)
    parser.add_argument("seed")
    parser.add_argument("--at", type=int, nargs="+", help="run only the mutants with these numbers")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of a mutant")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--contexts", type=Path, help="coverage of the tests of the room, which is written once")
    arguments = parser.parse_args()
    room, _, part = arguments.room.partition("/")
    sources, tests = (value.split() for value in ROOMS[room])
    sources = [f"{sources[0]}/{part}"] if part else sources
    if room == "rest":
        sources.append(":!luna_mega/training")
    tests = [str(path.relative_to(ROOT)) for pattern in tests for path in sorted(ROOT.glob(pattern))]
    chosen = choose(sources, arguments.number, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        lines, everything = contexts(tests, (arguments.contexts or Path(folder) / "contexts").resolve())
        checkouts: Queue[Path] = Queue()
        for job in range(arguments.jobs):
            checkouts.put(copy(Path(folder) / f"{job}"))
        # Statements of several lines count for their first line, and kernels of the interpreter for none.
        interpreted = {name for name in everything if "triton" in name}

        def check(number: int) -> bool:
            mutant, start = chosen[number], time.monotonic()
            above = (lines.get((mutant.file, line)) for line in range(mutant.line, max(mutant.line - 8, 0), -1))
            found = next((tests for tests in above if tests is not None), set())
            if not found:
                found = interpreted if "triton" in mutant.file else everything
            checkout = checkouts.get()
            try:
                noticed, reason = try_mutant(checkout, mutant, found, arguments.limit)
            finally:
                checkouts.put(checkout)
            change = f"{mutant.file}:{mutant.line}: {mutant.old.strip()} -> {mutant.new.strip()}"
            state = "noticed" if noticed else "SURVIVED"
            print(f"{number:3} {state} {time.monotonic() - start:4.0f} s  {change}  ({reason})", flush=True)
            return noticed

        numbers = arguments.at or range(arguments.number)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            results = list(pool.map(check, numbers))
    print(f"{arguments.room}, seed {arguments.seed}: {sum(results)} of {len(results)} mutants noticed")


if __name__ == "__main__":
    main()
