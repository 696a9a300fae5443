"""Tokenizers of converted checkpoints, made from fairseq's dictionaries; the format of a checkpoint chooses one."""

from luna_mega.convert.tokenizers.converted import PIECES, SENTENCEPIECE, WORDS, ConvertedTokenizer

__all__ = ["PIECES", "SENTENCEPIECE", "WORDS", "ConvertedTokenizer"]
