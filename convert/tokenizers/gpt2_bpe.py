"""Fast tokenizer for fairseq's `--bpe gpt2`: GPT-2's byte-pair encoding followed by the dictionary of the model."""

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, pre_tokenizers
from transformers import RobertaTokenizer, TokenizersBackend

from luna_mega import LunaTokenizer
from luna_mega.convert.dictionaries import FILLER, Dictionary, read_text, vocabulary
from luna_mega.errors import ConversionError
from luna_mega.hub.folder import read_json

_END_OF_TEXT = "<|endoftext|>"
_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


@dataclass(frozen=True)
class Gpt2Bpe:
    """Pieces of GPT-2 in the order of its ids (bytes, merges, end of text) and its merges, in its byte alphabet."""

    pieces: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]


def read_gpt2_bpe(folder: str | Path) -> Gpt2Bpe:
    """Read GPT-2's encoder.json and vocab.bpe, or vocab.json and merges.txt of a GPT-2 or RoBERTa tokenizer.

    The merges determine GPT-2's ids. encoder.json must have the same ids; vocab.json only has to have every piece.
    """
    folder = Path(folder)
    files = next((names for names in _FILES if all((folder / name).is_file() for name in names)), None)
    if files is None:
        pairs = " nor ".join(" and ".join(names) for names in _FILES)
        raise ConversionError(f"--bpe {folder}: has neither {pairs}; pass the folder with GPT-2's files")
    vocabulary_file, merges_file = (folder / name for name in files)
    merges = _read_merges(merges_file)
    pieces = (*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), _END_OF_TEXT)
    saved = read_json(vocabulary_file)
    for number, piece in enumerate(pieces[:-1]):
        if piece not in saved or (files == _FILES[0] and saved[piece] != number):
            raise ConversionError(
                f"{vocabulary_file}: not GPT-2's: {piece!r} has id {saved.get(piece)}, by {merges_file.name} it has "
                f"{number}"
            )
    return Gpt2Bpe(pieces, merges)


def _read_merges(path: Path) -> tuple[tuple[str, str], ...]:
    lines = read_text(path).split("\n")
    if lines[0].startswith("#version"):
        del lines[0]
    merges = tuple(tuple(line.split()) for line in lines if line.strip())
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None or not merges:
        line = "the file is empty" if wrong is None else f"{' '.join(wrong)[:40]!r} is not a pair"
        raise ConversionError(f"{path}: not GPT-2's merges: {line}")
    return merges


def bpe_tokenizer(
    dictionary: Dictionary, bpe: Gpt2Bpe, mask: str, max_length: int
) -> tuple[TokenizersBackend, list[str]]:
    """Return the tokenizer of a dictionary whose symbols are GPT-2's ids, and the pieces that the dictionary lacks.

    It is a `RobertaTokenizer`, or a `LunaTokenizer` if pieces are missing. fairseq appends `mask` to the dictionary.
    """
    vocab = vocabulary(piece_names(dictionary, bpe, mask), mask)
    missing = missing_pieces(bpe, vocab)
    size = len(vocab)
    options = {"mask_token": AddedToken(mask, lstrip=True, special=True), "model_max_length": max_length}
    vocab |= {piece: size + index for index, piece in enumerate(missing)}
    tokenizer = RobertaTokenizer(vocab=vocab, merges=list(bpe.merges), **options)
    if missing:
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        tokenizer = LunaTokenizer(
            tokenizer_object=tokenizer.backend_tokenizer, dictionary_size=size, **(special | options)
        )
    return tokenizer, missing


def missing_pieces(bpe: Gpt2Bpe, vocab: Container[str]) -> list[str]:
    """Return the pieces without an id; the end of text is not encoded and may be missing."""
    return [piece for piece in bpe.pieces[:-1] if piece not in vocab]


def piece_names(dictionary: Dictionary, bpe: Gpt2Bpe, mask: str | None) -> list[str]:
    """Return the piece for each symbol of a dictionary, a GPT-2 id; fillers and `mask` stay unchanged."""
    ids = {str(number): piece for number, piece in enumerate(bpe.pieces)}
    ids |= {symbol: symbol for symbol in dictionary.symbols if symbol == mask or FILLER.fullmatch(symbol)}
    if wrong := next((symbol for symbol in dictionary.symbols if symbol not in ids), None):
        end = f"no GPT-2 id; they end at {len(bpe.pieces) - 1}"
        problem = end if wrong.isdecimal() else "not a number; --bpe is for dictionaries of GPT-2 ids"
        raise ConversionError(f"{dictionary.path}: symbol {wrong!r} is {problem}")
    return [ids[symbol] for symbol in dictionary.symbols]
