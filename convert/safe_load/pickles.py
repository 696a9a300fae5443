"""Check the pickles in a checkpoint for contents that would hang or crash torch.

A tuple that contains another tuple twice, to a depth of 40, takes a few hundred bytes, and 2^40 steps to hash. A
storage that the legacy format does not list would contain uninitialized memory.
"""

import pickletools
from typing import Any, BinaryIO, NamedTuple

MOST_VALUES, DEEPEST = 100_000, 50
# torch creates these from storages that it fills later, without a storage, or only in some versions (jagged tensors).
_UNSUPPORTED = {f"torch._utils.{name}" for name in ("_rebuild_nested_tensor", "_rebuild_wrapper_subclass")} | {
    "torch.nested._internal.nested_tensor._rebuild_njt"
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_POPS = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}


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
