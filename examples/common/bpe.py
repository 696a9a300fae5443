"""A byte-level BPE with RoBERTa's special tokens, ids and pair format."""

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AddedToken, RobertaTokenizer

NAMED_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
SPECIAL_TOKENS = list(NAMED_TOKENS.values())
MASK_TOKEN = "<mask>"
MIN_VOCAB_SIZE = len(pre_tokenizers.ByteLevel.alphabet()) + len(SPECIAL_TOKENS) + 1


def train_bpe(texts: Iterable[str], vocab_size: int, model_max_length: int) -> RobertaTokenizer:
    """Train a byte-level BPE and return a tokenizer that writes `<s> a </s>` and `<s> a </s></s> b </s>`.

    Ids are `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, the 256 bytes, the merges and `<mask>` last; a small text can give
    fewer than `vocab_size` entries. The first word of a text gets the leading space of any other word.

    Raises:
        ValueError: `vocab_size` is below the special tokens and the 256 bytes.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size ({vocab_size}) must be at least {MIN_VOCAB_SIZE}: 256 bytes and special tokens")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    model = json.loads(bpe.to_str())["model"]
    vocab = {**model["vocab"], MASK_TOKEN: len(model["vocab"])}
    return RobertaTokenizer(
        vocab=vocab,
        merges=[tuple(merge) for merge in model["merges"]],
        mask_token=AddedToken(MASK_TOKEN, lstrip=True, special=True),
        add_prefix_space=True,
        model_max_length=model_max_length,
    )
