"""Dictionaries of fairseq (dict.txt) and other files of vocabularies and labels.

A `DictionaryKind` describes the files of a model: a vocabulary with labels, two languages, class names, or a
SentencePiece model.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from luna_mega.errors import ConversionError

PIECES_FILE = "tokenizer.model"
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
FILLER = re.compile(r"madeupword\d{4}")
_VOCABULARY_PLACES = ("dict.txt", "src-bin/dict.txt", "input0/dict.txt")
_LABEL_PLACES = ("label-bin/dict.txt", "label/dict.txt")
_ROLES = ("source", "target")


@dataclass(frozen=True)
class Dictionary:
    """Content of a dict.txt: `symbols[i]` has id 4 + i, after four special symbols that the file does not contain."""

    path: Path
    symbols: tuple[str, ...]

    def size(self, appended: str | None) -> int:
        """Return the number of ids in the model: specials, symbols, and `appended` if it is not one of them."""
        return len(SPECIALS) + len(self.symbols) + (appended is not None and appended not in self.symbols)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes: the symbols without the fillers that fairseq adds for a multiple of 8."""
        return tuple(symbol for symbol in self.symbols if not FILLER.fullmatch(symbol))


def read_text(path: Path, missing: str = "no such file", undecodable: str = "not UTF-8 text") -> str:
    """Return the text of a UTF-8 file without a byte order mark; `missing` and `undecodable` are error messages."""
    if not path.is_file():
        raise ConversionError(f"{path}: {missing}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path}: {undecodable} ({error.reason} at byte {error.start})") from error


def read_dictionary(path: str | Path) -> Dictionary:
    """Read lines `symbol count`, split at the last space; fairseq's `#fairseq:overwrite` can follow."""
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
    """Return the ids of the special symbols, of `names`, one for each line of a dictionary, and of the appended symbol.

    A repeated name (`#fairseq:overwrite`) belongs to the later line; the earlier id gets a name that occurs in no text.
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
    """Dictionaries of a model, for an encoder-decoder of the source (`vocabulary`) and the target."""

    vocabulary: Dictionary | None = None
    target: Dictionary | None = None
    labels: Dictionary | None = None
    class_names: tuple[str, ...] = ()
    pieces: Path | None = None  # SentencePiece model
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def has_vocabulary(self, bpe: str | Path | None) -> bool:
        """Return whether there is a vocabulary; raise an error if `--bpe` is given without one."""
        if self.vocabulary is None and bpe is not None:
            raise ConversionError(f"--bpe {bpe}: there is no dictionary next to the checkpoint; pass it with --dict")
        return self.vocabulary is not None

    @property
    def files(self) -> dict[str, Path]:
        """Return name in a converted folder -> file of a dictionary."""
        names = {"dict.txt": self.vocabulary, "dict.label.txt": self.labels}
        if self.target is not self.vocabulary:
            names["dict.target.txt"] = self.target
        return {name: dictionary.path for name, dictionary in names.items() if dictionary is not None}


class DictionaryKind(ABC):
    """The dictionaries that a model can have."""

    @abstractmethod
    def find(self, given: list[str | Path], folder: Path) -> Dictionaries:
        """Return the dictionaries of the model among the files `given` or, if there are none, in `folder`."""


@dataclass(frozen=True)
class VocabularyAndLabels(DictionaryKind):
    """A vocabulary, and labels for the classes.

    Args:
        vocab_size: Rows of the embedding; None for a model without a vocabulary.
        appended: Symbol that fairseq appends to the vocabulary.
        num_labels: Number of classes; None for a model without classes.
    """

    vocab_size: int | None
    appended: str | None
    num_labels: int | None

    def find(self, given: list[str | Path], folder: Path) -> Dictionaries:
        dictionaries = Dictionaries()
        for path in given or self._search(folder):
            dictionary = read_dictionary(path)
            if self.vocab_size is not None and dictionary.size(self.appended) == self.vocab_size:
                role = "vocabulary"
            elif self.num_labels is not None and len(dictionary.labels) == self.num_labels:
                role = "labels"
            elif dictionary.path.parent.name in ("label-bin", "label"):
                # fairseq reads the number of classes from its args and does not compare it with the labels.
                name = f"{dictionary.path.parent.name}/{dictionary.path.name}"
                counts = f"{len(dictionary.labels)} labels for {self.num_labels or 'no'} classes"
                dictionaries.warnings.append(f"{name}: {counts}: not used, classes keep their numbers")
                continue
            else:
                raise ConversionError(self._no_fit(dictionary))
            other = getattr(dictionaries, role)
            if other is not None and other.symbols != dictionary.symbols:
                raise ConversionError(f"{path}: fits as {role}, and so does {other.path}; pass one of them")
            setattr(dictionaries, role, other or dictionary)
        if dictionaries.labels is not None:
            dictionaries.class_names = dictionaries.labels.labels
        if self.vocab_size is not None and dictionaries.vocabulary is None:
            note = "no dictionary: the folder has no dict.txt, and a tokenizer needs one; --dict adds it"
            dictionaries.notes.append(note)
        return dictionaries

    def _search(self, folder: Path) -> list[Path]:
        """Return at most one file for each role, from the first location that has one."""
        places = [_VOCABULARY_PLACES] * (self.vocab_size is not None) + [_LABEL_PLACES] * (self.num_labels is not None)
        return [path for names in places for path in _inside(folder, *names)[:1]]

    def _no_fit(self, dictionary: Dictionary) -> str:
        symbols, expected = len(dictionary.symbols), []
        if self.vocab_size is not None:
            parts = [f"{len(SPECIALS)} specials", f"{symbols} symbols", *filter(None, [self.appended])]
            expected.append(f"{self.vocab_size} embeddings ({' + '.join(parts)} = {dictionary.size(self.appended)})")
        if self.num_labels is not None:
            expected.append(f"{self.num_labels} classes ({len(dictionary.labels)} labels)")
        model = " or ".join(expected) or "no vocabulary and no classes"
        return (
            f"{dictionary.path}: {symbols} symbols do not fit the model, which has {model}; pass the dictionary it was "
            "trained with (--dict)"
        )


@dataclass(frozen=True)
class LanguagePair(DictionaryKind):
    """The dictionaries of a source and a target language."""

    languages: tuple[str, str]
    sizes: tuple[int, int]  # rows of the embeddings
    joint: bool  # both languages share one embedding, and therefore one dictionary

    @property
    def names(self) -> list[str]:
        """Return the names of the two files in the original."""
        return [f"dict.{language}.txt" for language in self.languages]

    def find(self, given: list[str | Path], folder: Path) -> Dictionaries:
        # If both files fit both roles, the first one belongs to the source.
        names, by_role = self.names, {}
        for path in list(map(Path, given)) or _inside(folder, *dict.fromkeys(names)):
            dictionary = read_dictionary(path)
            fitting = self._roles(dictionary)
            free = [role for role in fitting if role not in by_role]
            if not free:
                other = by_role[fitting[-1]].path
                raise ConversionError(f"{path}: fits as {fitting[-1]}, and so does {other}; pass one of them")
            by_role[free[0]] = dictionary
        if by_role and self.joint:
            first, *others = by_role.values()
            if any(other.symbols != first.symbols for other in others):
                raise ConversionError(f"{others[0].path}: differs from {first.path}, but the model has one embedding")
            by_role = dict.fromkeys(_ROLES, first)
        if not by_role:
            note = f"no dictionary: there is no {' or '.join(names)}, which the tokenizers need; --dict adds it"
            return Dictionaries(notes=[note])
        if missing := [name for role, name in zip(_ROLES, names, strict=True) if role not in by_role]:
            raise ConversionError(
                f"{next(iter(by_role.values())).path}: the dictionary of the other language, {missing[0]}, is missing; "
                "pass both with --dict"
            )
        return Dictionaries(by_role["source"], by_role["target"])

    def _roles(self, dictionary: Dictionary) -> list[str]:
        """Return the roles whose embedding has the size of the dictionary and which its file name does not exclude."""
        names = self.names
        fitting = [role for role, size in zip(_ROLES, self.sizes, strict=True) if dictionary.size(None) == size]
        if dictionary.path.name in names and names[0] != names[1]:
            fitting = [role for role in fitting if role == _ROLES[names.index(dictionary.path.name)]]
        if not fitting:
            sizes = zip(_ROLES, self.sizes, strict=True)
            rows = " and ".join(f"{size} embeddings of the {role}" for role, size in sizes)
            raise ConversionError(
                f"{dictionary.path}: {len(dictionary.symbols)} symbols and {len(SPECIALS)} specials do not fit the "
                f"{rows}, which are in {' and '.join(names)}; pass the dictionaries it was trained with (--dict)"
            )
        return fitting


@dataclass(frozen=True)
class ClassNames(DictionaryKind):
    """A file with the names of the classes, one per line, for a model without a vocabulary."""

    num_labels: int

    def find(self, given: list[str | Path], folder: Path) -> Dictionaries:
        if not given:
            return Dictionaries(notes=["classes have numbers; --dict FILE specifies their names, one per line"])
        if len(given) > 1:
            raise ConversionError(f"{given[1]}: the names of the classes are in one file; pass one --dict")
        path = Path(given[0])
        names = tuple(line.strip() for line in read_text(path).removesuffix("\n").split("\n"))
        if len(names) != self.num_labels:
            raise ConversionError(f"{path}: {len(names)} lines for {self.num_labels} classes; write one name per line")
        if not all(names):
            raise ConversionError(f"{path}: line {names.index('') + 1} is empty; write one name per line")
        return Dictionaries(class_names=names)


@dataclass(frozen=True)
class PieceFile(DictionaryKind):
    """A SentencePiece model.

    Args:
        named: Path in the checkpoint, of which only the name of the file is used.
    """

    named: str | None

    def find(self, given: list[str | Path], folder: Path) -> Dictionaries:
        if given:
            raise ConversionError(
                f"--dict {given[0]}: the original has no dictionary; pass the SentencePiece model with --bpe"
            )
        names = [PIECES_FILE, *([Path(self.named).name] if self.named else [])]
        return Dictionaries(pieces=next(iter(_inside(folder, *names)), None))


def _inside(folder: Path, *names: str) -> list[Path]:
    return [path for name in names if (path := folder / name).is_file()]
