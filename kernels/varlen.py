"""Conversion between varlen sequences `[1, total, ...]`, bounded by `cu_seqlens`, and padded ones `[B, T, ...]`.

`cu_seqlens` is `[B + 1]`, int32 or int64, and ascends from 0 to `total`. Sequence b is `[cu_seqlens[b],
cu_seqlens[b+1])`.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ._export import forbid_capture, in_program, is_exporting


def check_cu_seqlens(
    op: str, cu_seqlens: Tensor, max_seqlen: int | None, total: int, *, compares_length: bool = False
) -> int:
    """Check `cu_seqlens` and return `max_seqlen`; if it is None, compute it, which synchronizes with the device.

    An operator that `compares_length` needs `max_seqlen` in compiled programs, which cannot contain the comparison.

    On a GPU and in compiled programs the values are checked on the device, without synchronization. Invalid values stop
    the program with an assertion because all later results could be wrong.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op} needs cu_seqlens [sequences + 1] of int32 or int64, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if max_seqlen is None:
        forbid_capture(cu_seqlens, f"{op} with cu_seqlens and without max_seqlen", "pass max_seqlen")
        if compares_length and in_program():
            raise RuntimeError(f"{op} with cu_seqlens needs max_seqlen in a compiled program; pass max_seqlen")
    if cu_seqlens.device.type == "cpu" and (bounds := values(cu_seqlens)) is not None:
        longest = max(end - start for start, end in pairwise(bounds))
        if bounds[0] != 0 or bounds[-1] != total or any(start > end for start, end in pairwise(bounds)):
            raise ValueError(f"{op}: cu_seqlens must increase from 0 to {total}, the length, got {bounds}")
        if max_seqlen is not None and max_seqlen < longest:
            raise ValueError(f"{op}: max_seqlen is {max_seqlen}, but a sequence has length {longest}")
        return longest if max_seqlen is None else max_seqlen
    if max_seqlen is None and not in_program() and cu_seqlens.device.type in ("cpu", "meta"):
        raise RuntimeError(
            f"{op}: cu_seqlens has no values here (a fake or meta tensor, or `vmap` over it); pass max_seqlen"
        )
    lengths = cu_seqlens.diff()
    # PyTorch's native operators do not read past the end; on a CPU, the values are those of a fake tensor or of `vmap`.
    if not is_exporting() and (in_program() or cu_seqlens.device.type != "cpu"):
        most = total if max_seqlen is None else max_seqlen
        if getattr(cu_seqlens, "_luna_mega_checked", None) != (most, total):
            _assert_on_device(op, cu_seqlens, lengths, most, total)
    return int(lengths.max()) if max_seqlen is None else max_seqlen


def values(cu_seqlens: Tensor) -> list[int] | None:
    """Return the values, or None if they cannot be read: in a program, for a fake tensor, and under `vmap` over it."""
    if in_program():
        return None
    try:
        bounds: list[int] = cu_seqlens.tolist()
    except RuntimeError:
        return None
    return bounds


def _assert_on_device(op: str, cu_seqlens: Tensor, lengths: Tensor, most: int, total: int) -> None:
    right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total) & ((lengths >= 0) & (lengths <= most)).all()
    torch._assert_async(right, f"{op}: cu_seqlens must increase from 0 to the length, by at most max_seqlen")


def checked_copy(cu_seqlens: Tensor, max_seqlen: int, total: int) -> Tensor:
    """Return a copy of checked bounds, for all layers of one call of a model: ops do not check it again.

    Only its creator may have it, because a user could write to it.
    """
    if cu_seqlens.device.type == "cpu" or torch.compiler.is_compiling():
        return cu_seqlens
    copy = cu_seqlens.clone()
    copy._luna_mega_checked = max_seqlen, total  # type: ignore[attr-defined]
    return copy


def pad(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return `[1, total, ...]` as `[B, max_seqlen, ...]`, right-padded with zeros."""
    position = torch.arange(max_seqlen, device=x.device) + cu_seqlens[:-1, None]
    kept = keep(cu_seqlens, max_seqlen)
    rows = x[0, position.clamp(max=max(x.shape[1] - 1, 0))]
    return rows.masked_fill(~kept.view(*kept.shape, *(1,) * (x.dim() - 2)), 0)


def unpad(x: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Return `[B, max_seqlen, ...]` as `[1, total, ...]`, without the padding of `pad`."""
    row, position = locate(cu_seqlens, total)
    return x[row, position][None]


def locate(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the sequence index of every token and its position in the sequence, `[total]` each."""
    token = torch.arange(total, device=cu_seqlens.device)
    row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    return row, token - cu_seqlens[row]


def keep(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return a mask `[B, max_seqlen]` that is True for the tokens that `pad` copies."""
    return torch.arange(max_seqlen, device=cu_seqlens.device) < cu_seqlens.diff()[:, None]


def one_by_one(
    run: Callable[..., Any], call: dict[str, Any], bounds: list[int], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute a varlen call with states one sequence at a time, because padding would decay the states.

    `run` returns the output and the last state. `shape` and `dtype` of a state are used if none is given.
    """
    x, mask, first = call["x"], call["mask"], call["initial_state"]
    outputs, lasts = [], []
    if first is None:
        first = x.new_zeros(len(bounds) - 1, *shape, dtype=dtype)
    for index, (start, end) in enumerate(pairwise(bounds)):
        state = first[index : index + 1]
        if start < end:
            part = {"x": x[:, start:end], "mask": None if mask is None else mask[:, start:end]}
            output, state = run(**call | part | {"initial_state": state, "return_state": True})
            outputs.append(output)
        lasts.append(state)
    return torch.cat(outputs, 1), torch.cat(lasts)
