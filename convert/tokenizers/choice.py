"""The tokenizer of a converted checkpoint; its format makes it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TokenizersBackend

from luna_mega.errors import ConversionError
from luna_mega.hub.folder import TARGET_FOLDER

WORDS, PIECES = "whitespace-separated symbols", "GPT-2 byte-pair encoding"


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
