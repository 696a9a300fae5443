"""One pass over a checkpoint for its SHA-256 and, in a zip archive, the CRC-32 of every entry."""

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from luna_mega.errors import ConversionError, shown

_BLOCK = 1 << 20
# Signature, 22 bytes that the directory repeats, lengths of the name and of the extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_UNCHECKED = "damage to it goes unnoticed, unless you compare its SHA-256 with the original's"
_LEGACY = f"it has torch's legacy format, which has no checksums: {_UNCHECKED}"
_NO_CRC = (
    "its zip entries have no CRC-32 (torch.serialization.set_crc32_options(False) writes such a file): " + _UNCHECKED
)


@dataclass(frozen=True)
class Checksums:
    """The SHA-256 of a file, and the description of its zip archive.

    Args:
        sha256: Digest of the file.
        pickles: Offsets of the pickles in the file.
        unchecked: Reason why damage is not detected; None if there are checksums.
        archive: Name of the archive; `torch.save(..., path)` uses the name of the file.
    """

    sha256: str
    pickles: tuple[int, ...]
    unchecked: str | None
    archive: str | None = None


def read_checksums(path: Path, is_zip: bool, progress: bool = False) -> Checksums:
    """Return the SHA-256 of a file, and check the CRC-32 of every zip entry; the legacy format has no checksums."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        entries = _entries(path, file) if is_zip else []
        # The CRC-32 of a single entry can be 0; without CRCs, torch.save writes 0 for all.
        with_crc = any(info.CRC for info, _ in entries)
        file.seek(0)
        bar = {"desc": path.name, "total": path.stat().st_size, "disable": None if progress else True, "delay": 1}
        with tqdm.wrapattr(file, "read", **bar) as reader:
            for info, start in entries:
                for block in _blocks(reader, start):
                    digest.update(block)
                crc = 0
                for block in _blocks(reader, start + info.compress_size):
                    digest.update(block)
                    crc = zlib.crc32(block, crc)
                if with_crc and crc != info.CRC:
                    reason = f"entry {shown(info.filename)} has CRC-32 {crc:08x} in place of {info.CRC:08x}"
                    raise _damaged(path, reason)
            while block := reader.read(_BLOCK):
                digest.update(block)
    # torch ignores the case of names.
    pickles = tuple(start for info, start in entries if info.filename.lower().endswith("data.pkl"))
    unchecked = None if with_crc else _NO_CRC if is_zip else _LEGACY
    names = (info.filename for info, _ in entries)
    archive = next((name.rpartition("/")[0] for name in names if name.endswith("/data.pkl")), None)
    return Checksums(digest.hexdigest(), pickles, unchecked, archive)


def _blocks(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yield the file from its position to `end`."""
    while block := file.read(min(_BLOCK, end - file.tell())):
        yield block


def _entries(path: Path, file: BinaryIO) -> list[tuple[zipfile.ZipInfo, int]]:
    """Return the entries and the offsets of their data, in the order of the file.

    It is an error unless they are uncompressed and follow their headers.
    """
    try:
        if not zipfile.is_zipfile(file):
            raise _damaged(path, "the zip directory at its end is missing")
        with zipfile.ZipFile(file) as archive:
            infos, directory = archive.infolist(), archive.start_dir
        entries, end = [], 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            start = _start(info, file)
            if start is None or info.header_offset < end:
                raise _damaged(path, f"entry {shown(info.filename)} is not at the offset in the zip directory")
            end = start + info.compress_size
            if end > directory or info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise _damaged(path, f"entry {shown(info.filename)} is compressed or cut off, and torch writes neither")
            entries.append((info, start))
    except ConversionError:
        raise
    except Exception as error:  # zipfile raises many types for a damaged directory
        raise _damaged(path, f"the zip directory cannot be read: {error}") from error
    return entries


def _start(info: zipfile.ZipInfo, file: BinaryIO) -> int | None:
    """Return the offset of an entry's data from its header; None without a header."""
    file.seek(info.header_offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    if signature != b"PK\x03\x04" or file.read(name_length) != name:
        return None
    return info.header_offset + _LOCAL_HEADER.size + name_length + extra_length


def _damaged(path: Path, reason: str) -> ConversionError:
    return ConversionError(f"{path}: damaged or truncated: {reason}; copy the file again")
