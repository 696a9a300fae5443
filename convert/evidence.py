"""Args and tensors of a checkpoint, checked against each other."""

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from luna_mega.errors import ConversionError, shown


@dataclass
class Evidence:
    """Tensors, args, code revision and default arguments of one checkpoint.

    Args:
        tensors: the tensors under the names of the key map.
        args: the args, in their types.
        revision: the revision of the original code.
        defaults: name of an argument -> its default, or a function of the evidence that returns it.
        settings: the place of the args, for messages.
        head: the option `--head`.
        warnings: warnings that were found so far.
        left_out: names of the tensors that the conversion of an exported model dropped.
    """

    tensors: dict[str, torch.Tensor]
    args: dict[str, Any]
    revision: str
    defaults: dict[str, Any]
    settings: str = "args"
    head: str | None = None
    warnings: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def arg(self, name: str) -> Any:
        """Return the argument, or the default of the architecture if it is missing."""
        value, default = self.args.get(name), self._default(name)
        if value is None and default is None:
            raise ConversionError(
                f"args.{name} is missing and args.arch = {shown(self.args.get('arch'))} has no known default for it; "
                "add it to the checkpoint's args"
            )
        return default if value is None else value

    def _default(self, name: str) -> Any:
        default = self.defaults.get(name)
        return default(self) if callable(default) else default

    def shown(self, name: str) -> str:
        """Return `args.NAME = VALUE` for a message, in one line."""
        return f"{self.settings}.{name} = {shown(self.args.get(name, self._default(name)))}"

    def shape(self, key: str, *dims: str) -> tuple[int, ...]:
        """Return the shape of a tensor; an error if it is missing or has other dimensions than `dims` names."""
        if key not in self.tensors:
            raise ConversionError(f"tensor {key!r} is missing; the file is incomplete")
        shape = tuple(self.tensors[key].shape)
        if len(shape) != len(dims):
            raise ConversionError(f"tensor {key!r} has shape {list(shape)}, expected [{', '.join(dims)}]")
        return shape

    def warn(self, text: str) -> None:
        """Add a warning, once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def prefer(self, name: str, from_file: int | bool | str) -> int | bool | str:
        """Return the value of the tensors, and warn if the argument differs."""
        value = self.args.get(name)
        if value is not None and value != from_file:
            self.warn(f"{self.shown(name)} but the tensors say {shown(from_file)}: the tensors win")
        return from_file

    def layers(self, prefix: str) -> int:
        """Return the number of layers in the file, which must be numbered from 0 without a gap."""
        numbers = {int(match[1]) for key in self.tensors if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", key))}
        if numbers != set(range(len(numbers))) or not numbers:
            raise ConversionError(f"layers {sorted(numbers)} of '{prefix}' are not 0 to n-1; the file is incomplete")
        return len(numbers)

    def unshared_layers(self, prefix: str, name: str = "encoder_layers") -> int:
        """Return the number of layers in the file; the argument `name`, if it is given, must agree."""
        in_file, in_args = self.layers(prefix), self.args.get(name)
        if in_args not in (None, in_file):
            raise ConversionError(
                f"{self.shown(name)} but the file holds {in_file} layers under '{prefix}'; "
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
