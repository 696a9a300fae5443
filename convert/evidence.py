"""The args and tensors of a checkpoint, checked against each other, and the model that they describe.

The type of an argument is a function that returns a Python value, or raises a `ValueError` such as "is not a number".
The caller prepends the name of the argument and the value.
"""

import re
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.errors import ConversionError, shown

Tensors = dict[str, torch.Tensor]
_LARGEST = 2**31 - 1


def flag(value: Any) -> bool:
    """Return a bool; 0 and 1 are converted."""
    if not isinstance(value, Integral) or value not in (0, 1):
        raise ValueError("is neither True nor False")
    return bool(value)


def integer(value: Any) -> int:
    """Return a 32-bit integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError("is not an integer")
    if abs(value) > _LARGEST:
        raise ValueError(f"is not from {-_LARGEST} to {_LARGEST}")
    return int(value)


def size(value: Any) -> int:
    """Return an integer from 1 to 2^31 - 1."""
    if (number := integer(value)) < 1:
        raise ValueError(f"is not from 1 to {_LARGEST}")
    return number


def number(value: Any) -> int | float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("is not a number")
    if not abs(value) < 1e38:  # NaN fails as well
        raise ValueError("is not a finite number")
    return value


def word(value: Any) -> str:
    """Return a string of printable characters in one line."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("is not a name")
    return value


def language(value: Any) -> str:
    """Return the name of a language, which is part of file names."""
    if not re.fullmatch(r"[\w.@-]*", word(value)):
        raise ValueError("is not the name of a language: it has letters, digits, '_', '-', '.' and '@' only")
    return value


def cutoffs(value: Any) -> Any:
    """Return the cutoffs of an adaptive vocabulary: a list of integers or, in the original, its text."""
    if isinstance(value, str) and re.fullmatch(r"[\d\s,()\[\]]*", value, re.ASCII):
        numbers = [int(digits[:11]) for digits in re.findall(r"\d+", value)]
    elif isinstance(value, (list, tuple)):
        numbers = value
    else:
        raise ValueError("is not a list of integers such as '20000,60000'")
    for end in numbers:
        size(end)
    return value


def mean_and_deviation(value: Any) -> tuple[int | float, int | float]:
    """Return two finite numbers."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("is not a pair of numbers")
    return number(value[0]), number(value[1])


@dataclass(frozen=True)
class ModelSpec:
    """The model in a checkpoint: its class, configuration, revision of the code, and name of its head."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    revision: str
    head: str | None = None

    @property
    def vocab_size(self) -> int | None:
        """Return the number of rows of the embedding; None for a model without tokens."""
        return self.config.vocab_size if self.config.input_type == "tokens" else None


@dataclass
class Evidence:
    """Tensors, args, code revision and default arguments of one checkpoint.

    Args:
        tensors: Tensors, with the names of the key map.
        args: Args, in the types of the table.
        revision: Revision of the original code.
        defaults: Name of an argument -> its default, or a function that returns it from the evidence.
        settings: Name of the args in messages.
        head: Value of `--head`.
        warnings: Warnings so far.
    """

    tensors: Tensors
    args: dict[str, Any]
    revision: str
    defaults: dict[str, Any]
    settings: str = "args"
    head: str | None = None
    warnings: list[str] = field(default_factory=list)

    def arg(self, name: str) -> Any:
        """Return the argument, or the default of the architecture if it is missing."""
        if (value := self.args.get(name)) is not None:
            return value
        if (default := self._default(name)) is None:
            raise ConversionError(
                f"args.{name} is missing and args.arch = {shown(self.args.get('arch'))} has no known default for it; "
                "add it to the checkpoint's args"
            )
        return default

    def _default(self, name: str) -> Any:
        default = self.defaults.get(name)
        return default(self) if callable(default) else default

    def shown(self, name: str) -> str:
        """Return `args.NAME = VALUE` in one line, for a message."""
        return f"{self.settings}.{name} = {shown(self.args.get(name, self._default(name)))}"

    def shape(self, key: str, *dims: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raise an error if it is missing or its dimensions are not `dims`."""
        if key not in self.tensors:
            raise ConversionError(f"tensor {key!r} is missing; the file is incomplete")
        shape = tuple(self.tensors[key].shape)
        if len(shape) != len(dims):
            raise ConversionError(f"tensor {key!r} has shape {list(shape)}, expected [{', '.join(dims)}]")
        return shape

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def prefer(self, name: str, from_file: int | bool | str) -> int | bool | str:
        """Return `from_file`, the value of the tensors, and warn if the argument differs."""
        value = self.args.get(name)
        if value is not None and value != from_file:
            self.warn(f"{self.shown(name)} but the tensors have {shown(from_file)}: using the tensors")
        return from_file

    def ties(self, name: str, requested: bool, output: str, embedding: str) -> dict[str, bool]:
        """Return whether the output layer is tied: it equals the embedding, and the argument `name` does not untie it.

        `requested` is the value of the argument that ties them.
        """
        self.shape(output, "vocabulary", "width")
        same = embedding in self.tensors and same_bits(self.tensors[output], self.tensors[embedding])
        if not same:
            self.prefer(name, not requested)
        return {"tie_word_embeddings": same and self.args.get(name) in (None, requested)}

    def layers(self, prefix: str) -> int:
        """Return the number of layers in the file; raise an error unless they are numbered 0 to n - 1."""
        numbers = {int(match[1]) for key in self.tensors if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", key))}
        if numbers != set(range(len(numbers))) or not numbers:
            raise ConversionError(f"layers {sorted(numbers)} of '{prefix}' are not 0 to n-1; the file is incomplete")
        return len(numbers)

    def unshared_layers(self, prefix: str, name: str = "encoder_layers") -> int:
        """Return the number of layers in the file; raise an error if the argument `name` differs."""
        in_file, in_args = self.layers(prefix), self.args.get(name)
        if in_args not in (None, in_file):
            raise ConversionError(
                f"{self.shown(name)} but the file has {in_file} layers under '{prefix}'; "
                "the file is incomplete, or its args belong to another model"
            )
        return in_file


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal in every bit, so that a NaN equals itself."""
    if first is second:
        return True
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # Contiguous, because an expanded tensor cannot be viewed as bytes.
    first, second = (x.contiguous().reshape(-1).view(torch.uint8) for x in (first, second))
    return torch.equal(first, second)
