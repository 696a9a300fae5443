"""Files of the fastest configurations that were measured on a device, `kernels/<op>/configs/<device>.json`.

    {"op": op, "device": name, "versions": {...}, "kernels": {kernel: [{"kind": text, "sizes": {name: number},
    "configuration": {name: number}}]}}

`kind` is what must be equal for a configuration to fit a call, such as the dtype; `sizes` may differ: the entry whose
sizes are nearest is taken. `benchmarks/gpu_report.py` measures and writes the files. `LUNA_MEGA_CONFIGS` names a folder
that is read in place of `kernels`. Without a file, every kernel has its default configuration.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """What decides how fast a configuration is: the kernel, the kind of call, and its sizes."""

    op: str
    kernel: str
    kind: str
    sizes: dict[str, int]


def file_of(op: str, device: str) -> Path:
    """Return the file of an op inside the folder of all ops; `device` is the name that its driver tells."""
    return Path(op, "configs", re.sub("[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def measured(kind: Kind, device: str, configurations: Sequence) -> Any:
    """Return the one of `configurations`, named tuples, that was measured as the fastest on a device, or None.

    Raises `ValueError` where the file is not one of configurations, is of another op or device, or has an entry for
    exactly this call that is none of `configurations`.
    """
    folder = os.environ.get("LUNA_MEGA_CONFIGS") or Path(__file__).parents[1]
    path = Path(folder, file_of(kind.op, device))
    entries = [entry for entry in _read(path, kind.op, device).get(kind.kernel, ()) if entry["kind"] == kind.kind]
    known = {tuple(sorted(c._asdict().items())): c for c in configurations}
    for entry in sorted(entries, key=lambda entry: _distance(entry["sizes"], kind.sizes)):
        found = known.get(tuple(sorted(entry["configuration"].items())))
        if found is not None:
            return found
        if entry["sizes"] == kind.sizes:
            raise ValueError(
                f"{path}: {kind.kernel} has no configuration {entry['configuration']} in this version: "
                "measure again with benchmarks/gpu_report.py, or delete the file"
            )
    return None


def _distance(some: dict[str, int], other: dict[str, int]) -> float:
    if some.keys() != other.keys():
        return math.inf
    return sum(abs(math.log2(max(some[name], 1) / max(other[name], 1))) for name in some)


@cache
def _read(path: Path, op: str, device: str) -> dict[str, list[dict]]:
    """Return kernel -> entries of a file, checked; nothing where there is no file. It is read once in a process."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        of, kernels = (content["op"], content["device"]), content["kernels"]
        entries = [entry for rows in kernels.values() for entry in rows]
        numbers = [n for entry in entries for n in (*entry["sizes"].values(), *entry["configuration"].values())]
        valid = all(type(n) is int for n in numbers) and all(type(entry["kind"]) is str for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a file of configurations ({error!r}): measure again, or delete it") from error
    if not valid:
        raise ValueError(f"{path}: not a file of configurations (a size is no integer): measure again, or delete it")
    if of != (op, device):
        raise ValueError(f"{path}: is of {of[0]} on {of[1]}, not of {op} on {device}: delete it")
    return kernels


def entries(path: Path) -> list[tuple[Kind, dict[str, int]]]:
    """Return what a file that `content` wrote holds, nothing where there is no file."""
    if not path.is_file():
        return []
    written = json.loads(path.read_text(encoding="utf-8"))
    return [
        (Kind(written["op"], kernel, entry["kind"], entry["sizes"]), entry["configuration"])
        for kernel, rows in written["kernels"].items()
        for entry in rows
    ]


def content(op: str, device: str, versions: dict[str, str], found: Sequence[tuple[Kind, dict[str, int]]]) -> str:
    """Return the text of the file of an op on a device; of several entries for a call the last one counts."""
    kernels = {}
    for kind, configuration in found:
        if kind.op == op:
            key = kind.kind, *sorted(kind.sizes.items())
            entry = {"kind": kind.kind, "sizes": kind.sizes, "configuration": configuration}
            kernels.setdefault(kind.kernel, {})[key] = entry
    rows = {kernel: list(entries.values()) for kernel, entries in kernels.items()}
    return json.dumps({"op": op, "device": device, "versions": versions, "kernels": rows}, indent=1) + "\n"
