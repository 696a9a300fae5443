"""Tensors of an export: their dtype, and norm weights that the original code stores minus one."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from luna_mega.convert.evidence import Tensors, same_bits
from luna_mega.convert.keymap import WIDE
from luna_mega.convert.tensors import DTYPES, SOURCE_NORMS, TensorMap, dtype_name


def norms_minus_one(folder: Path, ours: Tensors) -> Tensors:
    """Return the norm weights minus 1; a saved weight is used if adding 1 to it gives the weight of the model."""
    file = folder / SOURCE_NORMS
    saved = load_file(file) if file.is_file() else {}
    lowered = {}
    for name, weight in ours.items():
        kept = name in saved and same_bits((saved[name].float() + 1).to(weight.dtype), weight)
        lowered[name] = saved[name] if kept else weight.float() - 1
    return lowered


def store_tensors(
    tensors: Tensors,
    mapping: TensorMap,
    lowered: Tensors,
    dtype: str | None,
    in_file: dict[str, int],
) -> tuple[Tensors, str, list[str]]:
    """Return the tensors in the dtype of a file, that dtype, and notes on rounding.

    Args:
        tensors: Name in the file -> tensor; a tensor with two names is stored once.
        mapping: Places of the tensors in the model.
        lowered: Norm weights to write instead of the model's.
        dtype: Dtype of the file; None = the converted file's if it is lossless, else the dtype of `tensors`.
        in_file: Dtypes of the converted file, with their numbers of tensors.
    """
    notes, originals = [], {name for name in in_file if getattr(torch, name).is_floating_point}
    if dtype is None:
        floats = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()}
        numbers = {key: tensor for key, tensor in floats.items() if mapping.transforms.get(key) != WIDE}
        stored = {dtype_name(tensor.dtype) for tensor in numbers.values()}
        fitting = [names.pop() for names in (set(originals), stored) if len(names) == 1 and names <= set(DTYPES)]
        read_back = {key: tensor for key, tensor in numbers.items() if key in mapping.mapped}
        dtype = next((name for name in fitting if _keeps_all(read_back, lowered, getattr(torch, name))), "float32")
        if originals and originals != {dtype}:
            notes.append(f"the converted file was {', '.join(sorted(originals))}; {dtype} keeps what the folder has")
    if rounded := sum((weight.float() + 1 != tensors[key].float()).sum().item() for key, weight in lowered.items()):
        notes.append(f"{rounded} norm weights below 0.5 are rounded by up to 6e-8: minus one they need more bits")
    cast: dict[int, torch.Tensor] = {}
    for key, tensor in tensors.items():
        value = lowered.get(key, tensor)
        cast.setdefault(id(tensor), value.to(mapping.dtype_of(key, value, getattr(torch, dtype))))
    return {key: cast[id(tensor)] for key, tensor in tensors.items()}, dtype, notes


def _keeps_all(tensors: Tensors, lowered: Tensors, dtype: torch.dtype) -> bool:
    """Return whether converting a file in `dtype` gives the same tensors."""
    return all(
        same_bits((lowered[key].to(dtype).float() + 1).to(tensor.dtype), (lowered[key].float() + 1).to(tensor.dtype))
        if key in lowered
        else tensor.dtype == dtype or same_bits(tensor.to(dtype).to(tensor.dtype), tensor)
        for key, tensor in tensors.items()
    )
