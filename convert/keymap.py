"""Key maps: ordered rows of name patterns, read in both directions.

A pattern is a tensor name with fields: `{layer}` and `{n}` are numbers, `{part}` is weight or bias, `{name}` has no
dot, `{rest}` matches any text.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

# The transform of norm weights and biases: weights may be stored minus one.
LAYER_NORM = "layer_norm"
# The transform of tensors that keep their dtype if the narrower dtype of the others would round them.
WIDE = "wide"
Reshape = Callable[[torch.Tensor], torch.Tensor]  # changes the shape of a tensor of the file to the model's
_FIELDS = {"layer": r"\d+", "n": r"\d+", "part": r"weight|bias", "rest": r".+", "name": r"[^.]+"}


@dataclass(frozen=True)
class Row:
    """One row of a key map.

    Args:
        source: Pattern of names in the original.
        target: Pattern of names in the model; None if the tensor is dropped.
        transform: Kind of the tensor, or change of its shape.
        reason: Reason why the tensor is dropped.
        copy_of: Name in the original of the tensor to which this one is tied; the model has only that tensor.
        except_name: Value of `{name}` that the row does not match.
    """

    source: str
    target: str | None
    transform: str | Reshape | None = None
    reason: str | None = None
    copy_of: str | None = None
    except_name: str | None = None


def rows(source: str, target: str, names: Iterable[str] | dict[str, str], transform: str | None = None) -> list[Row]:
    """Return the rows of modules with weight and bias; `names` are names in the original -> in the model, or both."""
    pairs = names if isinstance(names, dict) else {name: name for name in names}
    return [Row(f"{source}.{a}.{{part}}", f"{target}.{b}.{{part}}", transform) for a, b in pairs.items()]


class Match(NamedTuple):
    """Row that matches a name, the name on the other side, and the reason of a dropped tensor."""

    row: Row
    key: str | None
    reason: str | None


class KeyMap:
    """Ordered rows; the first row that matches a name is used."""

    def __init__(self, rows: list[Row]):
        self.rows = tuple(rows)

    def forward(self, key: str) -> Match | None:
        """Return the match of a name of the original; None if no row matches."""
        return self._match(key, "source", "target")

    def backward(self, key: str) -> Match | None:
        """Return the match of a name in the model; None if no row matches."""
        return self._match(key, "target", "source")

    def _match(self, key: str, from_side: str, to_side: str) -> Match | None:
        for row in self.rows:
            pattern, other = getattr(row, from_side), getattr(row, to_side)
            if pattern is not None and (match := _compile(pattern).fullmatch(key)):
                found = match.groupdict()
                if row.except_name is None or found["name"] != row.except_name:
                    return Match(row, *(text and text.format(**found) for text in (other, row.reason)))
        return None


@cache
def _compile(pattern: str) -> re.Pattern:
    literals, fields = (re.split(r"\{(\w+)\}", pattern)[start::2] for start in (0, 1))
    groups = [*(f"(?P<{name}>{_FIELDS[name]})" for name in fields), ""]
    return re.compile("".join(re.escape(text) + group for text, group in zip(literals, groups, strict=True)))
