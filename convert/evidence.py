"""What args and shapes of a checkpoint say, checked against each other."""

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from luna_mega.errors import ConversionError

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "relu": "relu",
    "tanh": "tanh",
    "silu": "silu",
    "linear": "linear",
}
# Our name -> fairseq's; of two that mean the same the one that is not deprecated.
FAIRSEQ_ACTIVATIONS = {ours: theirs for theirs, ours in _ACTIVATIONS.items() if theirs != "gelu_fast"}


@dataclass
class Evidence:
    """Tensors and args of one checkpoint, the defaults of its architecture, and the warnings met on the way."""

    tensors: dict[str, torch.Tensor]
    args: dict[str, Any]
    defaults: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    def arg(self, name: str) -> Any:
        """The argument, else the default of the architecture."""
        value = self.args.get(name)
        if value is None and self.defaults.get(name) is None:
            raise ConversionError(
                f"args.{name} is missing and args.arch = {self.args.get('arch')!r} has no known default for it; "
                "add it to the checkpoint's args"
            )
        return self.defaults[name] if value is None else value

    def activation(self, name: str) -> str:
        """The activation function of argument `name` under its transformers name."""
        value = self.arg(name)
        if value not in _ACTIVATIONS:
            raise ConversionError(f"args.{name} = {value!r} is not one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def shape(self, key: str, *dims: str) -> tuple[int, ...]:
        """The shape of a tensor that must be there with dimensions `dims` (their names, for the message)."""
        if key not in self.tensors:
            raise ConversionError(f"tensor {key!r} is missing; the file is incomplete")
        shape = tuple(self.tensors[key].shape)
        if len(shape) != len(dims):
            raise ConversionError(f"tensor {key!r} has shape {list(shape)}, expected [{', '.join(dims)}]")
        return shape

    def prefer(self, name: str, from_file: int | bool | str) -> int | bool | str:
        """What the tensors say; a warning when the argument disagrees."""
        value = self.args.get(name)
        if value is not None and value != from_file:
            self.warnings.append(f"args.{name} = {value} but the tensors say {from_file}: the tensors win")
        return from_file

    def layers(self, prefix: str) -> int:
        """How many layers the file has; they are numbered from 0 without a gap."""
        numbers = {int(match[1]) for key in self.tensors if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", key))}
        if numbers != set(range(len(numbers))) or not numbers:
            raise ConversionError(f"layers {sorted(numbers)} of '{prefix}' are not 0 to n-1; the file is incomplete")
        return len(numbers)

    def unshared_layers(self, prefix: str, name: str = "encoder_layers") -> int:
        """How many layers the file has, which must be the number in the args, `name`, if that is given."""
        in_file, in_args = self.layers(prefix), self.args.get(name)
        if in_args not in (None, in_file):
            raise ConversionError(
                f"args.{name} = {in_args} but the file holds {in_file} layers under '{prefix}'; "
                "the file is incomplete or its args are of another model"
            )
        return in_file

    def tied_key_value(self) -> bool:
        """Whether keys and values share one projection: there are no `pk_proj` and `pv_proj`."""
        return not any(".self_attn.pk_proj." in key for key in self.tensors)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equality in every bit, so that a NaN equals itself."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
