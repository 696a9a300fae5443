"""Tokenizers trained on the texts of a run: byte-level BPE, words, characters and bytes."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AddedToken, PreTrainedTokenizerFast, RobertaTokenizer

NAMED_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
SPECIAL_TOKENS = list(NAMED_TOKENS.values())
MASK_TOKEN = "<mask>"


def train_bpe(texts: Iterable[str], vocab_size: int, model_max_length: int) -> RobertaTokenizer:
    """Train a byte-level BPE with RoBERTa's format, `<s> a </s>` and `<s> a </s></s> b </s>`.

    Ids are `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, the 256 bytes, the merges and `<mask>`. The vocabulary of a short
    text can be smaller than `vocab_size`. A leading space is added to the first word.

    Raises:
        ValueError: `vocab_size` is smaller than the number of special tokens and bytes.
    """
    model = json.loads(_train(texts, vocab_size, [MASK_TOKEN]).to_str())["model"]
    vocab = {**model["vocab"], MASK_TOKEN: len(model["vocab"])}
    return RobertaTokenizer(
        vocab=vocab,
        merges=[tuple(merge) for merge in model["merges"]],
        mask_token=AddedToken(MASK_TOKEN, lstrip=True, special=True),
        add_prefix_space=True,
        model_max_length=model_max_length,
    )


def train_joint_bpe(texts: Iterable[str], vocab_size: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE for two languages, with the format `a </s>` and lossless decoding.

    Ids are `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, the 256 bytes and the merges. A leading space is added to the first
    word.
    """
    backend = _train(texts, vocab_size)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    eos = NAMED_TOKENS["eos_token"]
    backend.post_processor = processors.TemplateProcessing(single=f"$A {eos}", special_tokens=[(eos, 2)])
    return _wrap(backend, model_max_length=model_max_length, clean_up_tokenization_spaces=False)


def _train(texts: Iterable[str], vocab_size: int, added: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens, including tokens that are `added` later."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(SPECIAL_TOKENS) + len(added)
    if vocab_size < least:
        raise ValueError(f"vocab_size ({vocab_size}) must be at least {least}: 256 bytes and special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    options = {"special_tokens": SPECIAL_TOKENS, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size - len(added), **options))
    return bpe


def _wrap(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    # By default, it also returns token types.
    names = {"model_input_names": ["input_ids", "attention_mask"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMED_TOKENS, **names, **options)


def _word_level(words: Iterable[str]) -> Tokenizer:
    vocab = {word: index for index, word in enumerate([*SPECIAL_TOKENS, *words])}
    return Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL_TOKENS[-1]))


def train_characters(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the characters of `texts`, including newlines and spaces; others become `<unk>`."""
    tokenizer = _word_level(sorted(set(chain.from_iterable(texts))))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer)


def make_bytes(**options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with other `options` of PreTrainedTokenizerFast."""
    vocab = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocab)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer, **options)


def train_words(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the `vocab_size` most frequent words, most frequent first, for adaptive softmax."""
    counts = Counter(word for text in texts for word in text.split() if word not in SPECIAL_TOKENS)
    return make_words(word for word, _ in counts.most_common(vocab_size - len(SPECIAL_TOKENS)))


def make_words(words: Iterable[str], **options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `words`, with other `options`, that splits texts at white space."""
    tokenizer = _word_level(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(tokenizer, **options)
