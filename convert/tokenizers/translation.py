"""Fast tokenizers for translation models: pieces of subword-nmt, or whitespace-separated symbols."""

from functools import partial
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models
from transformers import TokenizersBackend

from luna_mega import LunaTokenizer
from luna_mega.convert.dictionaries import FILLER, Dictionary, read_text, vocabulary
from luna_mega.convert.tokenizers.words import SPLIT, template, word_level, wrap
from luna_mega.errors import ConversionError

_CONTINUES = "@@"
_WORD_END = "</w>"
_SENTENCEPIECE_SPACE = "\u2581"


def translation_tokenizer(
    dictionary: Dictionary, codes: str | Path | None = None, max_length: int | None = None
) -> TokenizersBackend:
    """Return the tokenizer of one language, which splits text at white space and appends `</s>`.

    With `codes`, a file with the merges of subword-nmt or fastBPE, words are split into pieces. Without codes, the text
    must consist of symbols of the dictionary (`"ein Ha@@ us"`, `"▁ein ▁Ha us"`). Decoding joins the pieces of a word.
    The result is a `LunaTokenizer` if merges create pieces that the dictionary lacks.
    """
    backend, size = (_symbols(dictionary), None) if codes is None else _pieces(dictionary, codes)
    backend.post_processor = template("$A </s>", {"</s>": 2})
    lacks_pieces = size not in (None, backend.get_vocab_size())
    make = partial(LunaTokenizer, dictionary_size=size) if lacks_pieces else TokenizersBackend
    options = {"padding_side": "right", "clean_up_tokenization_spaces": False}
    return wrap(backend, max_length, make, bos_token="<s>", eos_token="</s>", **options)


def _symbols(dictionary: Dictionary) -> Tokenizer:
    backend = word_level(dictionary)
    if any(_SENTENCEPIECE_SPACE in symbol for symbol in dictionary.symbols):
        joined = [decoders.Replace(_SENTENCEPIECE_SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        joined = [decoders.Replace(Regex("$"), " "), decoders.Replace(f"{_CONTINUES} ", ""), decoders.Fuse()]
        joined.append(decoders.Replace(Regex(" $"), ""))  # `Strip` of an empty text panics in tokenizers 0.23
    backend.decoder = decoders.Sequence(joined)
    return backend


def _pieces(dictionary: Dictionary, codes: str | Path) -> tuple[Tokenizer, int]:
    """Return the backend and the size of the dictionary.

    The last ids of the backend are pieces that the dictionary lacks.
    """
    if not any(symbol.endswith(_CONTINUES) for symbol in dictionary.symbols):
        raise ConversionError(
            f"{dictionary.path}: no symbol ends with {_CONTINUES}, so {codes} cannot be its codes; omit them"
        )
    merges = read_codes(codes)
    vocab = vocabulary(map(_piece, dictionary.symbols), None)
    size = len(vocab)
    for first, second in merges:
        for piece in (first, second, first + second):
            # The tokenizers library merges only pieces with an id; LunaTokenizer replaces these by <unk>.
            vocab.setdefault(piece, len(vocab))
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", end_of_word_suffix=_WORD_END))
    backend.pre_tokenizer = SPLIT
    backend.decoder = decoders.Sequence(
        [decoders.Replace("<unk>", f"<unk>{_WORD_END}"), decoders.BPEDecoder(_WORD_END)]
    )
    return backend, size


def _piece(symbol: str) -> str:
    """Return the piece of a symbol: `x@@` becomes `x`, which does not end a word, and `x` becomes `x</w>`."""
    if FILLER.fullmatch(symbol):
        return symbol
    if symbol.endswith(_CONTINUES) and symbol != _CONTINUES:
        return symbol.removesuffix(_CONTINUES)
    return symbol + _WORD_END


def read_codes(path: str | Path) -> list[tuple[str, str]]:
    """Read merges such as `a b</w>`, which fastBPE writes with a count; repeated merges are ignored."""
    path = Path(path)
    binary = "not codes of subword-nmt, but a binary file"
    lines = read_text(path, "no such file; pass subword-nmt's codes", binary).rstrip("\n").split("\n")
    header = lines[0].rstrip() == "#version: 0.2"
    merges = {}
    for number, line in enumerate(lines[header:], start=1 + header):
        parts = line.strip("\r\n ").split(" ")
        counted = len(parts) == 3 and parts[2].isdigit()
        if len(parts) != 2 and not counted:
            raise ConversionError(f"{path}: line {number} is not a pair of pieces: {line[:40]!r}")
        if not header and not counted:
            raise ConversionError(
                f"{path}: neither '#version: 0.2' nor counts: codes of subword-nmt before 0.2 are not supported; omit "
                "them, and split the text with subword-nmt"
            )
        merges.setdefault((parts[0], parts[1]))
    return list(merges)
