"""Reads fairseq checkpoints without executing anything in them.

`torch.load(weights_only=True)` builds nothing but tensors and plain containers; the inert types below are allowed too.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from luna_mega.convert.checksums import read_checksums
from luna_mega.errors import ConversionError

_NUMPY_SCALARS = "?bhilqBHILQefd"
_LATER_FAIRSEQ = (
    "written by a later fairseq (hydra configuration); the Luna and Mega code writes 'args'; give a checkpoint "
    "that this code saved"
)


@dataclass(frozen=True)
class Checkpoint:
    """A fairseq checkpoint: its `args` as a dict of plain values, its tensors, and where they came from.

    `missing_args` is the error for a file without args, None where it has them.
    """

    path: Path
    sha256: str
    serialization: str
    args: dict
    tensors: dict[str, torch.Tensor]
    num_updates: int | None
    warnings: tuple[str, ...] = ()
    missing_args: str | None = None


def _inert_types() -> list:
    """Return `argparse.Namespace` and the parts of a pickled numpy number, under the module names of numpy 1 and 2."""
    scalar = numpy.float64(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")]
    dtypes = {type(numpy.dtype(code)) for code in _NUMPY_SCALARS}
    return [argparse.Namespace, numpy.dtype, *dtypes, *((scalar, name) for name in names)]


def read_checkpoint(path: str | Path, progress: bool = False) -> Checkpoint:
    """Open a checkpoint written by fairseq's `checkpoint_utils.save_state`, zip or legacy serialisation.

    With `progress` a bar is shown on stderr if that is a terminal.

    Raises:
        ConversionError: the file is no such checkpoint, is damaged, asks to run code, or comes from a later fairseq.
    """
    path = Path(path)
    serialization = _serialization(path)
    sha256, warnings = read_checksums(path, serialization == "zip", progress)
    state = _load(path, serialization)
    if not isinstance(state, dict):
        raise ConversionError(f"{path}: holds a {type(state).__name__}, not the dict that fairseq saves")
    if state.get("cfg") is not None:
        raise ConversionError(f"{path}: field 'cfg': {_LATER_FAIRSEQ}")
    found = ", ".join(map(str, list(state)[:5])) or "nothing"
    missing = [
        f"{path}: no field '{field}' (found: {found}): not a fairseq checkpoint; give the file fairseq saved"
        for field in ("args", "model")
        if state.get(field) is None
    ]
    if state.get("model") is None:
        raise ConversionError(missing[0])
    named = argparse.Namespace() if missing else state["args"]
    if not isinstance(named, argparse.Namespace):
        raise ConversionError(f"{path}: field 'args' is a {type(named).__name__}, not an argparse.Namespace")
    tensors = _tensors(path, state["model"])
    try:
        args = _plain(named)
    except RecursionError as error:
        raise ConversionError(f"{path}: field 'args' holds itself or is nested too deeply") from error
    return Checkpoint(path, sha256, serialization, args, tensors, _num_updates(state), tuple(warnings), *missing)


def _plain(value: Any) -> Any:
    """Return a value of the args in Python's own types, without namespaces, tensors and numbers of numpy."""
    if isinstance(value, numpy.generic) or _is_dense(value):
        return value.tolist()
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return value


def _serialization(path: Path) -> str:
    if path.is_dir():
        inside = ", ".join(sorted(p.name for p in path.glob("*.pt"))[:3]) or "none of its files ends in .pt"
        raise ConversionError(f"{path}: is a folder; give the checkpoint file itself ({inside})")
    if not path.is_file():
        raise ConversionError(f"{path}: no such file")
    with path.open("rb") as file:
        start = file.read(16)
    if not start:
        raise ConversionError(f"{path}: the file is empty; copy or download it again")
    if start.startswith(b"PK\x03\x04"):
        return "zip"
    if start.startswith(b"\x80"):
        return "legacy"
    if start[8:10] == b'{"':
        raise ConversionError(f"{path}: a safetensors file, which has no fairseq 'args'; give the .pt file")
    raise ConversionError(f"{path}: not a checkpoint (neither of torch's formats); give the file that fairseq saved")


def _load(path: Path, serialization: str):
    try:
        with torch.serialization.safe_globals(_inert_types()):
            # A mapped file keeps the optimizer state, two thirds of a training checkpoint, out of memory.
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=serialization == "zip")
    except OSError:
        raise
    except Exception as error:  # a broken or hostile pickle may raise any type
        raise ConversionError(f"{path}: {_reason(str(error))}") from error


def _reason(message: str) -> str:
    forbidden = re.search(r"GLOBAL (\S+)", message)
    if forbidden is None:
        first_line = message.strip().splitlines()[0] if message.strip() else "no reason given"
        return f"damaged, truncated or not a checkpoint ({first_line}); copy the file again"
    name = forbidden[1]
    if name.startswith(("omegaconf.", "fairseq.dataclass.")):
        return f"holds {name}: {_LATER_FAIRSEQ}"
    return (
        f"refused, nothing was executed: the file asks to call {name}, which is not a tensor or a plain value; if you "
        "trust its origin, load it where it was written and save only 'args' and 'model' again"
    )


def _tensors(path: Path, model) -> dict[str, torch.Tensor]:
    if not isinstance(model, Mapping):
        raise ConversionError(f"{path}: field 'model' is a {type(model).__name__}, not a state dict")
    for key, value in model.items():
        if not isinstance(key, str) or not _is_dense(value):
            raise ConversionError(f"{path}: field 'model': entry {key!r} is not a dense tensor")
    return dict(model)


def _is_dense(value: Any) -> bool:
    """Return whether a value is a tensor that stores one number for every element."""
    if not isinstance(value, torch.Tensor) or value.is_quantized or value.is_meta:
        return False
    return value.layout == torch.strided


def _num_updates(state: dict) -> int | None:
    if isinstance(state.get("steps"), int):
        return state["steps"]
    history = state.get("optimizer_history")
    if isinstance(history, list) and history and isinstance(history[-1], dict):
        number = _plain(history[-1].get("num_updates"))
        return number if isinstance(number, int) else None
    return None
