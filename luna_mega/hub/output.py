"""Check output paths, and write outputs completely or not at all."""

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub.utils import WeakFileLock
from safetensors import SafetensorError

from luna_mega.errors import ConversionError, reason, shown
from luna_mega.escaping import is_utf8, locale_hint


def check_path(path: str | Path) -> Path:
    """Return the path; raise an error unless it is valid UTF-8 without NUL, as the libraries for weights require."""
    text = os.fspath(path)
    if not is_utf8(text):
        raise ConversionError(f"{shown(text)}: the name is not UTF-8; {locale_hint() or 'use another name'}")
    if "\0" in text:
        raise ConversionError(f"{shown(text)}: the name contains a NUL character; use another name")
    return Path(path)


def check_output(output: str | Path) -> Path:
    """Return an output path without symbolic links; raise an error unless it is absent or an empty folder."""
    path = Path(os.path.realpath(check_path(output)))
    if path.is_symlink():
        raise ConversionError(f"{output}: the symbolic link is circular; use another name")
    above = next(parent for parent in path.parents if os.path.lexists(parent))
    if not above.is_dir():
        raise ConversionError(f"{output}: {above} is not a folder; use another name")
    if path.is_dir():
        if any(path.iterdir()):
            raise ConversionError(f"{path}: the output folder is not empty; use a new one or remove it")
    elif path.exists():
        raise ConversionError(f"{path}: the output is a file; use a folder")
    return path


@contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, which is removed after the block, also if the block is interrupted.

    A process that is killed leaves its folder `.NAME.*.partial`. The next call with the same `parent` and `name`
    removes it. Folders of running processes are locked, and stay.
    """
    for folder in parent.glob(f".{glob.escape(name)}.*.partial"):
        # OSError: the folder is locked, belongs to another user, or was removed in the meantime.
        with suppress(OSError), WeakFileLock(folder / ".lock", timeout=0.1):
            shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".partial", dir=parent) as temporary:
        with WeakFileLock(Path(temporary, ".lock")):
            yield Path(temporary)


@contextmanager
def complete_folder(output: Path) -> Iterator[Path]:
    """Yield a new folder, which becomes `output`, or whose files move there, if the block raises no exception.

    Raises:
        ConversionError: A file cannot be written, for example because the disk is full.
    """
    parent = next(folder for folder in output.parents if folder.is_dir())
    with temporary_folder(parent, output.name) as temporary:
        partial = temporary / output.name
        partial.mkdir()
        try:
            yield partial
        except SafetensorError as error:
            raise ConversionError(f"{output}: cannot write model.safetensors: {reason(error)}") from error
        except Exception as error:
            if type(error) is not Exception or "os error" not in str(error):  # tokenizers does not raise OSError
                raise
            raise ConversionError(f"{output}: cannot write tokenizer.json: {reason(error)}") from error
        if output.is_dir():
            _fill(output, partial)
        else:
            output.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(output)


def _fill(output: Path, partial: Path) -> None:
    """Move all files into an empty folder, or none; the folder may be a mount point or the working directory."""
    check_output(output)
    moved = []
    try:
        for file in sorted(partial.iterdir()):
            moved.append(output / file.name)
            shutil.move(file, moved[-1])
    except BaseException:
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
