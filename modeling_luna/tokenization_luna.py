"""Tokenizer for dictionaries that lack some of the pieces of their byte-pair encoding."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, cast

from transformers import AddedToken, TokenizersBackend


class LunaTokenizer(TokenizersBackend):
    """Byte-pair encoding of GPT-2 or subword-nmt and a dictionary, as in fairseq: unknown pieces are `<unk>`.

    The BPE of the tokenizers library requires an id for every piece, also of merges. The backend therefore has all
    pieces, the missing ones with ids after the dictionary, and this class replaces these ids by the id of `<unk>`. Only
    `encodings` of a `BatchEncoding` contain the original ids.

    Args:
        dictionary_size (`int`): number of ids of the model; larger ids of the backend are missing pieces.
        kwargs: arguments of `TokenizersBackend`, such as `add_prefix_space` for GPT-2's pieces.
    """

    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, *, dictionary_size: int | None = None, **kwargs: Any) -> None:
        if dictionary_size is None:  # AutoTokenizer in a folder without a tokenizer
            raise ValueError(
                "the folder has no tokenizer: tokenizer.json and dictionary_size in tokenizer_config.json are missing; "
                "pass the dictionary (--dict, --bpe) to `luna-mega convert`, which then writes them"
            )
        self._dictionary_size = dictionary_size
        super().__init__(dictionary_size=dictionary_size, **kwargs)
        for part in (self.backend_tokenizer.pre_tokenizer, self.backend_tokenizer.post_processor):
            if hasattr(part, "add_prefix_space"):  # only for GPT-2's pieces
                part.add_prefix_space = self.add_prefix_space

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return kwargs  # tokenizer.json is loaded without changes

    @property
    def vocab_size(self) -> int:
        """Return the number of ids of the dictionary, without added tokens."""
        return self._dictionary_size

    @cached_property
    def _missing(self) -> range:
        return range(self.vocab_size, self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    @cached_property
    def _unknown(self) -> int:
        return cast(int, self.backend_tokenizer.token_to_id(str(self.unk_token)))

    def _from_backend(self, ids: Iterable[int]) -> list[int]:
        start, stop, unknown = self._missing.start, self._missing.stop, self._unknown
        return [i if i < start else unknown if i < stop else i - stop + start for i in ids]

    def _to_backend(self, ids: Iterable[int]) -> list[int]:
        start, missing = self._missing.start, len(self._missing)
        return [i if i < start else i + missing for i in map(int, ids)]

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True) - len(self._missing)

    def get_vocab(self) -> dict[str, int]:
        vocab = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        known = {token: index for token, index in vocab.items() if index not in self._missing}
        return dict(zip(known, self._from_backend(known.values()), strict=True))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        missing = len(self._missing)
        tokens = self.backend_tokenizer.get_added_tokens_decoder()
        return {index if index < self.vocab_size else index - missing: token for index, token in tokens.items()}

    def convert_ids_to_tokens(self, ids: int | list[int], skip_special_tokens: bool = False) -> str | list[str]:
        if isinstance(ids, int):
            return cast(str, self._convert_id_to_token(ids))
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        kept = self._to_backend(i for i in ids if int(i) not in skipped)
        return [cast(str, self.backend_tokenizer.id_to_token(i)) for i in kept]

    def _convert_id_to_token(self, index: int) -> str | None:
        return self.backend_tokenizer.id_to_token(*self._to_backend([index]))

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        return self._from_backend([super()._convert_token_to_id_with_added_voc(token)])[0]

    def _convert_encoding(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], list[Any]]:
        columns, encodings = super()._convert_encoding(*args, **kwargs)
        columns["input_ids"] = [self._from_backend(ids) for ids in columns["input_ids"]]
        return columns, encodings

    def _decode(self, token_ids: int | list[int] | dict[str, Any], *args: Any, **kwargs: Any) -> str:
        ids = token_ids["input_ids"] if isinstance(token_ids, dict) else token_ids
        return super()._decode(self._to_backend([ids] if isinstance(ids, int) else ids), *args, **kwargs)

    def train_new_from_iterator(self, *args: Any, **kwargs: Any) -> TokenizersBackend:
        raise NotImplementedError("a LunaTokenizer belongs to its dictionary; train a RobertaTokenizer instead")


# Saving a tokenizer copies this file, so that `trust_remote_code=True` loads the folder without this package.
LunaTokenizer.register_for_auto_class("AutoTokenizer")
