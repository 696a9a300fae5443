"""The report of a conversion: a table for the terminal, and conversion_report.json."""

import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from luna_mega.convert.tensors import few

REPORT_NAME = "conversion_report.json"
_WORDS = {True: "yes", False: "no", None: "none"}
# An absolute path in a text, but not inside a word, "</s>" or "../a", or the "//" of env:// or tcp://host. It ends at
# ':', at the end of the line, at a closing quote, or before an option of a command.
_ROOT = r"(?:(?<=:)//)?/(?![/\s])|(?<!:)//(?=\w)|\\\\+(?=\w)|~[\w.-]*[\\/]|[A-Za-z]:[\\/](?!/)"
_END = r"['\"](?=[\s,;:)\]}]|$)|\s--?[A-Za-z]"
_ABSOLUTE_PATH = re.compile(rf"(?<![\w.~<\\/])(?:{_ROOT})(?:(?!{_END})[^:\r\n])+")


@dataclass
class Report:
    """Record of a conversion: its input, its decisions and its output.

    `mapped` has `{"source", "target", "shape"}` and `dropped` has `{"source", "shape", "reason"}` for every tensor of
    the checkpoint. `tokenizer` has `{"class", "kind", "size", "missing_pieces"}`. `args` are the checkpoint's.
    `missing` and `unexpected` are empty, since other conversions fail. `code` describes the revision, and `output` is
    None if nothing was written. `load` says how to load the output. These three, `sizes` and `labels` are not in
    conversion_report.json.
    """

    output: str | None
    source: dict[str, Any]
    model_class: str
    decisions: dict[str, Any]
    mapped: list[dict[str, Any]]
    dropped: list[dict[str, Any]]
    dtype_in: dict[str, int]
    dtype_out: str
    parameters: dict[str, int]
    non_finite: list[str]
    tokenizer: dict[str, Any] | None
    args: dict[str, Any]
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    code: str = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    load: str = ""

    def save(self, folder: Path) -> None:
        """Write conversion_report.json into `folder`, without the folders of absolute paths."""
        own = ("source", "decisions", "args", "notes", "warnings")
        content = {"format": 1} | asdict(self) | {name: without_folders(getattr(self, name)) for name in own}
        for name in ("output", "code", "sizes", "labels", "load"):
            del content[name]
        (folder / REPORT_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        source = self.source
        decisions = {name.replace("_", " "): value for name, value in self.decisions.items()}
        if "layer norm" in decisions:
            mean = decisions.pop("layer norm mean")
            decisions["layer norm"] += f" (the mean of the norm weights is {mean:.3f})"
        origin = [f"{name} {source[name]}" for name in ("arch", "task") if source[name] not in (None, source["layout"])]
        origin.append(f"updates: {source['num_updates'] or 'not recorded'}")
        rows = {
            "read": f"{source['file']}: {source['layout']} of the {self.code or source['revision']}, "
            + ", ".join(origin),
            "class": self.model_class,
            "sizes": ", ".join(f"{name} {_shown(value)}" for name, value in self.sizes.items()),
            **({"labels": f"{len(self.labels)}: {few(self.labels)}"} if self.labels else {}),
            **{name: _shown(value) for name, value in decisions.items()},
            "tensors": f"{len(self.mapped)} mapped, {len(self.dropped)} dropped, "
            f"{len(self.missing)} missing, {len(self.unexpected)} unexpected",
            "parameters": f"{self.parameters['model']:,} in the model, {self.parameters['file']:,} in the file",
            "dtype": f"{', '.join(self.dtype_in)} -> {self.dtype_out}",
            "tokenizer": _tokenizer_row(self.tokenizer) if self.tokenizer else "none",
        }
        reasons = Counter(row["reason"] for row in self.dropped)
        lines = [
            *rows.items(),
            *(("dropped", f"{number} x {reason}") for reason, number in reasons.items()),
            *(("note", without_folders(note)) for note in self.notes),
            *(("warning", without_folders(warning)) for warning in self.warnings),
            ("written", "nothing" if self.output is None else f"{self.output}: {', '.join(self.files)}"),
            *([("load", self.load)] if self.load else []),
        ]
        width = max(len(name) for name, _ in lines) + 2
        return "\n".join(f"{name:<{width}}{' '.join(value.split())}" for name, value in lines)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _tokenizer_row(tokenizer: dict[str, Any]) -> str:
    missing = tokenizer["missing_pieces"]
    lost = f", {len(missing):,} pieces become <unk>: {few(missing)}" if missing else ""
    return f"{tokenizer['class']}, {tokenizer['kind']}, {tokenizer['size']:,} ids{lost}"


def without_folders(value: Any) -> Any:
    """Return a JSON value in which every absolute path is reduced to its last name, to hide the user's folders.

    JSON has no inf and NaN, which become texts.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, dict):
        return {without_folders(str(name)): without_folders(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(repr(without_folders(inner)) for inner in value))}}}"
    return _ABSOLUTE_PATH.sub(lambda path: re.split(r"[\\/]+", path[0].rstrip("\\/"))[-1], str(value))
