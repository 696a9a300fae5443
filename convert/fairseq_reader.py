"""Reads fairseq checkpoints without executing anything that is in them.

`torch.load(weights_only=True)` builds tensors and plain containers only; the inert types below are allowed besides.
"""

import argparse
import hashlib
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from luna_mega.errors import ConversionError

_NUMPY_SCALARS = "?bhilqBHILQefd"
_LATER_FAIRSEQ = (
    "written by a later fairseq (hydra configuration), while the Luna and Mega code writes 'args'; give a checkpoint "
    "that this code saved"
)


@dataclass(frozen=True)
class Checkpoint:
    """A fairseq checkpoint: its `args` as a dict, its tensors, and where they came from."""

    path: Path
    sha256: str
    serialization: str
    args: dict
    tensors: dict[str, torch.Tensor]
    num_updates: int | None


def _inert_types() -> list:
    """`argparse.Namespace`, and what a pickled numpy number is made of (under the module names of numpy 1 and 2)."""
    scalar = numpy.float64(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")]
    dtypes = {type(numpy.dtype(code)) for code in _NUMPY_SCALARS}
    return [argparse.Namespace, numpy.dtype, *dtypes, *((scalar, name) for name in names)]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a checkpoint written by fairseq's `checkpoint_utils.save_state`, zip or legacy serialisation.

    Raises:
        ConversionError: not such a file, a damaged one, one that asks to run code, or one of another generation.
    """
    path = Path(path)
    serialization = _serialization(path)
    state = _load(path, serialization)
    if not isinstance(state, dict):
        raise ConversionError(f"{path}: holds a {type(state).__name__}, not the dict that fairseq saves")
    if state.get("cfg") is not None:
        raise ConversionError(f"{path}: field 'cfg': {_LATER_FAIRSEQ}")
    for field in ("args", "model"):
        if state.get(field) is None:
            found = ", ".join(map(str, list(state)[:5])) or "nothing"
            raise ConversionError(
                f"{path}: no field '{field}' (found: {found}): not a fairseq checkpoint; give the file fairseq saved"
            )
    if not isinstance(state["args"], argparse.Namespace):
        raise ConversionError(f"{path}: field 'args' is a {type(state['args']).__name__}, not an argparse.Namespace")
    args = {k: v.item() if isinstance(v, numpy.generic) else v for k, v in vars(state["args"]).items()}
    return Checkpoint(path, _sha256(path), serialization, args, _tensors(path, state["model"]), _num_updates(state))


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
        if not zipfile.is_zipfile(path):
            raise ConversionError(f"{path}: truncated (the zip directory at its end is missing); copy it again")
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
    except Exception as error:  # a broken or hostile pickle can raise any type
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
        if not isinstance(key, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise ConversionError(f"{path}: field 'model': entry {key!r} is not a dense tensor")
    return dict(model)


def _num_updates(state: dict) -> int | None:
    history = state.get("optimizer_history")
    if isinstance(history, list) and history and isinstance(history[-1], dict):
        return history[-1].get("num_updates")
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
