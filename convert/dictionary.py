"""Reads fairseq's dictionaries (dict.txt) and finds out which file belongs to which part of a model."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from luna_mega.errors import ConversionError

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
VOCABULARY_PLACES = ("dict.txt", "src-bin/dict.txt", "input0/dict.txt")
LABEL_PLACES = ("label-bin/dict.txt", "label/dict.txt")
_ROLES = ("source", "target")
FILLER = re.compile(r"madeupword\d{4}")


@dataclass(frozen=True)
class Dictionary:
    """Content of a dict.txt: `symbols[i]` has id 4 + i, behind four specials that are not in the file."""

    path: Path
    symbols: tuple[str, ...]

    def size(self, appended: str | None) -> int:
        """Return the number of ids in the model: specials, symbols, and `appended` where it is not one of them."""
        return len(SPECIALS) + len(self.symbols) + (appended is not None and appended not in self.symbols)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes: the symbols without the fillers, which round the number of lines up to 8."""
        return tuple(symbol for symbol in self.symbols if not FILLER.fullmatch(symbol))


def read_text(path: Path, missing: str = "no such file", undecodable: str = "not UTF-8 text") -> str:
    """Return the text of a file; `missing` and `undecodable` are the words of the error in either case.

    Raises:
        ConversionError: the file does not exist, or is not UTF-8.
    """
    if not path.is_file():
        raise ConversionError(f"{path}: {missing}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path}: {undecodable} ({error.reason} at byte {error.start})") from error


def read_dictionary(path: str | Path) -> Dictionary:
    """Read lines `symbol count`, split at the last space, where fairseq's `#fairseq:overwrite` may follow.

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
    """Dictionaries of one model, with notes and warnings for the user; only an encoder-decoder has a `target`."""

    vocabulary: Dictionary | None
    labels: Dictionary | None
    notes: list[str]
    warnings: list[str]
    target: Dictionary | None = None
    class_names: tuple[str, ...] | None = None


def read_class_names(given: list[str | Path], num_labels: int) -> Dictionaries:
    """Read the names of the classes of pictures, one a line in the order of the classes; none is looked for.

    Raises:
        ConversionError: more than one file, an empty name, or another number of names than classes.
    """
    if not given:
        return Dictionaries(None, None, ["classes have numbers; --dict FILE gives them names, one a line"], [])
    if len(given) > 1:
        raise ConversionError(f"{given[1]}: the names of the classes are in one file; give one --dict")
    path = Path(given[0])
    names = tuple(line.strip() for line in read_text(path).removesuffix("\n").split("\n"))
    if len(names) != num_labels:
        raise ConversionError(f"{path}: {len(names)} lines for {num_labels} classes; give one name a line")
    if not all(names):
        raise ConversionError(f"{path}: line {names.index('') + 1} is empty; give one name a line")
    return Dictionaries(None, None, [], [], class_names=names)


def assign_dictionaries(
    given: list[str | Path], beside: Path, vocab_size: int | None, appended: str | None, num_labels: int | None
) -> Dictionaries:
    """Find the vocabulary and the label dictionary among `given` or, when none is given, in the folder `beside`.

    Args:
        vocab_size: rows of the embedding; None = the model has no vocabulary.
        appended: the symbol that fairseq appends to the vocabulary; None = none.
        num_labels: classes; None = the model has none.

    Raises:
        ConversionError: a file fits neither role, or two different files fit the same one.
    """
    found = Dictionaries(None, None, [], [])
    paths = given or _beside(beside, vocab_size is not None, num_labels is not None)
    for path in paths:
        dictionary = read_dictionary(path)
        if vocab_size is not None and dictionary.size(appended) == vocab_size:
            role = "vocabulary"
        elif num_labels is not None and len(dictionary.labels) == num_labels:
            role = "labels"
        elif dictionary.path.parent.name in ("label-bin", "label"):
            # fairseq takes the number of classes from its args and never compares it with the labels.
            found.warnings.append(
                f"{dictionary.path.parent.name}/{dictionary.path.name}: {len(dictionary.labels)} labels for "
                f"{num_labels or 'no'} classes: not used, classes keep their numbers"
            )
            continue
        else:
            raise ConversionError(_no_fit(dictionary, vocab_size, appended, num_labels))
        other = getattr(found, role)
        if other is not None and other.symbols != dictionary.symbols:
            raise ConversionError(f"{path}: fits as {role}, and so does {other.path}; give one of them")
        setattr(found, role, other or dictionary)
    if vocab_size is not None and found.vocabulary is None:
        found.notes.append("no dictionary: the folder has no dict.txt, and a tokenizer needs one; --dict adds it")
    return found


def assign_pair(
    given: list[str | Path], beside: Path, languages: tuple[str, str], sizes: tuple[int, int], joint: bool
) -> Dictionaries:
    """Find source and target dictionary among `given` or, when none is given, as dict.LANGUAGE.txt in `beside`.

    The name or the size of a file tells its role. If both files fit both roles, the first one is the source's.

    Args:
        languages: names of the source and the target language.
        sizes: rows of their embeddings.
        joint: whether both languages share one embedding, so that one file serves both.

    Raises:
        ConversionError: a file fits no role, two files fit the same role, one is missing, or the files of a shared
            embedding differ.
    """
    names = [f"dict.{language}.txt" for language in languages]
    paths = list(map(Path, given)) or [path for name in dict.fromkeys(names) if (path := beside / name).is_file()]
    found: dict[str, Dictionary] = {}
    for path in paths:
        dictionary = read_dictionary(path)
        fitting = [role for role, size in zip(_ROLES, sizes, strict=True) if dictionary.size(None) == size]
        if path.name in names and names[0] != names[1]:
            fitting = [role for role in fitting if role == _ROLES[names.index(path.name)]]
        free = [role for role in fitting if role not in found]
        if not fitting:
            rows = " and ".join(f"{size} embeddings of the {role}" for role, size in zip(_ROLES, sizes, strict=True))
            raise ConversionError(
                f"{path}: {len(dictionary.symbols)} symbols and {len(SPECIALS)} specials do not fit the {rows}, which "
                f"are in {' and '.join(names)}; give the dictionaries it was trained with (--dict)"
            )
        if not free:
            raise ConversionError(
                f"{path}: fits as {fitting[-1]}, and so does {found[fitting[-1]].path}; give one of them"
            )
        found[free[0]] = dictionary
    if found and joint:
        first, *others = found.values()
        if any(other.symbols != first.symbols for other in others):
            raise ConversionError(f"{others[0].path}: differs from {first.path}, but the model has one embedding")
        found = dict.fromkeys(_ROLES, first)
    notes = []
    if not found:
        notes.append(f"no dictionary: there is no {' or '.join(names)}, which the tokenizers need; --dict adds it")
    elif missing := [name for role, name in zip(_ROLES, names, strict=True) if role not in found]:
        raise ConversionError(
            f"{next(iter(found.values())).path}: the dictionary of the other language, {missing[0]}, is missing; give "
            "both with --dict"
        )
    return Dictionaries(found.get("source"), None, notes, [], found.get("target"))


def _beside(folder: Path, vocabulary: bool, labels: bool) -> list[Path]:
    """Return at most one file for each role: the first place that has one wins."""
    places = [VOCABULARY_PLACES] * vocabulary + [LABEL_PLACES] * labels
    return [found for names in places if (found := next((p for n in names if (p := folder / n).is_file()), None))]


def _no_fit(dictionary: Dictionary, vocab_size: int | None, appended: str | None, num_labels: int | None) -> str:
    symbols, wanted = len(dictionary.symbols), []
    if vocab_size is not None:
        parts = [f"{len(SPECIALS)} specials", f"{symbols} symbols", *([] if appended is None else [appended])]
        wanted.append(f"{vocab_size} embeddings ({' + '.join(parts)} = {dictionary.size(appended)})")
    if num_labels is not None:
        wanted.append(f"{num_labels} classes ({len(dictionary.labels)} labels)")
    model = " or ".join(wanted) or "no vocabulary and no classes"
    return (
        f"{dictionary.path}: {symbols} symbols do not fit the model, which has {model}; give the dictionary it was "
        "trained with (--dict)"
    )
