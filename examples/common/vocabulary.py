"""Tokenizers of characters, bytes and words, for language models; `bpe.py` has the byte-level BPE."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.bpe import NAMED_TOKENS, SPECIAL_TOKENS


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMED_TOKENS)


def _word_level(words: Iterable[str]) -> Tokenizer:
    vocab = {word: index for index, word in enumerate([*SPECIAL_TOKENS, *words])}
    return Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL_TOKENS[-1]))


def train_characters(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make every character of `texts` a token, newlines and spaces included; other characters become `<unk>`."""
    tokenizer = _word_level(sorted(set(chain.from_iterable(texts))))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer)


def make_bytes() -> PreTrainedTokenizerFast:
    """Make a token of each of the 256 bytes; no text has an `<unk>`."""
    vocab = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocab)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


def train_words(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Make tokens of the `vocab_size` most frequent words, the most frequent first, as adaptive softmax needs them."""
    counts = Counter(word for text in texts for word in text.split() if word not in SPECIAL_TOKENS)
    return make_words(word for word, _ in counts.most_common(vocab_size - len(SPECIAL_TOKENS)))


def make_words(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a token of each of `words`; texts are split at white space."""
    tokenizer = _word_level(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(tokenizer)
