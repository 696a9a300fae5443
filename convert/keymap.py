"""Key maps: ordered rows of patterns of names, read in either direction.

A pattern is a tensor name with fields: `{layer}` and `{n}` are numbers, `{part}` is weight or bias, `{name}`
has no dot, `{rest}` is anything.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch

# The transform of norm weights and biases: weights may be stored minus one.
LAYER_NORM = "layer_norm"
# The transform of tensors that keep their dtype if the narrower dtype of the others would round them.
WIDE = "wide"
_FIELDS = {"layer": r"\d+", "n": r"\d+", "part": r"weight|bias", "rest": r".+", "name": r"[^.]+"}


@dataclass(frozen=True)
class Reshape:
    """A transform of shapes: `there` returns the tensor of the model, `back` that of the file."""

    there: Callable[[torch.Tensor], torch.Tensor]
    back: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One row of a key map.

    Args:
        source (`str`): pattern of names in the original.
        target (`str`, *optional*): pattern of names in the model; None if the tensor is dropped.
        transform (`str` or `Reshape`, *optional*): the kind of the tensor, or the change of its shape.
        reason (`str`, *optional*): why the tensor is dropped.
        fill (`Callable`, *optional*): returns the tensor that an export writes if the model lacks it; its argument is
            the dtype of the other tensors.
        copy_of (`str`, *optional*): name in the original of the tensor to which this one is tied. A file has both, the
            model only the other one.
        note (`str`, *optional*): note of an export that writes `fill`.
        except_name (`str`, *optional*): value of `{name}` that the row does not fit.
    """

    source: str
    target: str | None
    transform: str | Reshape | None = None
    reason: str | None = None
    fill: Callable[[torch.dtype], torch.Tensor] | None = None
    copy_of: str | None = None
    note: str | None = None
    except_name: str | None = None

    def names(self, others: Iterable[str]) -> list[str]:
        """Return the names of a row whose only field is `{layer}`, for the layers of the other names."""
        before, field, after = self.source.partition("{layer}")
        if not field:
            return [self.source]
        found = (re.match(rf"{re.escape(before)}(\d+)\.", name) for name in others)
        return [f"{before}{index}{after}" for index in sorted({int(match[1]) for match in found if match})]


@dataclass(frozen=True)
class Match:
    """A row that fits a name, the name on the other side, and the reason of a dropped tensor."""

    row: Row
    key: str | None
    reason: str | None = None


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
                found = match.groupdict()
                if row.except_name is None or found["name"] != row.except_name:
                    if other is None:
                        return Match(row, None, row.reason.format(**found))
                    return Match(row, other.format(**found))
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
