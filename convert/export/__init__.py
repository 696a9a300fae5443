"""Export of models as checkpoints of the original code. Each format of `convert` has a writer in this package."""

from luna_mega.convert.export import luna, mega, megalodon
from luna_mega.convert.export.writer import Export, Writer, register_writer

__all__ = ["Export", "Writer", "luna", "mega", "megalodon", "register_writer"]
