"""Pairs of sentences: read, tokenized, put in batches."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from common.arguments import fail
from common.bpe import NAMED_TOKENS, SPECIAL_TOKENS
from common.data import check_texts
from common.model import ModelArguments, load_tokenizer


def read_pairs(split: Dataset, name: str, source: str, target: str) -> Dataset:
    """Return the columns `source` and `target` of a split that names them by language, maybe inside `translation`."""
    prefix = "translation." if "translation" in split.column_names else ""
    columns = {prefix + source: "source", prefix + target: "target"}
    split = split.flatten()
    check_texts(split, name, tuple(columns))
    return split.select_columns(list(columns)).rename_columns(columns)


class Tokenizers(NamedTuple):
    """Tokenizers of the two languages; the same one twice where they share a vocabulary."""

    source: PreTrainedTokenizerBase
    target: PreTrainedTokenizerBase


def train_joint_bpe(texts: Iterable[str], vocab_size: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE for both languages; it writes `a </s>` and decodes to the text that it was given.

    Ids are `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, the 256 bytes and the merges. No text has an `<unk>`; the first
    word of a text is encoded as any other word.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(SPECIAL_TOKENS) + len(alphabet):
        fail(f"--vocab_size {vocab_size} must be at least {len(SPECIAL_TOKENS) + len(alphabet)}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    eos = NAMED_TOKENS["eos_token"]
    backend.post_processor = processors.TemplateProcessing(single=f"$A {eos}", special_tokens=[(eos, 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **NAMED_TOKENS,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def make_tokenizers(model: ModelArguments, texts: Iterable[str], max_length: int) -> Tokenizers:
    """Load the tokenizers that `model` names (a subfolder `target` may hold the target's), or train one on `texts`."""
    source = model.tokenizer_name or model.model_name_or_path
    if not source:
        joint = train_joint_bpe(texts, model.vocab_size, max_length)
        return Tokenizers(joint, joint)
    try:
        first = second = load_tokenizer(source)
        if cached_file(source, "target/tokenizer_config.json", _raise_exceptions_for_missing_entries=False):
            second = AutoTokenizer.from_pretrained(source, subfolder="target")
    except (OSError, ValueError) as error:
        fail(f"no tokenizer in {source} (--tokenizer_name names another): {error}")
    for tokenizer in (first, second):
        if tokenizer("a")["input_ids"][-1] != tokenizer.eos_token_id:
            fail(f"the tokenizer of {source} does not end a sentence with its eos_token {tokenizer.eos_token}")
    return Tokenizers(first, second)


def encode(pairs: Dataset, name: str, tokenizers: Tokenizers, max_source: int, max_target: int) -> Dataset:
    """Add `input_ids` and `labels`, both with `</s>`, their `length` in all, and the number of the `row`.

    Training leaves out pairs with an empty side, or a side longer than `max_source` or `max_target`. Elsewhere such a
    side is cut, and the pairs are ordered by length, so that a batch is translated in as few steps as possible.
    """

    def tokenize(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        inputs, labels = (
            tokenizer([text.strip() for text in batch[side]], verbose=False)["input_ids"]
            for side, tokenizer in zip(("source", "target"), tokenizers, strict=True)
        )
        length = [len(first) + len(second) for first, second in zip(inputs, labels, strict=True)]
        return {"input_ids": inputs, "labels": labels, "length": length, "row": indices}

    def fits(pair: dict[str, Any]) -> bool:
        empty = not pair["source"].strip() or not pair["target"].strip()
        return not empty and len(pair["input_ids"]) <= max_source and len(pair["labels"]) <= max_target

    def cut(pair: dict[str, Any]) -> dict[str, list[int]]:
        limits = {"input_ids": max_source, "labels": max_target}
        return {side: [*pair[side][:-1][: limit - 1], pair[side][-1]] for side, limit in limits.items()}

    encoded = pairs.map(tokenize, batched=True, with_indices=True, desc=name)
    if name != "train":
        lengths = list(encoded["length"])
        longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        return encoded.map(cut, desc=f"{name}: cut").select(longest_first)
    encoded = encoded.filter(fits, desc=f"{name}: filter")
    if len(encoded) == 0:
        fail("no training pair fits; see --max_source_length and --max_target_length")
    return encoded


class PairCollator(DataCollatorForSeq2Seq):
    """Collator that pads both sides to the longest of the batch and drops the columns that are not for the model."""

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        needed = [{name: feature[name] for name in ("input_ids", "labels")} for feature in features]
        return super().__call__(needed, return_tensors)
