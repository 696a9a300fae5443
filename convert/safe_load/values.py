"""Values of a loaded checkpoint: tensors that fill their storages, and args as plain Python values.

Limits on numbers and depth, because a small file can contain values that take all memory or time.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

from luna_mega.convert.safe_load.pickles import DEEPEST, MOST_VALUES
from luna_mega.errors import ConversionError, shown

# The original stores tied weights once and does not expand tensors. Small models are not checked.
_MOST_TIMES, _ALWAYS_ALLOWED = 4, 1 << 30
_CHARACTERS_OF_A_VALUE = 100  # number of characters of a text that count as one value


def is_dense(value: Any) -> bool:
    """Return whether a value is a dense tensor on the CPU."""
    if not isinstance(value, torch.Tensor) or value.is_quantized or value.is_nested or value.device.type != "cpu":
        return False
    return value.layout == torch.strided


def check_bytes(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `ConversionError` if tensors expand a small storage."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    needed, stored = sum(tensor.nbytes for tensor in tensors.values()), sum(storages.values())
    if needed > _MOST_TIMES * stored + _ALWAYS_ALLOWED:
        raise ConversionError(
            f"field 'model': its tensors need {needed:,} bytes of memory and repeat {stored:,} of the file, which "
            "the original never saves; the file was modified"
        )


def check_storages(state: dict) -> None:
    """Raise `ConversionError` unless every tensor is contiguous and fills its storage, in a file without checksums.

    The original saves tied parameters with one storage, and other parameters with separate storages.
    """
    elsewhere = {
        value.untyped_storage().data_ptr()
        for value in _values({key: value for key, value in state.items() if key != "model"})
        if is_dense(value)
    }
    for key, tensor in state["model"].items():
        storage = tensor.untyped_storage()
        if not tensor.is_contiguous() or storage.nbytes() != tensor.nbytes:
            raise ConversionError(
                f"tensor {shown(key)} of shape {list(tensor.shape)} and strides {list(tensor.stride())} does not fit "
                f"its storage of {storage.nbytes()} bytes, and the file has no checksums; copy it again, or save it "
                "with a current torch, which adds them"
            )
        if tensor.numel() and storage.data_ptr() in elsewhere:
            raise ConversionError(
                f"tensor {shown(key)} shares its storage with a value outside the model, and the file has no "
                "checksums; copy it again"
            )


def _values(container: Any) -> Iterator[Any]:
    """Yield all values in nested containers, each container once."""
    seen, waiting = set(), [container]
    while waiting:
        value = waiting.pop()
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        if not isinstance(value, (Mapping, list, tuple)):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, Mapping) else value


def plain_args(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the args as a dict of plain values; raise an error if there are more values than in any model."""
    count = 0

    def check(value: Any, depth: int) -> None:
        nonlocal count
        if depth > DEEPEST:
            raise ConversionError(f"field 'args' contains itself, or is nested more than {DEEPEST} deep")
        count += 1
        if isinstance(value, torch.Tensor):
            count += value.numel() if is_dense(value) else 0
        elif isinstance(value, (str, bytes, bytearray)):
            count += len(value) // _CHARACTERS_OF_A_VALUE
        elif isinstance(value, (set, frozenset)):
            count += len(value)
        if count > MOST_VALUES:
            raise ConversionError(
                f"field 'args' contains more than {MOST_VALUES:,} values, but a model has a few hundred"
            )

    def plain(value: Any, depth: int = 0) -> Any:
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        check(value, depth)
        if isinstance(value, numpy.generic) or is_dense(value):
            return value.tolist()
        if isinstance(value, Mapping):
            return {str(plain(key, depth + 1)): plain(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return (list if isinstance(value, list) else tuple)(plain(inner, depth + 1) for inner in value)
        return value

    return plain(namespace)
