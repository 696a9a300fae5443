"""Reading of a Megalodon folder: its files, their settings, and the joined shards.

`consolidate_config.json` marks a folder that the original's loader reads; without it the weights are those of training.
"""

import argparse
import hashlib
import re
from pathlib import Path
from typing import Any

from luna_mega.convert.argtypes import flag, size, whole, word
from luna_mega.convert.formats._shards import join_shards
from luna_mega.convert.safe_load import Checkpoint, TensorFile, read_tensors
from luna_mega.convert.safe_load.plain import plain_args
from luna_mega.convert.tensors import dtype_name
from luna_mega.errors import ConversionError, shown
from luna_mega.hub.folder import read_json

CONFIG, CONSOLIDATED = "config.json", "consolidate_config.json"
FILE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Names of the args next to those of the model.
TOKENIZER, SHARDS = "tokenizer", "model_parallel_size"
EXTRA = 256  # the number of tokens after the pieces is a multiple of this
_WEIGHTS, _TRAINING = "consolidated*.pth", "model.ckpt.*.pth"


def has_folder(folder: Path) -> bool:
    """Return whether a folder contains a Megalodon checkpoint; Llama's weights have the same file names."""
    if _files(folder, CONSOLIDATED) or _files(folder, _TRAINING):
        return True
    return bool(_files(folder, _WEIGHTS)) and (folder / CONFIG).is_file() and _has_width(folder / CONFIG)


def _has_width(file: Path) -> bool:
    try:
        model = read_json(file).get("model")
    except ConversionError:
        return False
    return isinstance(model, dict) and "model_dim" in model


def _files(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern) if path.is_file())


def shard_names(count: int) -> list[str]:
    """Return the names of the weight files."""
    return ["consolidated.pth"] if count == 1 else [f"consolidated.{rank:02d}.pth" for rank in range(count)]


def tokenizer_settings(value: Any) -> dict[str, Any]:
    """Return the settings of the tokenizer, with their defaults; the type of an argument."""
    if not isinstance(value, dict):
        raise ValueError("is not an object")
    defaults = {"path": None, "additional_vocab_size": 0, "data_tokenized": False}
    if unknown := sorted(value.keys() - defaults.keys()):
        raise ValueError(f"has {shown(unknown[0])}, which the original does not know")
    settings = defaults | value
    if settings["path"] is not None:
        word(settings["path"])
    extra = whole(settings["additional_vocab_size"])
    if extra < 0 or extra % EXTRA:
        raise ValueError(f"has an additional_vocab_size that is no multiple of {EXTRA}")
    return settings | {"data_tokenized": flag(settings["data_tokenized"])}


def read_folder(folder: Path, progress: bool) -> Checkpoint:
    """Return the checkpoint in a folder.

    Its args are the settings of the model and of the tokenizer, and the number of shards.

    Raises:
        ConversionError: a file is missing or damaged, or the shards are not of one model.
    """
    count, dtype = _consolidated(folder)
    args = _settings(folder) | {SHARDS: count}
    _check_files(folder, count)
    files = {name: read_tensors(folder / name, progress) for name in shard_names(count)}
    try:
        _check_archives(files)
        tensors = join_shards({name: file.tensors for name, file in files.items()})
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from error
    warnings = {f"{name}: {file.unchecked}" for name, file in files.items() if file.unchecked}
    stored = {dtype_name(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    if stored != {FILE_DTYPES[dtype]}:
        words = ", ".join(sorted(stored))
        warnings.add(f"{CONSOLIDATED}: dtype = {dtype!r} but the tensors are {words}: the tensors win")
    return Checkpoint(
        folder,
        _digest(files),
        next(iter(files.values())).serialization,
        args,
        tensors,
        num_updates=None,
        warnings=tuple(sorted(warnings)),
        unchecked=any(file.unchecked for file in files.values()),
    )


def _consolidated(folder: Path) -> tuple[int, str]:
    """Return the number of shards and the name of the dtype."""
    file, weights, training = folder / CONSOLIDATED, _files(folder, _WEIGHTS), _files(folder, _TRAINING)
    if not file.is_file():
        if not weights:
            raise ConversionError(
                f"{folder / training[0]}: sharded training state (FSDP), which the original cannot load again either; "
                "give the folder of the consolidated checkpoint, with consolidate_config.json"
            )
        raise ConversionError(
            f"{folder}: {weights[0]} without {CONSOLIDATED}, which tells the number of shards; copy it there, or write "
            f'{{"{SHARDS}": {len(weights)}, "dtype": "fp32"}} into it'
        )
    content = read_json(file)
    try:
        name, value = SHARDS, content.get(SHARDS)
        count = size(value)
        name, value = "dtype", content.get("dtype")
        if not isinstance(value, str) or value not in FILE_DTYPES:
            raise ValueError(f"is not one of {', '.join(FILE_DTYPES)}")
    except ValueError as error:
        raise ConversionError(f"{file}: {name} = {shown(value)} {error}") from error
    return count, value


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        raise ConversionError(f"{folder}: no {CONFIG}, which has the sizes of the model; copy it there")
    content = read_json(file)
    model, tokenizer = content.get("model"), content.get(TOKENIZER, {})
    if not isinstance(model, dict) or {TOKENIZER, SHARDS} & model.keys():
        raise ConversionError(f"{file}: 'model' does not hold the settings of a Megalodon model; copy the file again")
    try:
        return plain_args(argparse.Namespace(**model, **{TOKENIZER: tokenizer}))
    except ConversionError as error:
        raise ConversionError(f"{file}: {error}") from error


def _check_files(folder: Path, count: int) -> None:
    """Raise an error if a shard is missing, or if there are too many."""
    there, wanted = _files(folder, _WEIGHTS), set()
    for name in shard_names(min(count, len(there) + 1)) if count > 1 else shard_names(1):
        wanted.add(name)
        if name not in there:
            raise ConversionError(
                f"{folder}: {name} is missing, and {CONSOLIDATED} has {SHARDS} = {count}; copy all shards there"
            )
    if extra := sorted(set(there) - wanted):
        raise ConversionError(
            f"{folder}: {extra[0]} is none of the {count} files that {CONSOLIDATED} tells of; take away the files of "
            "another checkpoint"
        )


def _check_archives(files: dict[str, TensorFile]) -> None:
    """Raise `ConversionError` if a file was saved under the name of another shard; other names say nothing."""
    for name, file in files.items():
        if file.archive != Path(name).stem and re.fullmatch(r"consolidated(\.\d+)?", file.archive or ""):
            raise ConversionError(
                f"{name} was saved as {file.archive}.pth; shards are in the order of their names, so restore them"
            )


def _digest(files: dict[str, TensorFile]) -> str:
    """Return the SHA-256 of the file; with shards, of the lines that `sha256sum consolidated.*.pth` prints."""
    if len(files) == 1:
        return next(iter(files.values())).sha256
    return hashlib.sha256("".join(f"{file.sha256}  {name}\n" for name, file in files.items()).encode()).hexdigest()
