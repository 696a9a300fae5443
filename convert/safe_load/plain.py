"""Turns the args of a checkpoint into Python's own types, and refuses args that are too many or too deep."""

import argparse
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from luna_mega.convert.safe_load.pickles import DEEPEST, MOST_VALUES
from luna_mega.convert.safe_load.storages import is_dense
from luna_mega.errors import ConversionError

_CHARACTERS_OF_A_VALUE = 100  # a text counts as one value for so many characters


def plain_args(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the args as a dict, without namespaces, tensors and numbers of numpy.

    Raises:
        ConversionError: If the args have more values, or are nested more deeply, than those of any model.
    """
    return _Plain().of(namespace)


class _Plain:
    """Converts values one by one and counts them."""

    def __init__(self) -> None:
        self.values = 0

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return a value in Python's own types."""
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        self._count(value, depth)
        if isinstance(value, numpy.generic) or is_dense(value):
            return value.tolist()
        if isinstance(value, Mapping):
            return {self._key(key): self.of(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return (list if isinstance(value, list) else tuple)(self.of(inner, depth + 1) for inner in value)
        return value

    def _key(self, key: Any) -> str:
        self._count(key, 0)
        return key if isinstance(key, str) else str(key)

    def _count(self, value: Any, depth: int) -> None:
        if depth > DEEPEST:
            raise ConversionError(f"field 'args' holds itself, or is nested more than {DEEPEST} deep")
        self.values += 1
        if isinstance(value, torch.Tensor):
            self.values += value.numel() if is_dense(value) else 0
        elif isinstance(value, (str, bytes, bytearray)):
            self.values += len(value) // _CHARACTERS_OF_A_VALUE
        elif isinstance(value, (set, frozenset)):
            self.values += len(value)
        if self.values > MOST_VALUES:
            raise ConversionError(f"field 'args' holds more than {MOST_VALUES:,} values, and a model has some hundred")
