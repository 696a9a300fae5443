"""Lengths of a converted encoder: the rows of its layers, its longest text, and the quality for longer texts."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from luna_mega.distillation.teachers import check_teacher

Sizes = tuple[int | None, int | None, str | None]  # `projection_length`, `max_length`, `position_extension` of a call
TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")
_EXTENSIONS = ("interpolate", "wrap")
_BEYOND = (
    "note: texts of more than {table:,} tokens have squeezed positions and are worth less than windows of the teacher: "
    "at 2,048 tokens, vectors found 84.4 % of the articles, one vector per window 92.4 % (docs/distillation.md)"
)
_PACKED = (
    "note: the head reads tokens, which differ from the teacher's beyond {rows:,} tokens: a token classifier with 128 "
    "rows lost half of its labels at 512 tokens (docs/distillation.md)"
)
_TRUNCATED = "note: the model reads {longest:,} tokens of a text, the teacher {table:,}; omit max_length for as many"


@dataclass(frozen=True)
class Lengths:
    """Lengths of a converted encoder."""

    projection_length: int  # number of rows l that a layer packs a text into
    max_length: int  # longest text in tokens
    table: int  # number of positions of the teacher
    position_extension: str | None = None  # positions beyond the table; None = the longest text fits in it
    note: str = ""  # lines about texts that do not equal the teacher's, or are truncated

    @property
    def exact(self) -> int:
        """The length of the longest text for which the student equals the teacher."""
        return min(self.projection_length, self.max_length, self.table)


def choose_lengths(config: PreTrainedConfig, head: str, sizes: Sizes) -> Lengths:
    """Return the lengths of a student.

    The longest text is by default the one that fits in the teacher's table of positions. The number of rows is by
    default 128, or the longest text if that is shorter, or if the head reads tokens, which then equal the teacher's.
    `config` and `head` are those of the teacher.

    Raises:
        ValueError: An option is out of range, or the longest text exceeds the table and the head or
            `position_extension` does not support it.
    """
    projection_length, max_length, position_extension = sizes
    for name, value in (("projection_length", projection_length), ("max_length", max_length)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if position_extension not in (None, *_EXTENSIONS):
        raise ValueError(
            f"position_extension must be one of None, {', '.join(_EXTENSIONS)}, got {position_extension!r}"
        )
    table = config.max_position_embeddings - check_teacher(config).first_position(config)
    longest, reads_tokens = max_length or table, head in TOKEN_HEADS
    if longest > table and head == "ForTokenClassification":
        raise ValueError(
            f"max_length={longest} exceeds the {table} positions of the teacher, beyond which a converted token "
            "classifier finds no labels; use windows of the teacher: pipeline('token-classification', TEACHER, "
            f"aggregation_strategy='simple', stride={table // 4})"
        )
    if longest > table and position_extension is None:
        raise ValueError(
            f"max_length={longest} exceeds the {table} positions of the teacher; pass max_length={table}, or "
            "position_extension='interpolate'"
        )
    rows = projection_length or (longest if reads_tokens else min(128, longest))
    if rows > longest:
        raise ValueError(
            f"projection_length={rows} exceeds the longest text of {longest} tokens; pass at most {longest}, with "
            "which the model equals the teacher for all texts"
        )
    if longest > table:
        return Lengths(rows, longest, table, position_extension, _BEYOND.format(table=table))
    notes = [_PACKED.format(rows=rows)] if reads_tokens and rows < longest else []
    notes += [_TRUNCATED.format(longest=longest, table=table)] if longest < table else []
    return Lengths(rows, longest, table, note="\n".join(notes))
