"""The tokenizer of a converted checkpoint: GPT-2 BPE for luna_bert, symbols between white space for LRA, or an LM's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TokenizersBackend

from luna_mega.convert.dictionary import Dictionary
from luna_mega.convert.plan import Plan
from luna_mega.convert.tokenizer_bpe import bpe_tokenizer, read_gpt2_bpe
from luna_mega.convert.tokenizer_lm import byte_tokenizer, holds_bytes, lm_bpe_tokenizer, lm_word_tokenizer
from luna_mega.convert.tokenizer_translation import translation_tokenizer
from luna_mega.convert.tokenizer_words import word_tokenizer
from luna_mega.errors import ConversionError
from luna_mega.hub.folder import TARGET_FOLDER, position_limit

_WORDS, _PIECES = "whitespace-separated symbols", "GPT-2 byte-pair encoding"


@dataclass(frozen=True)
class ConvertedTokenizer:
    """A tokenizer, its kind, and the pieces of GPT-2 that become `<unk>` because the dictionary lacks them.

    `target`: that of an encoder-decoder's target where it is another one; it is saved in the sub-folder `target`.
    """

    tokenizer: TokenizersBackend
    kind: str
    missing_pieces: list[str]
    target: TokenizersBackend | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """What the report says about it."""
        return {
            "class": type(self.tokenizer).__name__,
            "kind": self.kind,
            "size": len(self.tokenizer),
            "missing_pieces": self.missing_pieces,
        }

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, and the code of a class that transformers does not have."""
        try:
            self.tokenizer.save_pretrained(folder)
            if self.target is not None:
                self.target.save_pretrained(folder / TARGET_FOLDER)
        except OSError:
            raise
        except Exception as error:  # the tokenizers library has no type of its own for a full disk
            raise ConversionError(f"cannot write tokenizer.json: {error}") from error


def convert_tokenizer(
    plan: Plan, layout: str, dictionary: Dictionary | None, bpe: str | Path | None, target: Dictionary | None = None
) -> ConvertedTokenizer | None:
    """Makes the tokenizer if there is what it takes: a dictionary and, for luna_bert, the BPE files.

    Args:
        plan: gets a note when an option would add a tokenizer, or when transformers alone does not load it.
        layout: "luna_bert", "luna_lra", "mega_lra", "mega_lm" or "mega_seq2seq".
        dictionary: the vocabulary, of the size of the embedding; None = there is none.
        bpe: folder with GPT-2's BPE files; for translation the codes of a byte-pair encoding.
        target: the vocabulary of an encoder-decoder's target; `dictionary` is that of its source.

    Raises:
        ConversionError: `bpe` is given and the checkpoint, the dictionary or the folder is not such a one.
    """
    if layout == "mega_lm":
        return _of_language_model(plan, dictionary, bpe)
    if plan.languages is not None:
        return _of_translation(plan, dictionary, target, bpe)
    max_length = plan.config.max_position_embeddings
    if layout != "luna_bert":
        if bpe is not None:
            raise ConversionError(f"--bpe {bpe}: LRA does not read GPT-2's pieces; leave the option out")
        if dictionary is None:
            return None
        tokenizer = word_tokenizer(dictionary, plan.appended_symbol, plan.prepends_appended, max_length)
        return ConvertedTokenizer(tokenizer, _WORDS, [])
    if bpe is None:
        plan.notes.append("no tokenizer: --bpe DIR, the folder with GPT-2's encoder.json and vocab.bpe, adds it")
        return None
    if dictionary is None:
        raise ConversionError(f"--bpe {bpe}: there is no dictionary beside the checkpoint; give it with --dict")
    tokenizer, missing = bpe_tokenizer(dictionary, read_gpt2_bpe(bpe), plan.appended_symbol, max_length)
    if missing:
        plan.notes.append("the tokenizer's class is in the folder: without luna_mega it needs trust_remote_code=True")
    return ConvertedTokenizer(tokenizer, _PIECES, missing)


def _of_language_model(plan: Plan, dictionary: Dictionary | None, bpe: str | Path | None) -> ConvertedTokenizer | None:
    max_length = position_limit(plan.config)
    if bpe is not None:
        if dictionary is None:
            raise ConversionError(f"--bpe {bpe}: there is no dictionary beside the checkpoint; give it with --dict")
        return ConvertedTokenizer(lm_bpe_tokenizer(dictionary, read_gpt2_bpe(bpe), max_length), _PIECES, [])
    if dictionary is None:
        return None
    if holds_bytes(dictionary):
        return ConvertedTokenizer(byte_tokenizer(dictionary, max_length), "bytes", [])
    return ConvertedTokenizer(lm_word_tokenizer(dictionary, max_length), _WORDS, [])


def _of_translation(
    plan: Plan, source: Dictionary | None, target: Dictionary | None, codes: str | Path | None
) -> ConvertedTokenizer | None:
    if source is None:
        if codes is not None:
            raise ConversionError(f"--bpe {codes}: there is no dictionary beside the checkpoint; give it with --dict")
        return None
    made = {
        dictionary: translation_tokenizer(dictionary, codes, position_limit(plan.config.get_text_config(**side)))
        for dictionary, side in ((target, {"decoder": True}), (source, {"encoder": True}))
    }
    kind = _WORDS if codes is None else "byte-pair encoding"
    return ConvertedTokenizer(made[source], kind, [], None if target is source else made[target])
