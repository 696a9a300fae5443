"""Convert checkpoints of the original code to folders that transformers loads, and convert models back."""

from luna_mega.convert.export.exporter import export_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.errors import ConversionError

__all__ = ["ConversionError", "convert_checkpoint", "export_checkpoint"]
