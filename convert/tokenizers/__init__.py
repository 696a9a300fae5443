"""Tokenizers of converted checkpoints, made from fairseq's dictionaries; `convert_tokenizer` chooses one."""

from luna_mega.convert.tokenizers.choice import TARGET_FOLDER, ConvertedTokenizer, convert_tokenizer

__all__ = ["TARGET_FOLDER", "ConvertedTokenizer", "convert_tokenizer"]
