"""Key maps as data: ordered rows (source pattern, target pattern, transform), read in either direction.

A pattern is a tensor name with fields: `{layer}` and `{n}` are numbers, `{part}` is weight or bias, `{rest}` anything.
"""

import re
from dataclasses import dataclass
from functools import cache

# The transform of norm weights and biases: weights may be stored minus one.
LAYER_NORM = "layer_norm"
# The transform of tensors that keep their dtype where the narrower one of the others would round them.
WIDE = "wide"
_FIELDS = {"layer": r"\d+", "n": r"\d+", "part": r"weight|bias", "rest": r".+"}


@dataclass(frozen=True)
class Row:
    """One row of a key map; `target` None means that the tensor is left out, for `reason`."""

    source: str
    target: str | None
    transform: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Match:
    """A row that fits a name, and the name on the other side (None = left out)."""

    row: Row
    key: str | None


class KeyMap:
    """Rows in order; the first row that fits a name wins."""

    def __init__(self, rows: list[Row]):
        self.rows = tuple(rows)

    def forward(self, key: str) -> Match | None:
        """Return the row that fits a name of the original, and our name; None when no row fits."""
        return self._match(key, "source", "target")

    def backward(self, key: str) -> Match | None:
        """Return the row that fits a name of ours, and the name of the original; None when no row fits."""
        return self._match(key, "target", "source")

    def position(self, key: str) -> tuple:
        """Return a key that sorts names of the original in the order of the rows.

        Names with `{layer}` come layer by layer, weight before bias.
        """
        for index, row in enumerate(self.rows):
            if match := _compile(row.source).fullmatch(key):
                fields = match.groupdict()
                block = index
                while "layer" in fields and block and "{layer}" in self.rows[block - 1].source:
                    block -= 1  # the rows with {layer} are one block
                return block, int(fields.get("layer", 0)), index, fields.get("part") == "bias"
        raise KeyError(key)

    def _match(self, key: str, from_side: str, to_side: str) -> Match | None:
        for row in self.rows:
            pattern, other = getattr(row, from_side), getattr(row, to_side)
            if pattern is not None and (match := _compile(pattern).fullmatch(key)):
                return Match(row, None if other is None else other.format(**match.groupdict()))
        return None


@cache
def _compile(pattern: str) -> re.Pattern:
    literal_and_field = re.split(r"\{(\w+)\}", pattern)
    return re.compile(
        "".join(
            f"(?P<{text}>{_FIELDS[text]})" if index % 2 else re.escape(text)
            for index, text in enumerate(literal_and_field)
        )
    )
