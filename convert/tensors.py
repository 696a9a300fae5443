"""Convert tensors: each tensor of a checkpoint is mapped, or dropped for a stated reason; others raise an error."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.evidence import Tensors, same_bits
from luna_mega.convert.keymap import LAYER_NORM, WIDE, KeyMap, Reshape
from luna_mega.errors import ConversionError, reason, shown
from luna_mega.escaping import short_line

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class TensorMap:
    """Places of all tensors of a file.

    Args:
        mapped: Name in the file -> name in the model.
        dropped: Name in the file -> reason.
        transforms: Name in the file -> `transform` of its row.
        absent: Names in the model of counters that a file may lack, and that start at 0.
        tied: Names in the model of copies, which are not saved.
    """

    mapped: dict[str, str]
    dropped: dict[str, str]
    transforms: dict[str, str | Reshape | None]
    absent: list[str]
    tied: frozenset[str]

    @property
    def norm_weights(self) -> list[str]:
        """Return the names of the norm weights in the file."""
        return [key for key, kind in self.transforms.items() if kind == LAYER_NORM and key.endswith(".weight")]

    def reshape(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the file in the shape of the model."""
        transform = self.transforms[key]
        return transform(tensor) if callable(transform) else tensor

    def dtype_of(self, key: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the tensor `key` of a file if the other tensors are stored in `dtype`."""
        if not tensor.is_floating_point():
            return tensor.dtype
        lossy = self.transforms.get(key) == WIDE and not same_bits(tensor.to(dtype).to(tensor.dtype), tensor)
        return torch.promote_types(tensor.dtype, dtype) if lossy else dtype


@dataclass(frozen=True)
class Weights:
    """Weights of the class `name` on the meta device, and copy -> original of tied ones; only originals are saved."""

    name: str
    shapes: Tensors
    tied: dict[str, str]


def weights_of(config: PreTrainedConfig, *model_classes: type[PreTrainedModel]) -> Weights:
    """Return the weights of a model class and of the classes that load from the same folder."""
    models = [meta_model(each, config) for each in dict.fromkeys(model_classes)]
    shapes = {name: tensor for model in models for name, tensor in model.state_dict().items()}
    tied = {copy: original for model in models for copy, original in model.all_tied_weights_keys.items()}
    return Weights(model_classes[0].__name__, shapes, tied)


def map_tensors(keymap: KeyMap, weights: Weights, tensors: Tensors) -> TensorMap:
    """Return the places of all tensors; raise an error if names, shapes or dtypes differ from the model's."""
    mapped, dropped, transforms, unexpected = {}, {}, {}, []
    expected, tied = weights.shapes, {row.source: row.copy_of for row in keymap.rows if row.copy_of is not None}
    if lost := next((copy for copy in tied if copy not in tensors), None):  # the model lacks the copy
        raise ConversionError(f"tensor {lost!r} is missing; the file is incomplete")
    for key in tensors:
        match = keymap.forward(key)
        if match is None or match.key not in (None, *expected):
            unexpected.append(key)
        elif match.key is None:
            dropped[key] = match.reason
        else:
            mapped[key], transforms[key] = match.key, match.row.transform
    sources = {target: key for key, target in mapped.items()}
    without = [target for target in expected if target not in sources]
    absent = [target for target in without if target.endswith(".num_batches_tracked")]
    unfilled = ((target, keymap.backward(target)) for target in without if target not in absent)
    missing = [target if match is None else match.key for target, match in unfilled]
    named = {"missing": missing, "unexpected": unexpected}
    if problems := [f"{problem}: {few(keys)}" for problem, keys in named.items() if keys]:
        raise ConversionError(
            f"the tensors do not match {weights.name} ({'; '.join(problems)}); the file is incomplete or of a "
            "modified model"
        )
    mapping = TensorMap(mapped, dropped, transforms, absent, frozenset(weights.tied))
    for key, target in mapped.items():
        _check(key, mapping.reshape(key, tensors[key]), expected[target])
    tied |= {sources[a]: sources[b] for a, b in weights.tied.items() if {a, b} <= sources.keys()}
    for copy, original in tied.items():
        if original in tensors and not same_bits(tensors[copy], tensors[original]):
            raise ConversionError(
                f"tensors {copy!r} and {original!r} are tied in the original but differ; the file was modified"
            )
    return mapping


def _check(key: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    if tensor.shape != expected.shape:
        raise ConversionError(
            f"tensor {shown(key)} has shape {list(tensor.shape)}, the model needs {list(expected.shape)}"
        )
    if expected.is_floating_point() and not tensor.is_floating_point():
        raise ConversionError(
            f"tensor {shown(key)} has dtype {dtype_name(tensor.dtype)}, but the model has real weights; the file was "
            "changed"
        )


def convert_tensors(mapping: TensorMap, tensors: Tensors, plus_one: bool, dtype: torch.dtype) -> Tensors:
    """Return the tensors with their new names in `dtype`; `plus_one` adds 1 to the norm weights.

    Integers stay integers. Every tensor has its own storage, because transformers saves a shared storage only once,
    even if the model does not tie the tensors.
    """
    raised = set(mapping.norm_weights) if plus_one else set()
    converted = {}
    for key, target in mapping.mapped.items():
        tensor = tensors[key].float().add(1) if key in raised else tensors[key]
        if target not in mapping.tied:
            converted[target] = mapping.reshape(key, tensor).to(mapping.dtype_of(key, tensor, dtype), copy=True)
    return converted | {target: torch.zeros((), dtype=torch.long) for target in mapping.absent}


def check_unshared(mapping: TensorMap, tensors: Tensors) -> None:
    """Raise `ConversionError` if tensors that are not tied share a storage."""
    owners: dict[int, str] = {}
    for key, target in mapping.mapped.items():
        if tensors[key].numel() and target not in mapping.tied:
            owner = owners.setdefault(tensors[key].data_ptr(), key)
            if owner != key:
                raise ConversionError(
                    f"tensors {shown(owner)} and {shown(key)} share a storage, which is not so in the original, and "
                    "the file has no checksums; copy it again"
                )


def meta_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a float32 model without memory."""
    try:
        with torch.device("meta"):
            return model_class._from_config(config, dtype=torch.float32)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:  # of torch, for sizes that no tensor has
        raise ConversionError(f"the sizes of the configuration are invalid: {reason(error)}") from error


def few(keys: list[str]) -> str:
    """Return the first five names and the number of the others."""
    return ", ".join(map(short_line, keys[:5])) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def non_finite(names: list[str], tensors: Tensors) -> str:
    """Return the message that `names` of the tensors have NaN or Inf."""
    return f"NaN or Inf in {len(names)} of {len(tensors)} tensors: {few(names)}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
