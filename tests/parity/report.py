"""Summary of the parity tests: one line at the end of every test run, and the tables of `docs/parity.md`."""

import platform
import re
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

PROPERTY = "parity"
BEGIN, END = "<!-- begin: make parity -->", "<!-- end: make parity -->"
KINDS = ("outputs", "gradients")
COLUMNS = (
    "fixture",
    *(f"{kind}: {what}" for kind in KINDS for what in ("difference", "of tolerance")),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


class Row(NamedTuple):
    """Results of one fixture: the number of tensors, and the largest difference and ratio per kind of tensor."""

    tensors: int = 0
    worst: dict[str, tuple[float, float]] = {}

    def add(self, found: dict) -> "Row":
        worst = dict(self.worst)
        for kind, pair in found["worst"].items():
            worst[kind] = tuple(map(max, pair, worst.get(kind, (0.0, 0.0))))
        return Row(self.tensors + found["tensors"], worst)

    def __str__(self) -> str:
        cells = []
        for kind in KINDS:
            difference, ratio = self.worst.get(kind, (None, None))
            cells += ["–", "–"] if difference is None else [f"{difference:.1e}", f"{ratio:.2f}"]
        return " | ".join(cells)


def collect(reports: list) -> dict[str, Row]:
    """Return the results by fixture (`family/name`)."""
    rows: dict[str, Row] = {}
    for report in reports:
        for name, found in report.user_properties:
            if name == PROPERTY:
                rows[found["folder"]] = rows.get(found["folder"], Row()).add(found)
    return rows


def summary(stats: dict[str, list]) -> str | None:
    """Return the line for the end of a test run, or None if no parity test ran."""
    passed, skipped, failed = (
        [report for report in stats.get(outcome, ()) if report.nodeid.startswith("tests/parity/")]
        for outcome in ("passed", "skipped", "failed")
    )
    if not passed and not skipped and not failed:
        return None
    rows = collect(passed)
    tensors = sum(row.tensors for row in rows.values())
    line = (
        f"{len(passed)} parity cases passed, {len(failed)} failed: {tensors} tensors of {len(rows)} fixtures compared"
    )
    return f"{line}; {len(skipped)} cases skipped because their fixture is not in the repository" if skipped else line


def write(path: Path, reports: list) -> None:
    """Replace the tables between the markers in the page at `path`."""
    rows, text = collect(reports), path.read_text(encoding="utf-8")
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, {date.today()}"
    lines = [f"`make parity`: CPU, {machine}.", ""]
    for family in sorted({name.split("/")[0] for name in rows}):
        lines += [f"### {family.capitalize()}", "", HEADER]
        lines += [
            f"| `{name.split('/')[1]}` | {rows[name]} |" for name in sorted(rows) if name.startswith(f"{family}/")
        ]
        lines.append("")
    table = "\n".join([BEGIN, "", *lines, END])
    path.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")
