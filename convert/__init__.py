"""Convert checkpoints of the original code to folders that transformers loads."""

from luna_mega.convert.importer import convert_checkpoint
from luna_mega.errors import ConversionError

__all__ = ["ConversionError", "convert_checkpoint"]
