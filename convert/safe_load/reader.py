"""Read checkpoints without executing code in them.

The SHA-256 is computed, and the CRC-32 of every zip entry checked. `torch.load(weights_only=True)` creates only tensors
and built-in containers; the types of `_inert_types` are allowed too.
"""

import argparse
import hashlib
import pickle
import re
import tarfile
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from tqdm import tqdm

from luna_mega.convert.safe_load import contents
from luna_mega.errors import ConversionError, errors_of, shown
from luna_mega.escaping import is_utf8

_NUMPY_SCALARS = "?bhilqBHILQefd"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_LATER_FAIRSEQ = (
    "written by a later fairseq (hydra configuration); the Luna and Mega code writes 'args'; pass a checkpoint "
    "that this code saved"
)
_BLOCK = 1 << 20
_UNCHECKED = "damage to it goes unnoticed, unless you compare its SHA-256 with the original's"
_LEGACY = f"it has torch's legacy format, which has no checksums: {_UNCHECKED}"
_NO_CRC = (
    "its zip entries have no CRC-32 (torch.serialization.set_crc32_options(False) writes such a file): " + _UNCHECKED
)
# Prefix of the names in a state dict -> the wrapper that adds it, and its attribute with the model.
_WRAPPERS = {
    "module.": ("DistributedDataParallel", "module"),
    "_orig_mod.": ("torch.compile", "_orig_mod"),
    "model.": ("Lightning and other wrappers", "model"),
}
# First bytes of an archive -> its kind, and the command that extracts it.
_ARCHIVES = {
    b"\x1f\x8b": ("gzip", "tar -xzf, or gunzip"),
    b"BZh": ("bzip2", "tar -xjf, or bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "tar -xJf, or unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "tar --zstd -xf, or unzstd"),
}


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint, a file or a folder, with the args as plain values."""

    path: Path
    sha256: str
    serialization: str  # "zip" or "legacy"
    args: dict
    tensors: dict[str, torch.Tensor]
    num_updates: int | None = None
    warnings: tuple[str, ...] = ()
    missing_args: str | None = None  # error message if the file has no args
    unchecked: str | None = None  # reason why damage is not detected; None if the file has checksums
    archive: str | None = None  # name of the zip archive; `torch.save(..., path)` uses the name of the file

    @property
    def folder(self) -> Path:
        """Return the folder of the checkpoint and its dictionaries."""
        return self.path if self.path.is_dir() else self.path.parent


def _inert_types() -> list:
    """Return `argparse.Namespace` and the types of a pickled numpy scalar, with the module names of numpy 1 and 2."""
    scalar = numpy.float64(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")]
    dtypes = {type(numpy.dtype(code)) for code in _NUMPY_SCALARS}
    return [argparse.Namespace, numpy.dtype, *dtypes, *((scalar, name) for name in names)]


def read_checkpoint(path: str | Path, progress: bool = False) -> Checkpoint:
    """Open a checkpoint of fairseq's `checkpoint_utils.save_state`, in zip or legacy serialization.

    Raises:
        ConversionError: If the file is no such checkpoint, is damaged, would run code, or comes from a later fairseq.
    """
    path = Path(path)
    state, file = _open(path, progress)
    if not isinstance(state, dict):
        raise ConversionError(f"{path}: contains a {type(state).__name__}, not the dict that fairseq saves")
    if state.get("cfg") is not None:
        raise ConversionError(f"{path}: field 'cfg': {_LATER_FAIRSEQ}")
    fields = ", ".join(key if isinstance(key, str) else shown(key) for key in list(state)[:5]) or "nothing"
    missing = [
        f"{path}: field '{field}' is None, not as fairseq saves it; pass the file that fairseq saved"
        if field in state
        else f"{path}: no field '{field}' (found: {shown(fields)[1:-1]}): not a fairseq checkpoint; pass the file "
        "that fairseq saved"
        for field in ("args", "model")
        if state.get(field) is None
    ]
    if state.get("model") is None:
        raise ConversionError(missing[0])
    named = argparse.Namespace() if missing else state["args"]
    if not isinstance(named, argparse.Namespace):
        raise ConversionError(f"{path}: field 'args' is a {type(named).__name__}, not an argparse.Namespace")
    with errors_of(path):
        tensors, args = _tensors(state["model"], "field 'model'"), contents.plain_args(named)
        if file.unchecked:
            contents.check_storages(state)
    missing_args = missing[0] if missing else None
    file = replace(file, warnings=(*file.warnings, *contents.other_weights(state)))
    return replace(file, args=args, tensors=tensors, num_updates=_num_updates(state), missing_args=missing_args)


def read_tensors(path: Path, progress: bool = False) -> Checkpoint:
    """Open a file with only a state dict, in zip or legacy serialization.

    Raises:
        ConversionError: If the file contains something else, is damaged, or would run code.
    """
    state, file = _open(path, progress)
    with errors_of(path):
        tensors = _tensors(state, "the file")
        if file.unchecked:
            contents.check_storages({"model": tensors})
    return replace(file, tensors=tensors)


def _open(path: Path, progress: bool) -> tuple[Any, Checkpoint]:
    """Return the content of a file, and a `Checkpoint` without args and tensors."""
    serialization = _serialization(path)
    sha256, entries, unchecked = _verify(path, serialization == "zip", progress)
    # torch ignores the case of names.
    pickles = [start for name, start in entries if name.lower().endswith("data.pkl")]
    archive = next((name.rpartition("/")[0] for name, _ in entries if name.endswith("/data.pkl")), None)
    warned = (unchecked,) if unchecked else ()
    file = Checkpoint(path, sha256, serialization, {}, {}, warnings=warned, unchecked=unchecked, archive=archive)
    return _load(path, serialization, pickles), file


def _serialization(path: Path) -> str:
    if path.is_dir():
        inside = ", ".join(sorted(p.name for p in path.glob("*.pt"))[:3]) or "none of its files ends in .pt"
        raise ConversionError(f"{path}: is a folder; pass the checkpoint file itself ({inside})")
    if not path.is_file():
        raise ConversionError(f"{path}: no such file")
    with path.open("rb") as file:
        start = file.read(16)
    if not start:
        raise ConversionError(f"{path}: the file is empty; copy or download it again")
    for magic, (kind, command) in _ARCHIVES.items():
        if start.startswith(magic):
            raise ConversionError(f"{path}: a {kind} archive; extract it ({command}), and pass the checkpoint in it")
    if start.startswith(b"PK\x03\x04"):
        return "zip"
    if start[8:10] == b'{"':  # checked first: the length at the start of a safetensors file can be 0x80
        raise ConversionError(f"{path}: a safetensors file, which has no fairseq 'args'; pass the .pt file")
    if start.startswith(b"\x80"):
        return "legacy"
    if tarfile.is_tarfile(path):
        raise ConversionError(f"{path}: a tar archive; extract it (tar -xf), and pass the checkpoint in it")
    raise ConversionError(f"{path}: not a checkpoint (neither of torch's formats); pass the file that fairseq saved")


def _verify(path: Path, is_zip: bool, progress: bool) -> tuple[str, list[tuple[str, int]], str | None]:
    """Return the SHA-256 of a file, the zip entries with the offsets of their data, and why damage is not detected."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        bar = {"desc": path.name, "total": path.stat().st_size, "disable": None if progress else True, "delay": 1}
        with tqdm.wrapattr(file, "read", **bar) as reader:
            while block := reader.read(_BLOCK):
                digest.update(block)
        if not is_zip:
            return digest.hexdigest(), [], _LEGACY
        try:
            entries, with_crc = _check_entries(path, file)
        except ConversionError:
            raise
        except Exception as error:  # zipfile raises many types for a damaged directory
            raise _damaged(path, f"the zip directory cannot be read: {error}") from error
    return digest.hexdigest(), entries, None if with_crc else _NO_CRC


def _check_entries(path: Path, file: BinaryIO) -> tuple[list[tuple[str, int]], bool]:
    """Return the name and the data offset of each entry, and whether the entries have CRCs.

    Raise an error unless the entries are uncompressed, follow their headers and have their CRC-32.
    """
    if not zipfile.is_zipfile(file):
        raise _damaged(path, "the zip directory at its end is missing")
    entries, end = [], 0
    with zipfile.ZipFile(file) as archive:
        if not any(name.lower().endswith("data.pkl") for name in archive.namelist()):
            raise ConversionError(f"{path}: a zip archive; extract it (unzip), and pass the checkpoint in it")
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


def _load(path: Path, serialization: str, pickles: list[int]) -> Any:
    try:
        with torch.serialization.safe_globals(_inert_types()), warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")  # torch's warning about pickles of other protocols
            if serialization == "zip":
                for start in pickles:
                    file.seek(start)
                    contents.check_pickle(file)
                file.seek(0)
                # A mapped file keeps the optimizer state, two thirds of a training checkpoint, out of memory. torch
                # maps only files with UTF-8 names.
                mapped = is_utf8(str(path))
                return torch.load(str(path) if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
            contents.check_legacy_pickles(file)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
            if extra := path.stat().st_size - file.tell():
                raise contents.InvalidPickle(f"{extra} bytes follow the last storage")
            return state
    except OSError:
        raise
    except Exception as error:  # a broken or hostile pickle can raise any type
        raise ConversionError(f"{path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return why a file cannot be read, without torch's advice to load it with code execution."""
    message = str(error)
    if forbidden := re.search(r"GLOBAL (\S+)", message):
        name = shown(forbidden[1])[1:-1]
        if name.startswith(("omegaconf.", "fairseq.dataclass.")):
            return f"holds {name}: {_LATER_FAIRSEQ}"
        return (
            f"not loaded, nothing was executed: the file calls {name}, which is not a tensor or a plain value; if "
            "you trust its origin, load it on the machine that wrote it, and save only its tensors and plain values"
        )
    if isinstance(error, contents.InvalidPickle):
        detail = message
    elif isinstance(error, pickle.UnpicklingError) or "weights_only" in message:
        detail = "its pickle creates other objects than tensors and plain values; nothing was executed"
    else:
        first_line = message.strip().split("\n")[0]
        detail = shown(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)[1:-1]
    return f"damaged, truncated or not a checkpoint ({detail}); copy the file again"


def _tensors(model: Any, place: str) -> dict[str, torch.Tensor]:
    if not isinstance(model, Mapping):
        raise ConversionError(f"{place} is a {type(model).__name__}, not a state dict")
    for key, value in model.items():
        if not isinstance(key, str) or not contents.is_dense(value):
            raise ConversionError(f"{place}: entry {shown(key)} is not a dense tensor")
        if value.dtype not in _DTYPES:
            raise ConversionError(
                f"{place}: tensor {shown(key)} has dtype {str(value.dtype).removeprefix('torch.')}, which the "
                "original never saves; the file was modified"
            )
    for prefix, (wrapper, attribute) in _WRAPPERS.items():
        if model and all(key.startswith(prefix) for key in model):
            raise ConversionError(
                f"{place}: all names start with {prefix!r}, the prefix of {wrapper}; save "
                f"model.{attribute}.state_dict(), or remove the prefix"
            )
    contents.check_bytes(model)
    # A tensor with the negative bit stores the negated values.
    return {key: value.detach().resolve_neg() for key, value in model.items()}


def _num_updates(state: dict) -> int | None:
    if isinstance(state.get("steps"), int):
        return state["steps"]
    history = state.get("optimizer_history")
    if isinstance(history, list) and history and isinstance(history[-1], dict):
        number = history[-1].get("num_updates")
        if isinstance(number, numpy.integer) or (contents.is_dense(number) and number.numel() == 1):
            number = number.item()
        return number if isinstance(number, int) else None
    return None
