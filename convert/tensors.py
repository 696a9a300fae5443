"""Conversion of tensors: each tensor of a checkpoint is mapped, dropped with a reason, or an error."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.evidence import same_bits
from luna_mega.convert.keymap import LAYER_NORM, WIDE, KeyMap, Reshape
from luna_mega.errors import ConversionError, shown

DTYPES = ("float32", "float16", "bfloat16")
# The norm weights of a plus-one checkpoint before 1 was added, which rounds them; an export writes these.
_SOURCE_NORMS = "source_norms.safetensors"


@dataclass(frozen=True)
class Mapping:
    """Places of all tensors. `mapped`: source name -> target name; `dropped`: source name -> reason.

    `norm_weights` and `wide`, which a narrower dtype must not round: source names; `absent`: target names of counters
    that a file may lack, and that start at 0; `tied`: target names of copies, which are not saved; `reshaped`: source
    name -> transform.
    """

    mapped: dict[str, str]
    dropped: dict[str, str]
    norm_weights: list[str]
    absent: list[str]
    wide: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    reshaped: dict[str, Reshape] = field(default_factory=dict)

    def dtype_of(self, key: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the tensor `key` of a file is stored if the others are stored in `dtype`."""
        if not tensor.is_floating_point():
            return tensor.dtype
        lossy = key in self.wide and not same_bits(tensor.to(dtype).to(tensor.dtype), tensor)
        return torch.promote_types(tensor.dtype, dtype) if lossy else dtype


@dataclass(frozen=True)
class Weights:
    """The weights of a model class, and of the classes that load from the same folder.

    Args:
        name: name of the class.
        shapes: name -> tensor without memory.
        tied: copy -> original of tied weights; only the original is saved.
    """

    name: str
    shapes: dict[str, torch.Tensor]
    tied: dict[str, str]


def weights_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Weights:
    """Return the weights of a model class."""
    model = without_memory(model_class, config)
    return Weights(model_class.__name__, model.state_dict(), model.all_tied_weights_keys)


def together(weights: Iterable[Weights]) -> Weights:
    """Return the weights of the first class and of the others, which load from the same folder."""
    first, *others = weights
    shapes, tied = dict(first.shapes), dict(first.tied)
    for other in others:
        shapes |= other.shapes
        tied |= other.tied
    return Weights(first.name, shapes, tied)


def map_tensors(keymap: KeyMap, weights: Weights, tensors: dict[str, torch.Tensor]) -> Mapping:
    """Find the place of every tensor and check it against the model.

    Raises:
        ConversionError: If the names differ from those of the model, or a tensor has another shape or no real numbers.
    """
    mapped, dropped, norm_weights, unexpected, wide, reshaped = {}, {}, [], [], [], {}
    _check_copies(keymap, tensors)
    expected = weights.shapes
    for key in tensors:
        match = keymap.forward(key)
        if match is None or match.key not in (None, *expected):
            unexpected.append(key)
        elif match.key is None:
            dropped[key] = match.reason
        else:
            mapped[key] = match.key
            if match.row.transform == LAYER_NORM and key.endswith(".weight"):
                norm_weights.append(key)
            elif match.row.transform == WIDE:
                wide.append(key)
            elif isinstance(match.row.transform, Reshape):
                reshaped[key] = match.row.transform
    filled = set(mapped.values())
    without = [target for target in expected if target not in filled]
    absent = [target for target in without if target.endswith(".num_batches_tracked")]
    missing = [_source_name(keymap, target) for target in without if target not in absent]
    named = {"missing": missing, "unexpected": unexpected}
    problems = [f"{problem}: {few(keys)}" for problem, keys in named.items() if keys]
    if problems:
        raise ConversionError(
            f"the tensors are not those of {weights.name} ({'; '.join(problems)}); the file is incomplete or of a "
            "changed model"
        )
    for key, target in mapped.items():
        tensor = reshaped[key].there(tensors[key]) if key in reshaped else tensors[key]
        _check(key, tensor, expected[target])
    sources = {target: key for key, target in mapped.items()}
    for copy, original in weights.tied.items():
        if copy in sources and original in sources:
            _check_tied(sources[copy], sources[original], tensors)
    return Mapping(mapped, dropped, norm_weights, absent, frozenset(wide), frozenset(weights.tied), reshaped)


def _check_copies(keymap: KeyMap, tensors: dict[str, torch.Tensor]) -> None:
    """Check the copies that a file has and a model lacks."""
    for row in keymap.rows:
        if row.copy_of is not None:
            if row.source not in tensors:
                raise ConversionError(f"tensor {row.source!r} is missing; the file is incomplete")
            _check_tied(row.source, row.copy_of, tensors)


def _check_tied(copy: str, original: str, tensors: dict[str, torch.Tensor]) -> None:
    if original in tensors and not same_bits(tensors[copy], tensors[original]):
        raise ConversionError(
            f"tensors {copy!r} and {original!r} are tied in the original but differ; the file was changed"
        )


def _check(key: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
    if tensor.shape != expected.shape:
        raise ConversionError(
            f"tensor {shown(key)} has shape {list(tensor.shape)}, the model needs {list(expected.shape)}"
        )
    if expected.is_floating_point() and not tensor.is_floating_point():
        raise ConversionError(
            f"tensor {shown(key)} has dtype {dtype_name(tensor.dtype)} where the model has real-valued weights; the "
            "file was changed"
        )


def convert_tensors(
    mapping: Mapping, tensors: dict[str, torch.Tensor], plus_one: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tensors under their new names in `dtype`; with `plus_one` the norm weights are stored minus one.

    Integers stay integers. Every tensor gets its own storage, because transformers saves shared storage once, even if
    the model does not tie the tensors.
    """
    raised = set(mapping.norm_weights) if plus_one else set()
    converted = {}
    for key, target in mapping.mapped.items():
        tensor = tensors[key].float().add(1) if key in raised else tensors[key]
        if key in mapping.reshaped:
            tensor = mapping.reshaped[key].there(tensor)
        if target not in mapping.tied:
            converted[target] = tensor.to(mapping.dtype_of(key, tensor, dtype), copy=True)
    return converted | {target: torch.zeros((), dtype=torch.long) for target in mapping.absent}


def check_unshared(mapping: Mapping, tensors: dict[str, torch.Tensor]) -> None:
    """Raise an error if tensors share a storage, except for copies of tied tensors.

    Raises:
        ConversionError: If two tensors that the model does not tie share a storage.
    """
    owners: dict[int, str] = {}
    for key, target in mapping.mapped.items():
        if tensors[key].numel() and target not in mapping.tied:
            owner = owners.setdefault(tensors[key].data_ptr(), key)
            if owner != key:
                raise ConversionError(
                    f"tensors {shown(owner)} and {shown(key)} share their numbers, which the original never saves so, "
                    "and the file has no checksums; copy it again"
                )


def without_memory(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, with names and shapes only."""
    with torch.device("meta"):
        return model_class(config)


def few(keys: list[str]) -> str:
    """Return the first five names and the number of the others."""
    return ", ".join(map(readable, keys[:5])) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def non_finite(names: list[str], tensors: dict[str, torch.Tensor]) -> str:
    """Return the message that `names` of the tensors have NaN or Inf."""
    return f"NaN or Inf in {len(names)} of {len(tensors)} tensors: {few(names)}"


def readable(text: str) -> str:
    """Return a text of a file for a message: one line of at most 200 characters, without control characters."""
    return shown(" ".join(text.split()))[1:-1]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as `float16`."""
    return str(dtype).removeprefix("torch.")


def save_source_norms(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the norm weights of the file, under fairseq's names, to the folder of the model."""
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / _SOURCE_NORMS)


def lowered_norms(folder: Path, ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the norm weights `ours` minus one; a saved weight is used if it plus one equals the model's."""
    file = folder / _SOURCE_NORMS
    saved = load_file(file) if file.is_file() else {}
    lowered = {}
    for name, weight in ours.items():
        kept = name in saved and same_bits((saved[name].float() + 1).to(weight.dtype), weight)
        lowered[name] = saved[name] if kept else weight.float() - 1
    return lowered


def store_tensors(
    tensors: dict[str, torch.Tensor],
    mapping: Mapping,
    lowered: dict[str, torch.Tensor],
    dtype: str | None,
    in_file: dict[str, int],
) -> tuple[dict[str, torch.Tensor], str, list[str]]:
    """Return the tensors in the dtype of a file, that dtype, and notes on rounding.

    Args:
        tensors: name in the file -> tensor; a tensor under two names is stored once.
        mapping: the tensors that the converter reads.
        lowered: norm weights to write instead of those of the model.
        dtype: dtype of the file; None = as in the converted file if nothing is lost by it, else as in `tensors`.
        in_file: the dtypes of the converted file, with the number of tensors of each.
    """
    notes, originals = [], {name for name in in_file if getattr(torch, name).is_floating_point}
    if dtype is None:
        floats = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()}
        numbers = {key: tensor for key, tensor in floats.items() if key not in mapping.wide}
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


def _keeps_all(tensors: dict[str, torch.Tensor], lowered: dict[str, torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether a file in `dtype` gives the same tensors when it is converted again."""
    return all(
        same_bits((lowered[key].to(dtype).float() + 1).to(tensor.dtype), (lowered[key].float() + 1).to(tensor.dtype))
        if key in lowered
        else tensor.dtype == dtype or same_bits(tensor.to(dtype).to(tensor.dtype), tensor)
        for key, tensor in tensors.items()
    )


def _source_name(keymap: KeyMap, target: str) -> str:
    match = keymap.backward(target)
    return target if match is None else match.key
