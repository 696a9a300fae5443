"""Checks of the pickles in a checkpoint, before torch reads them, for contents that would hang or crash it.

A tuple that contains another one twice, forty levels deep, takes a few hundred bytes and 2^40 steps to hash. A storage
that the legacy format does not list keeps the previous content of the memory.
"""

import pickletools
from typing import Any, BinaryIO, NamedTuple

MOST_VALUES, DEEPEST = 100_000, 50
# torch builds these from storages that it fills later, or without any storage.
_REFUSED = {f"torch._utils.{name}" for name in ("_rebuild_nested_tensor", "_rebuild_wrapper_subclass")}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_POPS = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}


class RefusedPickle(ValueError):
    """A pickle that torch should not read; the message names the reason."""


class _Item(NamedTuple):
    """A value on the stack of the unpickler: for a tuple its items, and the number and depth of all values in it."""

    content: Any = None
    values: int = 1
    depth: int = 0


def check_zip_pickle(file: BinaryIO, start: int) -> None:
    """Check the pickle of an archive, which starts at byte `start` of the file.

    Raises:
        RefusedPickle: it nests tuples too deeply, or makes tensors that no checkpoint of the original has.
    """
    file.seek(start)
    _scan(file)


def check_legacy_pickles(file: BinaryIO) -> None:
    """Check the five pickles of the legacy format: magic number, version, system, content, and keys of the storages.

    Raises:
        RefusedPickle: as `check_zip_pickle`, or a storage of the content is not in the list of keys.
    """
    file.seek(0)
    for _ in range(3):
        _scan(file)
    _, storages = _scan(file)
    listed, _ = _scan(file)
    if not storages <= listed:
        raise RefusedPickle(f"the file has no data for {len(storages - listed)} of its storages")


def _scan(file: BinaryIO) -> tuple[set[Any], set[Any]]:
    """Follow the instructions of a pickle without building anything; return its strings and the keys of its storages.

    A damaged pickle is left to torch, which stops at the same instruction.
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
                stack[-2:] = [stack[-1]]  # the result may hold all arguments
            elif name == "BINPERSID":
                storages.add(_key_of(stack.pop().content))
                stack.append(_Item())
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name not in ("PROTO", "STOP"):
                if name == "GLOBAL" and (refused := argument.replace(" ", ".")) in _REFUSED:
                    raise RefusedPickle(f"it holds a tensor that is not dense, made by {refused}")
                stack.append(_Item(argument))
                strings |= {argument} if isinstance(argument, str) else set()
    except RefusedPickle:
        raise
    except Exception:  # pickletools and the lines above raise many types for a damaged pickle
        pass
    return strings, storages


def _key_of(persistent_id: Any) -> str:
    """Return the key in ("storage", type, key, location, size), a tuple that is written out in the file."""
    if not isinstance(persistent_id, list) or len(persistent_id) < 5 or not isinstance(persistent_id[2].content, str):
        raise RefusedPickle("a storage has no name")
    return persistent_id[2].content


def _tuple_of(items: list[_Item]) -> _Item:
    whole = _Item(items, 1 + sum(item.values for item in items), 1 + max((item.depth for item in items), default=0))
    if whole.values > MOST_VALUES or whole.depth > DEEPEST:
        raise RefusedPickle(f"a tuple is nested more than {DEEPEST} deep or holds more than {MOST_VALUES:,} values")
    return whole
