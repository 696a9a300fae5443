"""Check the content of a checkpoint: its pickles before torch loads them, and the loaded values.

A small file can contain values that take all memory or time: a tuple that contains another tuple twice, to a depth of
40, takes a few hundred bytes, and 2^40 steps to hash. A storage that the legacy format does not list would contain
uninitialized memory.
"""

import argparse
import pickletools
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy
import torch

from luna_mega.errors import ConversionError, shown

MOST_VALUES, DEEPEST = 100_000, 50
# torch creates these from storages that it fills later, without a storage, or only in some versions (jagged tensors).
_UNSUPPORTED = {f"torch._utils.{name}" for name in ("_rebuild_nested_tensor", "_rebuild_wrapper_subclass")} | {
    "torch.nested._internal.nested_tensor._rebuild_njt"
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_POPS = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
# The original stores tied weights once and does not expand tensors. Small models are not checked.
_MOST_TIMES, _ALWAYS_ALLOWED = 4, 1 << 30
_CHARACTERS_OF_A_VALUE = 100  # number of characters of a text that count as one value


class InvalidPickle(ValueError):
    """A pickle that must not be loaded."""


class _Item(NamedTuple):
    """A value on the stack of the unpickler.

    If the value is a tuple, `content` has its items. `values` and `depth` count all values inside it.
    """

    content: Any = None
    values: int = 1
    depth: int = 0


def check_legacy_pickles(file: BinaryIO) -> None:
    """Check the five pickles of the legacy format: magic number, version, system, content, and keys of the storages."""
    file.seek(0)
    for _ in range(3):
        check_pickle(file)
    _, storages = check_pickle(file)
    listed, _ = check_pickle(file)
    if not storages <= listed:
        raise InvalidPickle(f"the file has no data for {len(storages - listed)} of its storages")


def check_pickle(file: BinaryIO) -> tuple[set[Any], set[Any]]:
    """Interpret a pickle without creating objects; return its strings and the keys of its storages.

    torch reports a damaged pickle.
    """
    stack: list[_Item] = []
    marks: list[int] = []
    memo: dict[int, _Item] = {}
    strings, storages = set(), set()
    try:
        for instruction, argument, _ in pickletools.genops(file):
            name = instruction.name
            if name == "MARK":
                marks.append(len(stack))
            elif name == "TUPLE" or name in _TUPLES:
                start = marks.pop() if name == "TUPLE" else len(stack) - _TUPLES[name]
                stack[start:] = [_tuple_of(stack[start:])]
            elif name in ("APPENDS", "SETITEMS"):
                del stack[marks.pop() :]
            elif name in _POPS:
                del stack[-_POPS[name] :]
            elif name in ("REDUCE", "NEWOBJ"):
                stack[-2:] = [stack[-1]]  # the result can contain all arguments
            elif name == "BINPERSID":
                storages.add(_key_of(stack.pop().content))
                stack.append(_Item())
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name not in ("PROTO", "STOP"):
                if name == "GLOBAL" and (function := argument.replace(" ", ".")) in _UNSUPPORTED:
                    raise InvalidPickle(f"it has a tensor that is not dense, created by {function}")
                stack.append(_Item(argument))
                strings |= {argument} if isinstance(argument, str) else set()
    except InvalidPickle:
        raise
    except Exception:  # pickletools and the lines above raise many types for a damaged pickle
        pass
    return strings, storages


def _key_of(persistent_id: Any) -> str:
    """Return the key from the persistent id ("storage", type, key, location, size)."""
    if not isinstance(persistent_id, list) or len(persistent_id) < 5 or not isinstance(persistent_id[2].content, str):
        raise InvalidPickle("a storage has no name")
    return persistent_id[2].content


def _tuple_of(items: list[_Item]) -> _Item:
    found = _Item(items, 1 + sum(item.values for item in items), 1 + max((item.depth for item in items), default=0))
    if found.values > MOST_VALUES or found.depth > DEEPEST:
        raise InvalidPickle(f"a tuple is nested more than {DEEPEST} deep or contains more than {MOST_VALUES:,} values")
    return found


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


def other_weights(state: dict) -> list[str]:
    """Return a warning for each container outside of `model` whose tensors have the names of the model's tensors."""
    names, found, seen, waiting = set(state["model"]), [], {id(state["model"])}, [("", state)]
    while waiting:
        place, value = waiting.pop()
        if not isinstance(value, Mapping) or id(value) in seen:
            continue
        seen.add(id(value))
        tensors = {str(key).removeprefix("module.") for key, part in value.items() if is_dense(part)}
        if shared := len(names & tensors):
            found.append(
                f"field {shown(place)} has other values of {shared} of the {len(names)} tensors, such as averaged "
                "weights, which are not converted; to convert them, save a file with them as the field 'model'"
            )
        waiting += [(f"{place}.{key}" if place else str(key), part) for key, part in value.items()]
    return found


def plain_args(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the args as a dict of plain values; raise an error if there are more values than in any model."""
    count = 0

    def plain(value: Any, depth: int = 0) -> Any:
        nonlocal count
        if depth > DEEPEST:
            raise ConversionError(f"field 'args' contains itself, or is nested more than {DEEPEST} deep")
        count += 1
        if is_dense(value):
            count += value.numel()
        elif isinstance(value, (str, bytes, bytearray)):
            count += len(value) // _CHARACTERS_OF_A_VALUE
        elif isinstance(value, (set, frozenset)):
            count += len(value)
        if count > MOST_VALUES:
            raise ConversionError(
                f"field 'args' contains more than {MOST_VALUES:,} values, but a model has a few hundred"
            )
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        if isinstance(value, numpy.generic) or is_dense(value):
            return value.tolist()
        if isinstance(value, Mapping):
            return {str(plain(key, depth + 1)): plain(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return (list if isinstance(value, list) else tuple)(plain(inner, depth + 1) for inner in value)
        return value

    return plain(namespace)
