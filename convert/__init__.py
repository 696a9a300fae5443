"""Checkpoints of the original code become folders that transformers loads, and folders become checkpoints."""

from luna_mega.convert.exporter import export_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.errors import ConversionError

__all__ = ["ConversionError", "convert_checkpoint", "export_checkpoint"]
