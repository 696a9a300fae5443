"""Results of measurements: the machine, JSON files and Markdown tables. Needs only the standard library."""

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
Row = dict[str, Any]
SETTINGS = ("threads", "device", "dtype", "instructions", "products")  # of a measurement


def commit() -> str:
    """Return the commit of the checkout, with a `+` if files are changed; an empty string without git or its data."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=FOLDER, capture_output=True, encoding="utf-8").stdout.strip()
    except FileNotFoundError:
        return ""


def processor() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8-sig") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except FileNotFoundError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> Row:
    """Return the processor, number of cores, memory allocator and date."""
    preloaded = [Path(name).name for name in re.split("[ :]", os.environ.get("LD_PRELOAD", "")) if "malloc" in name]
    allocator = ", ".join(preloaded) or "".join(platform.libc_ver()[:1]) or "unknown"
    now = datetime.datetime.now().isoformat(" ", "minutes")
    return {"processor": processor(), "cores": os.cpu_count(), "allocator": allocator, "date": now}


def results_file() -> Path:
    """Return the file of this processor's results in `results`."""
    words = re.sub(r"\((R|TM)\)|@.*|\d+-Core", "", processor()).lower()
    return FOLDER / "results" / ("_".join(re.findall(r"[a-z0-9]+", words)) + ".json")


def read(path: Path) -> list[Row]:
    """Return all rows of a file, each with the fields that describe its run."""
    runs = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else []
    return [run["about"] | row for run in runs for row in run["rows"]]


def size_text(row: Row) -> str:
    """Return the size of a row as the option `--size` of `run.py` has it."""
    return " ".join(f"{field}={value}" for field, value in row["size"].items())


def identity(row: Row) -> tuple:
    """Return the fields that distinguish measurements."""
    return (row["case"], row["variant"], *sorted(row["size"].items()), *(row.get(name) for name in SETTINGS))


def write(path: Path, about: Row, rows: list[Row]) -> None:
    """Add the rows of a run to a file, in place of earlier measurements of the same."""
    replaced = {identity(about | row) for row in rows}
    runs = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else []
    for run in runs:
        run["rows"] = [row for row in run["rows"] if identity(run["about"] | row) not in replaced]
    runs = [run for run in runs if run["rows"]] + [{"about": about, "rows": rows}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[" + ",\n".join(map(_text, runs)) + "]\n", encoding="utf-8")


def _text(run: Row) -> str:
    """Return the JSON text of a run, with one line per row."""
    rows = ",\n".join(json.dumps(row) for row in run["rows"])
    return f'{{"about": {json.dumps(run["about"])},\n"rows": [\n{rows}]}}'


def join(lines: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; the first line is its header."""
    first, *others = (f"| {' | '.join(line)} |\n" for line in lines)
    return first + "|---" * (first.count("|") - 1) + "|\n" + "".join(others)
