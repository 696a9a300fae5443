"""Tokenizers of converted checkpoints, made from fairseq's dictionaries; the format of a checkpoint chooses one."""

from luna_mega.convert.tokenizers.converted import PIECES, WORDS, ConvertedTokenizer

__all__ = ["PIECES", "WORDS", "ConvertedTokenizer"]
