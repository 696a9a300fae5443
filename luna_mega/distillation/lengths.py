"""Lengths of a converted encoder: the rows of its layers, its longest text, and the quality for longer texts."""

from dataclasses import dataclass
from typing import Any

from luna_mega.distillation.families import find_head
from luna_mega.distillation.teachers import Teacher

ROWS = 128
TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")
_EXTENSIONS = ("interpolate", "wrap")
_BEYOND = (
    "note: texts of more than {table:,} tokens have squeezed positions and are worth less than windows of the teacher: "
    "at 2,048 tokens, vectors found 84.4 % of the articles, the mean of windows 90.6 %, and one vector per window "
    "92.4 % (docs/distillation.md)"
)
_PACKED = (
    "note: the head reads tokens, which differ from the teacher's beyond {rows:,} tokens: a token classifier with 128 "
    "rows lost half of its labels at 512 tokens (docs/distillation.md)"
)


@dataclass(frozen=True)
class Lengths:
    """Lengths of a converted encoder.

    Args:
        projection_length: number of rows l that a layer packs a text into.
        max_length: longest text in tokens.
        table: number of positions of the teacher.
        position_extension: positions beyond the table; None = the longest text fits in it.
        note: one line about longer texts than those that equal the teacher's; empty for the default lengths.
    """

    projection_length: int
    max_length: int
    table: int
    position_extension: str | None = None
    note: str = ""

    @property
    def exact(self) -> int:
        """The length of the longest text for which the student equals the teacher."""
        return min(self.projection_length, self.max_length, self.table)

    def fields(self) -> dict[str, Any]:
        """Return the fields of `LunaConfig`."""
        return {
            "projection_length": self.projection_length,
            "max_position_embeddings": self.max_length,
            "position_table_size": None if self.max_length == self.table else self.table,
            "position_extension": self.position_extension,
        }


def choose_lengths(
    teacher: Teacher, projection_length: int | None, max_length: int | None, position_extension: str | None
) -> Lengths:
    """Return the lengths of a student.

    The longest text is by default the one that fits in the teacher's table of positions. The number of rows is by
    default 128, or the longest text for a head that reads tokens, which then equals the teacher's.

    Args:
        teacher: the teacher.
        projection_length: number of rows; None = the default.
        max_length: longest text in tokens; None = the default.
        position_extension: positions of texts beyond the teacher's table; None = such texts are an error.

    Raises:
        ValueError: An option is out of range, or the longest text exceeds the table and the head or
            `position_extension` does not support it.
    """
    for name, value in (("projection_length", projection_length), ("max_length", max_length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if position_extension not in (None, *_EXTENSIONS):
        raise ValueError(
            f"position_extension must be one of None, {', '.join(_EXTENSIONS)}, got {position_extension!r}"
        )
    head, table = find_head(teacher.model), len(teacher.positions())
    longest = table if max_length is None else max_length
    reads_tokens = head in TOKEN_HEADS
    rows = projection_length or (longest if reads_tokens else ROWS)
    if longest <= table:
        note = _PACKED.format(rows=rows) if reads_tokens and rows < longest else ""
        return Lengths(rows, longest, table, note=note)
    if head == "ForTokenClassification":
        raise ValueError(
            f"max_length={longest} exceeds the {table} positions of the teacher, beyond which a converted token "
            "classifier finds no labels; use windows of the teacher: pipeline('token-classification', TEACHER, "
            f"aggregation_strategy='simple', stride={table // 4})"
        )
    if position_extension is None:
        raise ValueError(
            f"max_length={longest} exceeds the {table} positions of the teacher; pass max_length={table}, or "
            "position_extension='interpolate'"
        )
    return Lengths(rows, longest, table, position_extension, _BEYOND.format(table=table))
