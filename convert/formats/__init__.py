"""The checkpoint formats of the converter, one per file. `register_format` adds a user-defined format."""

from luna_mega.convert.formats.format import Companions, Facts, Format, Notes
from luna_mega.convert.formats.registry import register_format, registered_formats

__all__ = ["Companions", "Facts", "Format", "Notes", "register_format", "registered_formats"]
