"""Conversion of checkpoints of the original code into folders that transformers loads, and back."""

from luna_mega.convert.export.exporter import export_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.errors import ConversionError

__all__ = ["ConversionError", "convert_checkpoint", "export_checkpoint"]
