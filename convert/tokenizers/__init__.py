"""Tokenizers of converted checkpoints, made from fairseq's dictionaries. The checkpoint format selects one of them."""

from luna_mega.convert.tokenizers.converted import PIECES, SENTENCEPIECE, WORDS, ConvertedTokenizer

__all__ = ["PIECES", "SENTENCEPIECE", "WORDS", "ConvertedTokenizer"]
