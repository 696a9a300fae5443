"""Sequences laid end to end, `[1, total, ...]`, bounded by `cu_seqlens`, and the same filled up, `[B, T, ...]`.

`cu_seqlens` is `[B + 1]` int32 or int64, ascending from 0 to `total`: sequence b is `[cu_seqlens[b], cu_seqlens[b+1])`.
"""

from typing import NamedTuple

import torch
from torch import nn


class Sequences(NamedTuple):
    """What a model's layers get in place of a mask where its tokens `[1, total, ...]` are laid end to end."""

    cu_seqlens: torch.Tensor
    max_seqlen: int


def as_options(mask: torch.Tensor | Sequences | None) -> dict:
    """The keyword arguments that an op takes `mask` by."""
    return mask._asdict() if isinstance(mask, Sequences) else {"mask": mask}


def check(op: str, cu_seqlens: torch.Tensor, max_seqlen: int | None, total: int) -> int:
    """Check `cu_seqlens` and return `max_seqlen`, read from them where it is None, which waits for the device."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op} needs cu_seqlens [sequences + 1] of int32 or int64, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    # On a GPU looking at the values would wait for it.
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        lengths = cu_seqlens.diff()
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != total or (lengths < 0).any():
            raise ValueError(f"{op}: cu_seqlens must rise from 0 to {total}, the length, got {cu_seqlens.tolist()}")
        if max_seqlen is not None and max_seqlen < lengths.max():
            raise ValueError(f"{op}: max_seqlen is {max_seqlen}, but a sequence has length {int(lengths.max())}")
    return int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen


def pad(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """Fill sequences `[1, total, ...]` up on the right with zeros, `[B, max_seqlen, ...]`."""
    position = torch.arange(max_seqlen, device=x.device) + cu_seqlens[:-1, None]
    kept = keep(cu_seqlens, max_seqlen)
    rows = x[0, position.clamp(max=max(x.shape[1] - 1, 0))]
    return rows.masked_fill(~kept.view(*kept.shape, *(1,) * (x.dim() - 2)), 0)


def unpad(x: torch.Tensor, cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Take out of `[B, max_seqlen, ...]` what `pad` has filled up, `[1, total, ...]`."""
    row, position = locate(cu_seqlens, total)
    return x[row, position][None]


def locate(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence of every token and its position within it, `[total]` each."""
    token = torch.arange(total, device=cu_seqlens.device)
    row = torch.searchsorted(cu_seqlens[1:], token, right=True)
    return row, token - cu_seqlens[row]


def keep(cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """Return a mask `[B, max_seqlen]`, True where `pad` puts a token."""
    return torch.arange(max_seqlen, device=cu_seqlens.device) < cu_seqlens.diff()[:, None]


class Packing(NamedTuple):
    """How the tokens of a batch `[B, T]` are laid end to end."""

    sequences: Sequences
    places: torch.Tensor | None  # of the tokens that are left, `[total]`, in the batch flattened; None = all are

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, ...]` -> `[1, total, ...]`."""
        x = x.flatten(0, 1)
        return (x if self.places is None else x[self.places])[None]

    def unpack(self, x: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """The way back, with zeros where nothing was left."""
        if self.places is None:
            return x[0].unflatten(0, (batch, length))
        rows = x.new_zeros(batch * length, *x.shape[2:])
        return rows.index_copy(0, self.places, x[0]).unflatten(0, (batch, length))


def packing(mask: torch.Tensor | None, starts: torch.Tensor) -> Packing:
    """Leave out what `mask` `[B, T]` does not keep; `starts` `[B, T]` is True where a sequence begins. Both bool.

    Waits for the device, which counts the tokens.
    """
    sequence, places = starts.flatten().cumsum(dim=0) - 1, None
    count = int(sequence[-1]) + 1
    if mask is not None:
        places = mask.flatten().nonzero()[:, 0]
        sequence = sequence[places]
    lengths = torch.bincount(sequence, minlength=count)
    cu_seqlens = nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return Packing(Sequences(cu_seqlens, int(lengths.max())), places)


PACKED_BATCH = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def find_packing(
    shape: tuple[int, int],
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    options: dict,
    unpad: bool,
) -> Packing | None:
    """How a model lays out a batch `[B, T]`, None where it stays as it is.

    A batch is packed where `options` has the `cu_seq_lens_q` or the `seq_idx` of `DataCollatorWithFlattening`, or where
    `position_ids` do not rise within a row. With `unpad` the padding that `mask` tells is left out of any other.
    Compiled programs look at `cu_seq_lens_q` alone, as the others are values.
    """
    cu_seqlens = options.get("cu_seq_lens_q")
    if cu_seqlens is not None:
        longest = check("a packed batch", cu_seqlens, options.get("max_length_q"), shape[0] * shape[1])
        return Packing(Sequences(cu_seqlens, longest), None)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    starts = None
    if options.get("seq_idx") is not None:
        starts = options["seq_idx"].diff(dim=1) != 0
    elif position_ids is not None:
        starts = position_ids.diff(dim=1) <= 0
    if starts is not None and starts.any():
        return packing(mask, nn.functional.pad(starts, (1, 0), value=True).expand(shape))
    if unpad and mask is not None:
        starts = torch.zeros_like(mask)
        starts[:, 0] = True
        return packing(mask, starts)
    return None


def refuse_packed(model: object, inputs: torch.Tensor, position_ids: torch.Tensor | None, options: dict) -> None:
    """Raise `ValueError` for a packed batch where every row of `inputs` `[B, T, ...]` gets one label."""
    if find_packing(inputs.shape[:2], None, position_ids, options, False) is not None:
        raise ValueError(f"{type(model).__name__} needs one sequence a row: pad the batch, do not pack it")
