"""Kinds of dictionaries: the files that belong to a model, and their places in an export.

`Format.companions` returns the kind of a model: a vocabulary with labels, two languages, names of classes, or a
SentencePiece model.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from luna_mega.convert.dictionary import (
    LABELS_FILE,
    PIECES_FILE,
    SPECIALS,
    TARGET_FILE,
    VOCABULARY_FILE,
    Dictionaries,
    Dictionary,
    read_dictionary,
    read_text,
)
from luna_mega.errors import ConversionError, shown

_VOCABULARY_PLACES = ("dict.txt", "src-bin/dict.txt", "input0/dict.txt")
_LABEL_PLACES = ("label-bin/dict.txt", "label/dict.txt")
_ROLES = ("source", "target")

Files = dict[str, bytes]


class DictionaryKind(ABC):
    """The dictionaries that a model can have."""

    @abstractmethod
    def find(self, given: list[str | Path], beside: Path) -> Dictionaries:
        """Return the dictionaries of the model among the files `given` or, when none is given, in the folder `beside`.

        Raises:
            ConversionError: a file does not fit the model, or one of two is missing.
        """

    @abstractmethod
    def export(self, given: list[str | Path], folder: Path, class_names: dict[int, str]) -> tuple[Files, list[str]]:
        """Return the files that the original reads next to its checkpoint, and notes on missing ones.

        Args:
            given: dictionaries that the user names; when there are none, the files of the converted folder are taken.
            folder: the converted folder.
            class_names: the names of the classes, `id2label` of the configuration.

        Raises:
            ConversionError: a file does not fit the model, or a name cannot stand in a dictionary.
        """


@dataclass(frozen=True)
class VocabularyAndLabels(DictionaryKind):
    """A vocabulary, and labels for the classes; a model may have one, both or neither.

    Args:
        vocab_size: rows of the embedding; None = the model has no vocabulary.
        appended: the symbol that fairseq appends to the vocabulary; None = none.
        num_labels: classes; None = the model has none.
        vocabulary_place, label_place: where the task of the original looks for the two files.
        labeled: whether an export makes a dictionary of labels out of the names of the classes.
    """

    vocab_size: int | None
    appended: str | None
    num_labels: int | None
    vocabulary_place: str = _VOCABULARY_PLACES[0]
    label_place: str = _LABEL_PLACES[0]
    labeled: bool = True

    def find(self, given: list[str | Path], beside: Path) -> Dictionaries:
        """Return vocabulary and labels, which are identified by their sizes."""
        dictionaries = Dictionaries(None, None, [], [])
        for path in given or self._beside(beside):
            dictionary = read_dictionary(path)
            if self.vocab_size is not None and dictionary.size(self.appended) == self.vocab_size:
                role = "vocabulary"
            elif self.num_labels is not None and len(dictionary.labels) == self.num_labels:
                role = "labels"
            elif dictionary.path.parent.name in ("label-bin", "label"):
                # fairseq takes the number of classes from its args and never compares it with the labels.
                dictionaries.warnings.append(
                    f"{dictionary.path.parent.name}/{dictionary.path.name}: {len(dictionary.labels)} labels for "
                    f"{self.num_labels or 'no'} classes: not used, classes keep their numbers"
                )
                continue
            else:
                raise ConversionError(self._no_fit(dictionary))
            other = getattr(dictionaries, role)
            if other is not None and other.symbols != dictionary.symbols:
                raise ConversionError(f"{path}: fits as {role}, and so does {other.path}; give one of them")
            setattr(dictionaries, role, other or dictionary)
        if self.vocab_size is not None and dictionaries.vocabulary is None:
            dictionaries.notes.append(
                "no dictionary: the folder has no dict.txt, and a tokenizer needs one; --dict adds it"
            )
        return dictionaries

    def export(self, given: list[str | Path], folder: Path, class_names: dict[int, str]) -> tuple[Files, list[str]]:
        """Return the vocabulary, and the labels or a dictionary made of the names of the classes."""
        dictionaries = self.find(given or _inside(folder, VOCABULARY_FILE, LABELS_FILE), folder)
        files, notes = {}, list(dictionaries.warnings)
        if dictionaries.vocabulary is not None:
            places = {VOCABULARY_FILE, self.vocabulary_place}
            files |= dict.fromkeys(places, dictionaries.vocabulary.path.read_bytes())
        elif self.vocab_size is not None:
            notes.append("no dict.txt in the folder, which fairseq needs beside the file; --dict adds it")
        if dictionaries.labels is not None:
            files[self.label_place] = dictionaries.labels.path.read_bytes()
        elif self.vocab_size is not None and self.num_labels and self.labeled:
            files[self.label_place] = _label_dictionary([class_names[index] for index in range(self.num_labels)])
        return files, notes

    def _beside(self, folder: Path) -> list[Path]:
        """Return at most one file for each role: the first place that has one wins."""
        places = [_VOCABULARY_PLACES] * (self.vocab_size is not None) + [_LABEL_PLACES] * (self.num_labels is not None)
        return [path for names in places for path in _inside(folder, *names)[:1]]

    def _no_fit(self, dictionary: Dictionary) -> str:
        symbols, wanted = len(dictionary.symbols), []
        if self.vocab_size is not None:
            parts = [f"{len(SPECIALS)} specials", f"{symbols} symbols", *filter(None, [self.appended])]
            wanted.append(f"{self.vocab_size} embeddings ({' + '.join(parts)} = {dictionary.size(self.appended)})")
        if self.num_labels is not None:
            wanted.append(f"{self.num_labels} classes ({len(dictionary.labels)} labels)")
        model = " or ".join(wanted) or "no vocabulary and no classes"
        return (
            f"{dictionary.path}: {symbols} symbols do not fit the model, which has {model}; give the dictionary it was "
            "trained with (--dict)"
        )


@dataclass(frozen=True)
class LanguagePair(DictionaryKind):
    """The dictionaries of a source and a target language.

    Args:
        languages: names of the source and the target language.
        sizes: rows of their embeddings.
        joint: whether both languages share one embedding, so that one file serves both.
    """

    languages: tuple[str, str]
    sizes: tuple[int, int]
    joint: bool

    @property
    def names(self) -> list[str]:
        """Return the names of the files in the original, source first."""
        return [f"dict.{language}.txt" for language in self.languages]

    def find(self, given: list[str | Path], beside: Path) -> Dictionaries:
        """Return both dictionaries; the name or the size of a file determines its role.

        If both files fit both roles, the first one is the source's.
        """
        names, by_role = self.names, {}
        for path in list(map(Path, given)) or _inside(beside, *dict.fromkeys(names)):
            dictionary = read_dictionary(path)
            fitting = self._roles(dictionary)
            free = [role for role in fitting if role not in by_role]
            if not free:
                other = by_role[fitting[-1]].path
                raise ConversionError(f"{path}: fits as {fitting[-1]}, and so does {other}; give one of them")
            by_role[free[0]] = dictionary
        if by_role and self.joint:
            first, *others = by_role.values()
            if any(other.symbols != first.symbols for other in others):
                raise ConversionError(f"{others[0].path}: differs from {first.path}, but the model has one embedding")
            by_role = dict.fromkeys(_ROLES, first)
        notes = []
        if not by_role:
            notes.append(f"no dictionary: there is no {' or '.join(names)}, which the tokenizers need; --dict adds it")
        elif missing := [name for role, name in zip(_ROLES, names, strict=True) if role not in by_role]:
            raise ConversionError(
                f"{next(iter(by_role.values())).path}: the dictionary of the other language, {missing[0]}, is missing; "
                "give both with --dict"
            )
        return Dictionaries(by_role.get("source"), None, notes, [], by_role.get("target"))

    def export(self, given: list[str | Path], folder: Path, class_names: dict[int, str]) -> tuple[Files, list[str]]:
        """Return the dictionaries of both languages."""
        dictionaries = self.find(given or _inside(folder, VOCABULARY_FILE, TARGET_FILE), folder)
        if dictionaries.vocabulary is None:
            note = "no dict.txt in the folder, but fairseq needs both languages' beside the file; --dict adds them"
            return {}, [note]
        pair = zip(self.names, (dictionaries.vocabulary, dictionaries.target), strict=True)
        return {name: dictionary.path.read_bytes() for name, dictionary in pair}, []

    def _roles(self, dictionary: Dictionary) -> list[str]:
        """Return the roles whose embedding a dictionary fits, except a role that its name excludes."""
        names = self.names
        fitting = [role for role, size in zip(_ROLES, self.sizes, strict=True) if dictionary.size(None) == size]
        if dictionary.path.name in names and names[0] != names[1]:
            fitting = [role for role in fitting if role == _ROLES[names.index(dictionary.path.name)]]
        if not fitting:
            rows = " and ".join(
                f"{size} embeddings of the {role}" for role, size in zip(_ROLES, self.sizes, strict=True)
            )
            raise ConversionError(
                f"{dictionary.path}: {len(dictionary.symbols)} symbols and {len(SPECIALS)} specials do not fit the "
                f"{rows}, which are in {' and '.join(names)}; give the dictionaries it was trained with (--dict)"
            )
        return fitting


@dataclass(frozen=True)
class ClassNames(DictionaryKind):
    """Names of classes, one a line in the order of the classes, for a model without a vocabulary."""

    num_labels: int

    def find(self, given: list[str | Path], beside: Path) -> Dictionaries:
        """Return the names in the given file; no file is searched for."""
        if not given:
            return Dictionaries(None, None, ["classes have numbers; --dict FILE gives them names, one a line"], [])
        if len(given) > 1:
            raise ConversionError(f"{given[1]}: the names of the classes are in one file; give one --dict")
        path = Path(given[0])
        names = tuple(line.strip() for line in read_text(path).removesuffix("\n").split("\n"))
        if len(names) != self.num_labels:
            raise ConversionError(f"{path}: {len(names)} lines for {self.num_labels} classes; give one name a line")
        if not all(names):
            raise ConversionError(f"{path}: line {names.index('') + 1} is empty; give one name a line")
        return Dictionaries(None, None, [], [], class_names=names)

    def export(self, given: list[str | Path], folder: Path, class_names: dict[int, str]) -> tuple[Files, list[str]]:
        """Return no files: the original reads none."""
        if given:
            raise ConversionError(f"--dict {given[0]}: the original code reads no dictionary; leave the option out")
        return {}, []


@dataclass(frozen=True)
class PieceFile(DictionaryKind):
    """A SentencePiece model, which the original reads from a file of any name.

    Args:
        named: the path that the checkpoint has for it, whose folder is of another machine; None = none.
    """

    named: str | None

    def find(self, given: list[str | Path], beside: Path) -> Dictionaries:
        """Return the file in the folder of the checkpoint, under the usual name or the last part of the given path."""
        if given:
            raise ConversionError(
                f"--dict {given[0]}: the original has no dictionary; --bpe gives the SentencePiece model"
            )
        names = [PIECES_FILE, *([Path(self.named).name] if self.named else [])]
        dictionaries = Dictionaries(None, None, [], [], pieces=next(iter(_inside(beside, *names)), None))
        return dictionaries

    def export(self, given: list[str | Path], folder: Path, class_names: dict[int, str]) -> tuple[Files, list[str]]:
        """Return the file that the user names, or the one of the converted folder."""
        if len(given) > 1:
            raise ConversionError(f"--dict {given[1]}: the original reads one SentencePiece model; give one --dict")
        path = Path(given[0]) if given else next(iter(_inside(folder, PIECES_FILE)), None)
        if path is None:
            return {}, [f"no {PIECES_FILE} in the folder, which the original needs beside the weights; --dict adds it"]
        return {PIECES_FILE: path.read_bytes()}, []


def _inside(folder: Path, *names: str) -> list[Path]:
    return [path for name in names if (path := folder / name).is_file()]


def _label_dictionary(names: list[str]) -> bytes:
    for name in names:
        if not re.fullmatch(r"\S+( \S+)*", name) or name in SPECIALS or names.count(name) > 1:
            raise ConversionError(
                f"config.json: id2label has {shown(name)}, which no dictionary can hold; rename the class"
            )
    return "".join(f"{name} 1\n" for name in names).encode()
