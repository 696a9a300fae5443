"""Convert the args of a checkpoint to built-in Python values, with limits on their number and depth."""

import argparse
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from luna_mega.convert.safe_load.pickles import DEEPEST, MOST_VALUES
from luna_mega.convert.safe_load.storages import is_dense
from luna_mega.errors import ConversionError

_CHARACTERS_OF_A_VALUE = 100  # number of characters of a text that count as one value


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
