"""The checkpoint formats of the converter, one file each; `register_format` adds one from outside."""

from luna_mega.convert.formats.format import Companions, Facts, Format, Notes, Revision
from luna_mega.convert.formats.registry import register_format, registered_formats

__all__ = ["Companions", "Facts", "Format", "Notes", "Revision", "register_format", "registered_formats"]
