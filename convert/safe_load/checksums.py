"""Compute the SHA-256 of a checkpoint and, in a zip archive, check the CRC-32 of every entry."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from luna_mega.errors import ConversionError, shown

_BLOCK = 1 << 20
_UNCHECKED = "damage to it goes unnoticed, unless you compare its SHA-256 with the original's"
_LEGACY = f"it has torch's legacy format, which has no checksums: {_UNCHECKED}"
_NO_CRC = (
    "its zip entries have no CRC-32 (torch.serialization.set_crc32_options(False) writes such a file): " + _UNCHECKED
)


@dataclass(frozen=True)
class Checksums:
    """The SHA-256 of a file, and the description of its zip archive."""

    sha256: str
    pickles: tuple[int, ...]  # their offsets in the file
    unchecked: str | None  # reason why damage is not detected; None if there are checksums
    archive: str | None = None  # name of the archive; `torch.save(..., path)` uses the name of the file


def read_checksums(path: Path, is_zip: bool, progress: bool = False) -> Checksums:
    """Return the SHA-256 of a file, and check the CRC-32 of every zip entry; the legacy format has no checksums."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        bar = {"desc": path.name, "total": path.stat().st_size, "disable": None if progress else True, "delay": 1}
        with tqdm.wrapattr(file, "read", **bar) as reader:
            while block := reader.read(_BLOCK):
                digest.update(block)
        if not is_zip:
            return Checksums(digest.hexdigest(), (), _LEGACY)
        try:
            entries, with_crc = _check_entries(path, file)
        except ConversionError:
            raise
        except Exception as error:  # zipfile raises many types for a damaged directory
            raise _damaged(path, f"the zip directory cannot be read: {error}") from error
    # torch ignores the case of names.
    pickles = tuple(start for name, start in entries if name.lower().endswith("data.pkl"))
    archive = next((name.rpartition("/")[0] for name, _ in entries if name.endswith("/data.pkl")), None)
    return Checksums(digest.hexdigest(), pickles, None if with_crc else _NO_CRC, archive)


def _check_entries(path: Path, file: BinaryIO) -> tuple[list[tuple[str, int]], bool]:
    """Return the name and the data offset of each entry, and whether the entries have CRCs.

    Raise an error unless the entries are uncompressed, follow their headers and have their CRC-32.
    """
    if not zipfile.is_zipfile(file):
        raise _damaged(path, "the zip directory at its end is missing")
    entries, end = [], 0
    with zipfile.ZipFile(file) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        # The CRC-32 of a single entry can be 0; without CRCs, torch.save writes 0 for all.
        with_crc = any(info.CRC for info in infos)
        for info in infos:
            name = f"entry {shown(info.filename)}"
            try:
                entry, start = archive.open(info), file.tell()  # the header has been read
            except zipfile.BadZipFile:
                start = -1
            if start < 0 or info.header_offset < end:
                raise _damaged(path, f"{name} is not at the offset in the zip directory")
            entries.append((info.filename, start))
            end = start + info.compress_size
            stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
            if end > archive.start_dir or not stored:
                raise _damaged(path, f"{name} is compressed or cut off, and torch writes neither")
            try:
                while with_crc and entry.read(_BLOCK):
                    pass
            except zipfile.BadZipFile as error:
                raise _damaged(path, f"{name} has CRC-32 errors") from error
    return entries, with_crc


def _damaged(path: Path, reason: str) -> ConversionError:
    return ConversionError(f"{path}: damaged or truncated: {reason}; copy the file again")
