"""Summaries of earlier runs, read back for a report."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from luna_mega.training.arguments import fail


def read_summaries(folders: Sequence[str]) -> list[tuple[Path, dict[str, Any]]]:
    """Return folder and summary of the runs that `folders` hold, themselves or one folder deeper.

    The script ends where a folder has none, or one that cannot be read.
    """
    runs = []
    for folder in map(Path, folders):
        own = folder / "all_results.json"
        found = [own] if own.is_file() else sorted(folder.glob("*/all_results.json"))
        if not found:
            fail(f"{folder}: there is no all_results.json of a run, in it or in the folders in it")
        runs += [(file.parent, read_json(file)) for file in found]
    return runs


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be read: {error}")
    if not isinstance(content, dict):
        fail(f"{file} cannot be read: it holds no names and values")
    return content


def mean_and_spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean with, of several values, their standard deviation: 75.1 ± 0.4."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"
