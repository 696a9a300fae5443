"""The sequences of a batch: one per row of `[B, T, ...]`, or all of them in the row of `[1, total, ...]` (varlen).

`cu_seqlens` is `[S + 1]`, int32 or int64, and ascends from 0 to `total`. Sequence s is `[cu_seqlens[s],
cu_seqlens[s + 1])`.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._mode import COMPILED, EXPORTED, forbid_capture, mode


class Sequences(NamedTuple):
    """Which tokens of a batch belong to which sequence.

    Args:
        mask: `[B, T]` or, with bounds, `[1, total]` bool, True = keep; None = all.
        bounds: `cu_seqlens` of varlen sequences; None = one sequence per row.
        longest: with bounds, at least the length of the longest sequence.
        lengths: `[B]`, the positions of each row after which states are returned; None = all positions.
    """

    mask: Tensor | None = None
    bounds: Tensor | None = None
    longest: Any = None  # an integer, or the symbol of one in a program
    lengths: Tensor | None = None

    def number(self, x: Tensor) -> int:
        """Return the number of sequences in `x`."""
        return x.shape[0] if self.bounds is None else len(self.bounds) - 1

    def keep(self) -> Tensor:
        """Return a mask `[S, longest]` that is True for the tokens that `pad` copies."""
        assert self.bounds is not None
        return torch.arange(self.longest, device=self.bounds.device) < self.bounds.diff()[:, None]

    def pad(self, x: Tensor) -> Tensor:
        """Return `[1, total, ...]` as `[S, longest, ...]`, right-padded with zeros."""
        assert self.bounds is not None
        position = torch.arange(self.longest, device=x.device) + self.bounds[:-1, None]
        kept = self.keep()
        padded = x[0, position.clamp(max=max(x.shape[1] - 1, 0))]
        return padded.masked_fill(~kept.view(*kept.shape, *(1,) * (x.dim() - 2)), 0)

    def unpad(self, x: Tensor, total: int) -> Tensor:
        """Return `[S, longest, ...]` as `[1, total, ...]`, without the padding of `pad`."""
        assert self.bounds is not None
        return x[locate(self.bounds, total)][None]

    def padded(self) -> "Sequences":
        """Return the sequences of tokens that `pad` copied, with a mask."""
        return Sequences(self.keep() if self.mask is None else self.pad(self.mask))


ALL_TOKENS = Sequences()  # one sequence per row, without a mask


def in_rows(run: Callable[..., Any], *tokens: str, unpads: bool = True) -> Callable[..., Any]:
    """Return a function of any `sequences`, based on `run`, which requires one sequence per row and takes their mask.

    `tokens` are the names of its arguments `[1, total, ...]`. `unpads`: so is its (first) result.
    """

    def run_any(sequences: Sequences, **call: Any) -> Any:
        if sequences.bounds is None:
            return run(mask=sequences.mask, **call)
        total = call[tokens[0]].shape[1]
        padded: dict[str, Tensor] = {}
        for name in tokens:  # keys and values may be one tensor
            same = next((other for other in padded if call[other] is call[name]), None)
            padded[name] = sequences.pad(call[name]) if same is None else padded[same]
        result = run(mask=sequences.padded().mask, **call | padded)
        if not unpads:
            return result
        if isinstance(result, Tensor):
            return sequences.unpad(result, total)
        return sequences.unpad(result[0], total), *result[1:]

    return run_any


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
        if compares_length and mode() >= COMPILED:
            raise RuntimeError(f"{op} with cu_seqlens needs max_seqlen in a compiled program; pass max_seqlen")
    if cu_seqlens.device.type == "cpu" and (bounds := values(cu_seqlens)) is not None:
        longest = max(end - start for start, end in pairwise(bounds))
        if bounds[0] != 0 or bounds[-1] != total or any(start > end for start, end in pairwise(bounds)):
            raise ValueError(f"{op}: cu_seqlens must increase from 0 to {total}, the length, got {bounds}")
        if max_seqlen is not None and max_seqlen < longest:
            raise ValueError(f"{op}: max_seqlen is {max_seqlen}, but a sequence has length {longest}")
        return longest if max_seqlen is None else max_seqlen
    if max_seqlen is None and mode() < COMPILED and cu_seqlens.device.type in ("cpu", "meta"):
        raise RuntimeError(
            f"{op}: cu_seqlens has no values here (a fake or meta tensor, or `vmap` over it); pass max_seqlen"
        )
    lengths = cu_seqlens.diff()
    # PyTorch's native operators do not read past the end; on a CPU, the values are those of a fake tensor or of `vmap`.
    if mode() != EXPORTED and (mode() >= COMPILED or cu_seqlens.device.type != "cpu"):
        most = total if max_seqlen is None else max_seqlen
        if getattr(cu_seqlens, "_luna_mega_checked", None) != (most, total):
            fits = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total) & ((lengths >= 0) & (lengths <= most)).all()
            torch._assert_async(fits, f"{op}: cu_seqlens must increase from 0 to the length, by at most max_seqlen")
    return int(lengths.max()) if max_seqlen is None else max_seqlen


def values(cu_seqlens: Tensor) -> list[int] | None:
    """Return the values, or None if they cannot be read: in a program, for a fake tensor, and under `vmap` over it."""
    if mode() >= COMPILED:
        return None
    try:
        bounds: list[int] = cu_seqlens.tolist()
    except RuntimeError:
        return None
    return bounds


def checked_copy(cu_seqlens: Tensor, max_seqlen: int, total: int) -> Tensor:
    """Return a copy of checked bounds, for all layers of one call of a model: ops do not check it again.

    Only its creator may have it, because a user could write to it.
    """
    if cu_seqlens.device.type == "cpu" or torch.compiler.is_compiling():
        return cu_seqlens
    copy = cu_seqlens.clone()
    copy._luna_mega_checked = max_seqlen, total  # type: ignore[attr-defined]
    return copy


def locate(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the sequence index of every token and its position in the sequence, `[total]` each."""
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    return sequence, token - cu_seqlens[sequence]
