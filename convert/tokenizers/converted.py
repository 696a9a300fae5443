"""The tokenizer of a converted checkpoint."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TokenizersBackend

from luna_mega.convert.dictionaries import PIECES_FILE
from luna_mega.hub.folder import TARGET_FOLDER

# Options of all tokenizers except RobertaTokenizer, for which they are the defaults.
OPTIONS = {"pad_token": "<pad>", "unk_token": "<unk>", "model_input_names": ["input_ids", "attention_mask"]}
WORDS, PIECES = "whitespace-separated symbols", "GPT-2 byte-pair encoding"
SENTENCEPIECE = "SentencePiece byte-pair encoding"


@dataclass(frozen=True)
class ConvertedTokenizer:
    """A tokenizer, for an encoder-decoder of the source, with its files."""

    tokenizer: TokenizersBackend
    kind: str
    missing_pieces: list[str]  # pieces of GPT-2 that become `<unk>` because the dictionary lacks them
    target: TokenizersBackend | None = None  # tokenizer of the target if it has a separate dictionary
    source: Path | None = None  # SentencePiece model

    @property
    def summary(self) -> dict[str, Any]:
        """Return the entry of the report."""
        return {
            "class": type(self.tokenizer).__name__,
            "kind": self.kind,
            "size": len(self.tokenizer),
            "missing_pieces": self.missing_pieces,
        }

    def save(self, folder: Path) -> None:
        """Write the files of the tokenizers, and the code of a class that transformers does not have."""
        self.tokenizer.save_pretrained(folder)
        if self.source is not None:
            shutil.copyfile(self.source, folder / PIECES_FILE)
        if self.target is not None:
            self.target.save_pretrained(folder / TARGET_FOLDER)
