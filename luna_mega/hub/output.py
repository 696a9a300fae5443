"""Writes an output folder completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from luna_mega.errors import ConversionError


def check_output(output: str | Path) -> Path:
    """Return the resolved output path, which must be absent or an empty folder.

    Raises:
        ConversionError: the path is a file, or a folder with something in it.
    """
    output = Path(output).resolve()
    if output.is_dir():
        if any(output.iterdir()):
            raise ConversionError(f"{output}: the output folder is not empty; give a new one or remove it")
    elif output.exists():
        raise ConversionError(f"{output}: the output is a file; give a folder")
    return output


@contextmanager
def complete_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same file system, which becomes `output` if the block raises no exception."""
    parent = next(folder for folder in output.parents if folder.is_dir())
    partial = parent / f".{output.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        yield partial
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            output.rmdir()
        partial.rename(output)
    except BaseException:  # an interrupt leaves nothing behind either
        shutil.rmtree(partial, ignore_errors=True)
        raise
