"""Fast tokenizers for language models: whitespace-separated words, the bytes of enwik8, or GPT-2's pieces.

The original code trains on a stream in which every line ends with `</s>`, and prepends `</s>` to it. The tokenizers
therefore replace a newline by `</s>` and prepend `</s>`, except for byte models.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPT2Tokenizer, TokenizersBackend
from transformers.convert_slow_tokenizer import bytes_to_unicode

from luna_mega.convert.dictionaries import Dictionary, vocabulary
from luna_mega.convert.tokenizers.converted import OPTIONS, PIECES, WORDS, ConvertedTokenizer
from luna_mega.convert.tokenizers.gpt2_bpe import Gpt2Bpe, missing_pieces, piece_names, read_gpt2_bpe
from luna_mega.convert.tokenizers.words import template, word_level, wrap
from luna_mega.errors import ConversionError

_END = "</s>"
_STARTS_WITH_END = template(f"{_END} $A", {_END: 2})
_BYTES = {str(byte): character for byte, character in bytes_to_unicode().items()}


def lm_tokenizer(dictionary: Dictionary, bpe: str | Path | None, max_length: int | None) -> ConvertedTokenizer:
    """Return the tokenizer of a dictionary: of bytes if every symbol is a decimal byte, as in the enwik8 recipe."""
    if bpe is not None:
        return ConvertedTokenizer(_pieces(dictionary, read_gpt2_bpe(bpe), max_length), PIECES, [])
    if dictionary.labels and all(symbol in _BYTES for symbol in dictionary.labels):
        return ConvertedTokenizer(_bytes(dictionary, max_length), "bytes", [])
    return ConvertedTokenizer(_words(dictionary, max_length), WORDS, [])


def _words(dictionary: Dictionary, max_length: int | None) -> TokenizersBackend:
    """Return a tokenizer that splits text at white space and looks up every symbol."""
    backend = word_level(dictionary)
    backend.normalizer = normalizers.Replace("\n", f" {_END} ")
    backend.post_processor = _STARTS_WITH_END
    return wrap(backend, max_length, bos_token=_END, eos_token=_END)


def _bytes(dictionary: Dictionary, max_length: int | None) -> TokenizersBackend:
    """Return a tokenizer that looks up the decimal number of every UTF-8 byte.

    If the dictionary has no symbol 10, a newline becomes `</s>`. Decoding restores the text.
    """
    vocab, end = vocabulary([_BYTES.get(symbol, symbol) for symbol in dictionary.symbols], None), _END
    if (newline := _BYTES["10"]) not in vocab:
        vocab[newline], end = vocab.pop(_END), newline
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(backend, max_length, bos_token=end, eos_token=end)


def _pieces(dictionary: Dictionary, bpe: Gpt2Bpe, max_length: int | None) -> TokenizersBackend:
    """Return a GPT-2 BPE tokenizer for a dictionary that lists GPT-2's ids."""
    vocab = vocabulary(piece_names(dictionary, bpe, None), None)
    if missing := missing_pieces(bpe, vocab):
        raise ConversionError(
            f"{dictionary.path}: lacks {len(missing)} of GPT-2's pieces, which a tokenizer of a language model "
            "requires; omit --bpe for a tokenizer of whitespace-separated GPT-2 ids"
        )
    tokenizer = GPT2Tokenizer(
        vocab=vocab, merges=list(bpe.merges), bos_token=_END, eos_token=_END, model_max_length=max_length, **OPTIONS
    )
    tokenizer.backend_tokenizer.post_processor = _STARTS_WITH_END
    return tokenizer
