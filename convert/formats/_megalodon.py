"""Megalodon folders: their files, settings and shards.

`consolidate_config.json` marks a folder that the original's loader reads. Without it, the weights have the layout used
in training.

Each model-parallel rank of the original saves its part of every tensor. The residual stream is split along its
features, and every matrix along its inputs or outputs, contiguously in the order of the ranks
(`megalodon/modules/model_parallel/layers.py`). Heads and groups of the norms are not split.
"""

import argparse
import hashlib
import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from luna_mega.convert.evidence import Tensors, flag, integer, same_bits, size, word
from luna_mega.convert.formats.format import Folder
from luna_mega.convert.safe_load import Checkpoint, read_tensors
from luna_mega.convert.safe_load.contents import plain_args
from luna_mega.convert.tensors import dtype_name
from luna_mega.convert.tokenizers.sentencepiece import PieceModel
from luna_mega.errors import ConversionError, errors_of, shown
from luna_mega.hub.folder import read_json

EMBEDDING = "embed.weight"
CONFIG, CONSOLIDATED = "config.json", "consolidate_config.json"
_DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Args in addition to the model's.
TOKENIZER, SHARDS = "tokenizer", "model_parallel_size"
_EXTRA = 256  # the number of tokens after the pieces is a multiple of this
_WEIGHTS, _TRAINING = "consolidated*.pth", "model.ckpt.*.pth"
_OTHER_RUN = "they are not shards of one checkpoint; pass shards that were saved together"
# The dimension along which a tensor is split; tensors that match no pattern are equal in all shards.
_DIMENSIONS = {
    0: r"layers\.\d+\.(mega\.(w[zvr]|wh1)\.(weight|bias)|mega\.cema\.\w+|nffn\.fc[13]\.weight)"
    r"|(layers\.\d+\.mega\.timenorm|output\.final_norm)\.(weight|bias|prior_mean|prior_logv)",
    1: r"(embed|output\.output)\.weight|layers\.\d+\.(mega\.wh2\.weight|nffn\.fc2\.weight|mega\.gamma|mega\.beta)",
}


def _files(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern) if path.is_file())


def _shard_names(count: int) -> list[str]:
    """Return the names of the files with weights."""
    return ["consolidated.pth"] if count == 1 else [f"consolidated.{rank:02d}.pth" for rank in range(count)]


def tokenizer_settings(value: Any) -> dict[str, Any]:
    """Return the settings of the tokenizer with their defaults; a type of an argument."""
    if not isinstance(value, dict):
        raise ValueError("is not an object")
    defaults = {"path": None, "additional_vocab_size": 0, "data_tokenized": False}
    if unknown := sorted(value.keys() - defaults.keys()):
        raise ValueError(f"has {shown(unknown[0])}, which is not a setting of the original")
    settings = defaults | value
    if settings["path"] is not None:
        word(settings["path"])
    extra = integer(settings["additional_vocab_size"])
    if extra < 0 or extra % _EXTRA:
        raise ValueError(f"has an additional_vocab_size that is no multiple of {_EXTRA}")
    return settings | {"data_tokenized": flag(settings["data_tokenized"])}


def _consolidated(folder: Path) -> tuple[int, str]:
    """Return the number of shards and the name of the dtype."""
    file, weights, training = folder / CONSOLIDATED, _files(folder, _WEIGHTS), _files(folder, _TRAINING)
    if not file.is_file():
        if not weights:
            raise ConversionError(
                f"{folder / training[0]}: sharded training state (FSDP), which the original cannot load again either; "
                "pass the folder of the consolidated checkpoint, with consolidate_config.json"
            )
        raise ConversionError(
            f"{folder}: {weights[0]} without {CONSOLIDATED}, which has the number of shards; copy it there, or write "
            f'{{"{SHARDS}": {len(weights)}, "dtype": "fp32"}} into it'
        )
    content = read_json(file)
    try:
        name, value = SHARDS, content.get(SHARDS)
        count = size(value)
        name, value = "dtype", content.get("dtype")
        if value not in list(_DTYPE_NAMES):
            raise ValueError(f"is not one of {', '.join(_DTYPE_NAMES)}")
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
        raise ConversionError(
            f"{file}: 'model' does not contain the settings of a Megalodon model; copy the file again"
        )
    with errors_of(file):
        return plain_args(argparse.Namespace(**model, **{TOKENIZER: tokenizer}))


def _check_files(folder: Path, count: int) -> None:
    """Raise an error if a shard is missing or if there are too many shards."""
    found = _files(folder, _WEIGHTS)
    expected = _shard_names(min(count, len(found) + 1) if count > 1 else 1)  # `count` is a number from a file
    if missing := [name for name in expected if name not in found]:
        raise ConversionError(
            f"{folder}: {missing[0]} is missing, and {CONSOLIDATED} has {SHARDS} = {count}; copy all shards there"
        )
    if extra := sorted(set(found) - set(expected)):
        raise ConversionError(
            f"{folder}: {extra[0]} is not one of the {count} files of {CONSOLIDATED}; remove the files of another "
            "checkpoint"
        )


def _digest(files: dict[str, Checkpoint]) -> str:
    """Return the SHA-256 of a single file, or of the lines that `sha256sum consolidated.*.pth` prints for shards."""
    if len(files) == 1:
        return next(iter(files.values())).sha256
    return hashlib.sha256("".join(f"{file.sha256}  {name}\n" for name, file in files.items()).encode()).hexdigest()


class MegalodonFolder(Folder):
    """A folder with config.json, consolidate_config.json and consolidated.pth, or consolidated.00.pth and so on."""

    software = "Megalodon"
    settings = "config.json: model"

    def claims(self, folder: Path) -> bool:
        """Return whether a folder contains a Megalodon checkpoint; Llama's weights have the same file names."""
        if _files(folder, CONSOLIDATED) or _files(folder, _TRAINING):
            return True
        try:
            model = read_json(folder / CONFIG).get("model") if _files(folder, _WEIGHTS) else None
        except (ConversionError, OSError):
            return False
        return isinstance(model, dict) and "model_dim" in model

    def read(self, folder: Path, progress: bool) -> Checkpoint:
        """Return the checkpoint; its args are the settings of model and tokenizer, and the number of shards."""
        count, dtype = _consolidated(folder)
        args = _settings(folder) | {SHARDS: count}
        _check_files(folder, count)
        files = {name: read_tensors(folder / name, progress) for name in _shard_names(count)}
        for name, file in files.items():
            if file.archive != Path(name).stem and re.fullmatch(r"consolidated(\.\d+)?", file.archive or ""):
                raise ConversionError(
                    f"{folder}: {name} was saved as {file.archive}.pth; shards are read by name; "
                    "restore the original names"
                )
        with errors_of(folder):
            tensors = join_shards({name: file.tensors for name, file in files.items()})
        warnings = {f"{name}: {file.unchecked}" for name, file in files.items() if file.unchecked}
        unchecked, stored = next(iter(warnings), None), _dtypes(tensors)
        unnamed = [name for name, file in files.items() if file.archive != Path(name).stem]
        if count > 1 and unnamed:
            warnings.add(
                f"the order of the shards was not checked, because torch stored no names in {', '.join(unnamed)} "
                "(paths with non-ASCII characters); check that the number in each name is the rank that saved it"
            )
        if stored != {_DTYPE_NAMES[dtype]}:
            words = ", ".join(sorted(stored))
            warnings.add(f"{CONSOLIDATED}: dtype = {dtype!r} but the tensors are {words}: using the tensors")
        return Checkpoint(
            folder,
            _digest(files),
            next(iter(files.values())).serialization,
            args,
            tensors,
            warnings=tuple(sorted(warnings)),
            unchecked=unchecked,
        )

    def architecture(self, args: dict[str, Any]) -> str:
        return "megalodon"

    def stored_dtype(self, tensors: Tensors) -> str:
        stored = _dtypes(tensors)
        return stored.pop() if len(stored) == 1 and stored <= set(_DTYPE_NAMES.values()) else "float32"


def _dtypes(tensors: Tensors) -> set[str]:
    return {dtype_name(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}


def additional_tokens(model: PieceModel, settings: dict[str, Any], rows: int) -> int:
    """Return the number of tokens after the pieces, which without a tokenizer depends on the vocabulary."""
    pieces = len(model.pieces)
    extra = rows - pieces if settings["path"] is None else settings["additional_vocab_size"]
    if extra < 0 or extra % _EXTRA or pieces + extra != rows:
        raise ConversionError(
            f"{model.path}: {pieces} pieces and {max(extra, 0)} additional tokens do not fit the model, whose "
            f"vocabulary has {rows}; pass the SentencePiece model that it was trained with"
        )
    return extra


def _dimension(name: str) -> int | None:
    return next((dimension for dimension, pattern in _DIMENSIONS.items() if re.fullmatch(pattern, name)), None)


def join_shards(shards: Mapping[str, Tensors]) -> Tensors:
    """Return the tensors of the complete model; `shards` maps file names in the order of the ranks to tensors."""
    first_file, first = next(iter(shards.items()))
    for file, tensors in shards.items():
        if different := sorted(first.keys() ^ tensors.keys()):
            lacks, has = (file, first_file) if different[0] in first else (first_file, file)
            raise ConversionError(f"{lacks} lacks {shown(different[0])}, which {has} has: {_OTHER_RUN}")
        for name, tensor in tensors.items():
            _check_part(name, tensor, file, first[name], first_file)
    for (other_file, others), (file, tensors) in combinations(shards.items(), 2):
        if all(same_bits(tensor, others[name]) for name, tensor in tensors.items() if _dimension(name) is not None):
            raise ConversionError(f"{file} has the same tensors as {other_file}; pass the shard of its rank")
    parts = {name: [tensors[name] for tensors in shards.values()] for name in first}
    return {
        name: part[0] if len(part) == 1 or (dimension := _dimension(name)) is None else torch.cat(part, dimension)
        for name, part in parts.items()
    }


def _check_part(name: str, tensor: torch.Tensor, file: str, first: torch.Tensor, first_file: str) -> None:
    if tensor.shape != first.shape or tensor.dtype != first.dtype:
        raise ConversionError(
            f"{shown(name)} is {tensor.dtype} {list(tensor.shape)} in {file} and {first.dtype} {list(first.shape)} in "
            f"{first_file}: {_OTHER_RUN}"
        )
    dimension = _dimension(name)
    if dimension is None and not same_bits(tensor, first):
        raise ConversionError(f"{shown(name)}, equal in all shards, differs in {file} and {first_file}: {_OTHER_RUN}")
    if dimension is not None and tensor.dim() <= dimension:
        raise ConversionError(f"{shown(name)} has shape {list(tensor.shape)} in {file}, and no dimension {dimension}")
