"""Reads fairseq's dictionaries (dict.txt)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from luna_mega.errors import ConversionError

VOCABULARY_FILE, LABELS_FILE, TARGET_FILE = "dict.txt", "dict.label.txt", "dict.target.txt"
PIECES_FILE = "tokenizer.model"
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
FILLER = re.compile(r"madeupword\d{4}")


@dataclass(frozen=True)
class Dictionary:
    """Content of a dict.txt: `symbols[i]` has id 4 + i, after four special symbols that are not in the file."""

    path: Path
    symbols: tuple[str, ...]

    def size(self, appended: str | None) -> int:
        """Return the number of ids in the model: specials, symbols, and `appended` if it is not one of them."""
        return len(SPECIALS) + len(self.symbols) + (appended is not None and appended not in self.symbols)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes: the symbols without the fillers, which round the number of lines up to 8."""
        return tuple(symbol for symbol in self.symbols if not FILLER.fullmatch(symbol))


def read_text(path: Path, missing: str = "no such file", undecodable: str = "not UTF-8 text") -> str:
    """Return the text of a UTF-8 file without a byte order mark.

    Args:
        path (`Path`): the file.
        missing (`str`): message of the error if the file does not exist.
        undecodable (`str`): message of the error if the file is not UTF-8.

    Raises:
        ConversionError: If the file does not exist or is not UTF-8.
    """
    if not path.is_file():
        raise ConversionError(f"{path}: {missing}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path}: {undecodable} ({error.reason} at byte {error.start})") from error


def read_dictionary(path: str | Path) -> Dictionary:
    """Read lines `symbol count`, split at the last space; fairseq's `#fairseq:overwrite` can follow.

    Raises:
        ConversionError: the file does not exist, or a line has another form; the message names the line.
    """
    path = Path(path)
    lines = read_text(path, "no such dictionary file").split("\n")
    symbols: list[str] = []
    seen = set(SPECIALS)
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        overwrite = count == "#fairseq:overwrite"
        if overwrite:
            symbol, _, count = symbol.rpartition(" ")
        if not symbol or not re.fullmatch(r"-?\d+", count):
            raise ConversionError(f"{path}: line {number} is not '<symbol> <count>': {line[:40]!r}")
        if symbol in seen and not overwrite:
            raise ConversionError(
                f"{path}: line {number} repeats {symbol!r}; remove it, or end the line with #fairseq:overwrite"
            )
        seen.add(symbol)
        symbols.append(symbol)
    return Dictionary(path, tuple(symbols))


def vocabulary(names: Iterable[str], appended: str | None) -> dict[str, int]:
    """Return the ids of the specials, of the lines of a dictionary, called `names`, and of the appended symbol.

    A name that comes twice (`#fairseq:overwrite`) belongs to the later line; the earlier id gets a name that occurs in
    no text. The specials keep their names.
    """
    ids = {special: index for index, special in enumerate(SPECIALS)}
    for index, name in enumerate(names, start=len(SPECIALS)):
        if name in SPECIALS:
            name = f"{name} (id {index})"
        elif name in ids:
            ids[f"{name} (id {ids[name]})"] = ids[name]
        ids[name] = index
    if appended is not None:
        ids.setdefault(appended, len(ids))
    return ids


@dataclass
class Dictionaries:
    """Dictionaries of one model, with notes and warnings for the user; only an encoder-decoder has a `target`.

    `pieces` is a SentencePiece model, which contains a complete tokenizer.
    """

    vocabulary: Dictionary | None
    labels: Dictionary | None
    notes: list[str]
    warnings: list[str]
    target: Dictionary | None = None
    class_names: tuple[str, ...] | None = None
    pieces: Path | None = None

    @property
    def files(self) -> dict[str, Path]:
        """Return the dictionaries under their names in a converted folder."""
        names = {VOCABULARY_FILE: self.vocabulary, LABELS_FILE: self.labels}
        if self.target is not self.vocabulary:
            names[TARGET_FILE] = self.target
        return {name: dictionary.path for name, dictionary in names.items() if dictionary is not None}
