"""Shards of a Megalodon checkpoint: each model-parallel rank of the original saves its part of every tensor.

The residual stream is split along its features, and every matrix along its inputs or outputs, contiguously in the order
of the ranks (`megalodon/modules/model_parallel/layers.py`). Heads and groups of the norms are not split.
"""

import re
from collections.abc import Mapping
from itertools import combinations

import torch

from luna_mega.convert.evidence import Tensors, same_bits
from luna_mega.errors import ConversionError, shown

# The dimension along which a tensor is split; tensors that match no pattern are equal in all shards.
_DIMENSIONS = {
    0: r"layers\.\d+\.(mega\.(w[zvr]|wh1)\.(weight|bias)|mega\.cema\.\w+|nffn\.fc[13]\.weight)"
    r"|(layers\.\d+\.mega\.timenorm|output\.final_norm)\.(weight|bias|prior_mean|prior_logv)",
    1: r"(embed|output\.output)\.weight|layers\.\d+\.(mega\.wh2\.weight|nffn\.fc2\.weight|mega\.gamma|mega\.beta)",
}


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


_OTHER_RUN = "they are not shards of one checkpoint; pass shards that were saved together"


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


def split_shards(tensors: Tensors, count: int) -> list[Tensors]:
    """Return the tensors of each of `count` shards, in which tied tensors stay tied."""
    if count == 1:
        return [tensors]
    parts: dict[int, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (dimension := _dimension(name)) is None:
            parts[id(tensor)] = [tensor] * count
        elif id(tensor) not in parts:
            parts[id(tensor)] = [part.clone() for part in tensor.chunk(count, dimension)]
    return [{name: parts[id(tensor)][rank] for name, tensor in tensors.items()} for rank in range(count)]
