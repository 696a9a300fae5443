"""Checkpoints of the original fairseq code become folders that transformers loads."""

from luna_mega.convert.fairseq_to_hf import convert_checkpoint
from luna_mega.errors import ConversionError

__all__ = ["ConversionError", "convert_checkpoint"]
